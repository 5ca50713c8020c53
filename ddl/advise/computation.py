"""How long the parts of a step take on all ranks at once, if nothing is aggregated.

Gradients are brought into buckets as in training, by the same hooks, which tell when each parameter
has its gradient. Every step begins at a barrier. Of gradients, those of the last rank count, since
an aggregation waits for them.
"""

from __future__ import annotations

import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ddl.advise.together import Samples
from ddl.advise.workloads import Workload
from ddl.collectives import messages
from ddl.comm import Communicator
from ddl.perfmodel.iteration import IterationProfile, LayerProfile
from ddl.reduction import hooks
from ddl.reduction.buckets import NamedParameter, make_buckets

LEARNING_RATE = 1e-3
MOMENTUM = 0.9


class Computation:
    """A model, trained by each rank on its own."""

    def __init__(self, workload: Workload, bucket_bytes: int, comm: Communicator) -> None:
        """Hook into the parameters.

        Args:
            workload: its model is used up.
            bucket_bytes: of the buckets that gradients go to.
            comm: the ranks; used for barriers and to compare notes.
        """
        self._workload = workload
        self._comm = comm
        named = list(workload.model.named_parameters())
        self.members = [NamedParameter(n, p) for n, p in named if p.requires_grad]
        places = {id(member.parameter): i for i, member in enumerate(self.members)}
        self._buckets = make_buckets(self.members, bucket_bytes, dense_below=0)
        self._layer = [[places[id(m.parameter)] for m in b.members] for b in self._buckets]
        self._ready = [0.0] * len(self.members)
        self._handles = [
            hooks.listen(self, member.parameter, bucket.index, place)
            for bucket in self._buckets
            for place, member in enumerate(bucket.members)
        ]
        parameters = [member.parameter for member in self.members]
        self._optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)
        self._ready_samples = Samples(comm, max)  # an aggregation waits for the last rank
        self._part_samples = Samples(comm)
        self._shares: list[float] = []
        threads = torch.get_num_threads()
        neighbours = messages.gather_objects(comm, (machine(), usable_cores(), threads))
        self._usable = usable_per_rank(neighbours, comm.rank)

    def on_gradient(self, index: int, place: int) -> None:
        """See `ddl.reduction.hooks.Listener`."""
        self._buckets[index].absorb(place)
        self._ready[self._layer[index][place]] = time.perf_counter()

    def step(self, count: bool = True) -> None:
        """Time one step. Collective.

        Args:
            count: whether it enters the medians; a first step does not deserve it.
        """
        self._optimizer.zero_grad()
        messages.barrier(self._comm)
        begin, used = time.perf_counter(), time.process_time()
        batch = self._workload.make_batch()
        read = time.perf_counter()
        loss = self._workload.loss(batch)
        forward = time.perf_counter()
        self._ready = [forward] * len(self.members)
        loss.backward()
        backward = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        updated = time.perf_counter()
        cpu_seconds = time.process_time() - used
        if not count:
            return
        self._ready_samples.add([moment - begin for moment in (*self._ready, backward)])
        self._part_samples.add(
            [read - begin, forward - read, backward - forward, updated - backward]
        )
        shares = messages.gather_objects(self._comm, cpu_seconds / (updated - begin))
        self._shares.append(sum(shares) / len(shares))

    @property
    def settled(self) -> bool:
        """Whether the time of a backward pass is known well enough: see `Samples.settled`."""
        return self._ready_samples.settled

    @property
    def own_share(self) -> float:
        """Of the cores that these ranks could use, what they got, if all machines are alike."""
        return min(1.0, statistics.median(self._shares) / self._usable)

    @property
    def backward_seconds(self) -> float:
        """Of a backward pass, mean over ranks."""
        return self._part_samples.medians()[2]

    def beside(self, work: Callable[[], None]) -> tuple[float, float]:
        """Run a backward pass, and `work` in a thread beside it. Collective.

        Returns:
            Seconds after which the backward pass, and the work, were done.
        """
        ended, failures = [], []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)
            ended.append(time.perf_counter())

        self._optimizer.zero_grad()
        loss = self._workload.loss(self._workload.make_batch())
        thread = threading.Thread(target=run, name="ddl-advise", daemon=True)
        messages.barrier(self._comm)
        begin = time.perf_counter()
        thread.start()
        loss.backward()
        backward = time.perf_counter()
        thread.join()
        if failures:
            raise failures[0]
        return backward - begin, ended[0] - begin

    def gradient(self) -> Tensor:
        """float32 [all parameters], a gradient of this rank, in the order of launches."""
        self._workload.loss(self._workload.make_batch()).backward()
        flat = torch.cat([bucket.flat.float() for bucket in self._buckets])
        self._optimizer.zero_grad()
        return flat

    def profile(self) -> IterationProfile:
        """The medians of the steps so far; the same on every rank.

        The backward pass of a layer lasts from the gradient of the layer above to its own; of those
        that come in another order, the last counts. The forward pass is not split: the first layer
        has all of it.
        """
        read, forward, _, update = self._part_samples.medians()
        *ready, backward = self._ready_samples.medians()
        ready[0] = backward
        latest = read + forward
        ends = [latest]
        for moment in reversed(ready):
            latest = max(latest, moment)
            ends.append(latest)
        t_b = [end - start for start, end in pairwise(ends)][::-1]
        layers = tuple(
            LayerProfile(member.name, member.parameter.numel(), forward if i == 0 else 0.0, t_b[i])
            for i, member in enumerate(self.members)
        )
        return IterationProfile(layers, t_io=read, t_u=update, batch=self._workload.batch)

    def close(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles:
            handle.remove()


def cores() -> int:
    """Cores that this process may use."""
    return len(usable_cores())


def usable_cores() -> list[int]:
    """Their numbers."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return list(range(os.cpu_count() or 1))


def machine() -> str:
    """The same on all ranks that share a machine, even where each has a network of its own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not on Linux
        return platform.node()


def usable_per_rank(ranks: Sequence[tuple[str, Sequence[int], int]], rank: int) -> float:
    """Cores for one rank, if those of a machine share what they may use.

    Args:
        ranks: of each rank its machine, the cores it may use, and its number of threads.
        rank: whose machine counts.
    """
    here = [(usable, threads) for place, usable, threads in ranks if place == ranks[rank][0]]
    available = len(set().union(*(usable for usable, _ in here)))
    return min(available, sum(threads for _, threads in here)) / len(here)
