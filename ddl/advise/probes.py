"""How long aggregating a bucket takes, on all ranks at once: a sweep over two sizes.

A probe is an optimizer over two tensors, one of the size of a real bucket and one smaller, so what
is timed is the engine itself, with the collective, the levels and the wire that it would use. The
entries are those of a real gradient, since selection and merging depend on them.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from ddl.advise.candidates import Candidate
from ddl.advise.computation import Computation
from ddl.advise.situation import Aggregation
from ddl.advise.together import Samples
from ddl.aggregation.aggregator import Aggregator
from ddl.collectives import messages
from ddl.comm import Communicator
from ddl.optimizer import DistributedOptimizer
from ddl.perfmodel.contention import Sharing
from ddl.perfmodel.plans import Linear
from ddl.reduction.buckets import Bucket

SMALLER = 8  # times
MOST_BESIDE = 50  # aggregations beside one backward pass


class Probe:
    """One candidate, aggregating two buckets again and again."""

    def __init__(
        self,
        candidate: Candidate,
        gradient: Tensor,
        largest: int,
        density: float,
        comm: Communicator,
    ) -> None:
        """Make the two buckets. Collective.

        Args:
            candidate: to be timed.
            gradient: float32, at least as long as the larger bucket.
            largest: elements of that, at least 2.
            density: fraction of entries kept.
            comm: the ranks.
        """
        self._comm = comm
        self._density = density
        self._gradient = gradient
        sizes = (largest, max(1, largest // SMALLER))
        tensors = [nn.Parameter(torch.zeros(size)) for size in sizes]
        self._optimizer = DistributedOptimizer(
            torch.optim.SGD(tensors, lr=0.0),
            [(f"probe of {size}", tensor) for size, tensor in zip(sizes, tensors, strict=True)],
            **candidate.arguments,
            density=density,
            bucket_bytes=4 * largest,  # the smaller one does not fit in
            comm=comm,
        )
        owing = sorted(self._optimizer.reducer.owing, key=lambda pair: -pair[0].flat.numel())
        self._rooms: list[tuple[Bucket, Aggregator]] = owing
        self._alone = [Samples(comm) for _ in sizes]
        self._times = 0  # aggregations beside a backward pass, about as long as that
        self._beside = Samples(comm)

    def measure(self, computation: Computation, t_b: float, count: bool = True) -> None:
        """Time each bucket alone, then the larger one beside a backward pass. Collective.

        Args:
            computation: of the model.
            t_b: seconds of a backward pass, about; the same on every rank.
            count: whether it enters the medians.
        """
        for (bucket, aggregator), samples in zip(self._rooms, self._alone, strict=True):
            row = self._aggregate(bucket, aggregator)
            if count:
                samples.add(row)
        if not count:
            return
        bucket, aggregator = self._rooms[0]
        if not self._times:
            select, communicate, *_ = self._alone[0].medians()
            wanted = round(t_b / max(1e-6, select + communicate))
            self._times = min(MOST_BESIDE, max(1, wanted))
        bucket.flat.copy_(self._gradient[: bucket.flat.numel()])

        def work() -> None:
            for turn in range(self._times):
                if turn:
                    aggregator.apply(bucket.flat)
                aggregator.begin(bucket.flat, self._density)

        self._beside.add(computation.beside(work))
        aggregator.apply(bucket.flat)

    def _aggregate(self, bucket: Bucket, aggregator: Aggregator) -> list[float]:
        """Seconds of selecting, of the rest of the background thread's work, of applying; bytes."""
        bucket.flat.copy_(self._gradient[: bucket.flat.numel()])
        messages.barrier(self._comm)
        begin = time.perf_counter()
        outcome = aggregator.begin(bucket.flat, self._density)
        ended = time.perf_counter()
        aggregator.apply(bucket.flat)
        applied = time.perf_counter()
        select = outcome.select_seconds
        return [select, ended - begin - select, applied - ended, float(outcome.bytes_sent)]

    def aggregation(self, t_b: float) -> Aggregation:
        """What was found so far; the same on every rank.

        Args:
            t_b: seconds of a backward pass alone.
        """
        sizes = [bucket.flat.numel() for bucket, _ in self._rooms]
        rows = [samples.medians() for samples in self._alone]
        select, communicate, apply, sent = (
            _line(dict(zip(sizes, column, strict=True))) for column in zip(*rows, strict=True)
        )
        alone = self._times * (rows[0][0] + rows[0][1])
        sharing = Sharing.observed(t_b, alone, *self._beside.medians())
        return Aggregation(select, communicate, apply, sent, sharing)

    def close(self) -> None:
        """Free the communicators. Collective."""
        self._optimizer.close()


def _line(seconds: dict[int, float]) -> Linear:
    """Through both sizes; where that would be negative somewhere, as good at the larger one."""
    (large, slow), *rest = sorted(seconds.items(), reverse=True)
    for small, quick in rest:
        each = (slow - quick) / (large - small)
        startup = slow - each * large
        if startup >= 0:
            return Linear(startup, each) if each >= 0 else Linear(slow, 0.0)
    return Linear(0.0, slow / large)
