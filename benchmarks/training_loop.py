"""Trains, and times what an iteration of S-SGD consists of.

    t_io, t_h2d    read a batch; copy it to the device
    t_f, t_b       forward pass with the loss; backward pass
    t_s, t_c       select and communicate, on the engine's background thread
    exposed        what of both the backward pass does not hide, and bringing the averages in place
    t_u            the optimizer's update

An iteration is t_io + t_h2d + t_f + t_b + exposed + t_u (arXiv 1711.05979, performance models).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from training_clock import Clock, Rate, Spread, rate, spread
from training_models import loss_of

import ddl
from ddl.collectives import messages
from ddl.comm import Communicator

LAPS = ("t_io", "t_h2d", "t_f", "t_b", "exposed", "t_u")
BACKGROUND = ("t_s", "t_c")
BACKWARD_BEGINS = LAPS.index("t_b")


@dataclass(frozen=True)
class Schedule:
    """How long to train: `iters` groups of `batches` iterations, after `warmup` iterations."""

    warmup: int
    batches: int
    iters: int


class BucketTimes(NamedTuple):
    """What one bucket takes.

    Attributes:
        numel: entries.
        select: seconds.
        communicate: seconds, with the waiting for slower ranks.
    """

    numel: int
    select: float
    communicate: float


@dataclass
class Samples:
    """What one rank has measured.

    Attributes:
        parts: seconds of each iteration, by `LAPS` and, where there is an engine, `BACKGROUND`.
        rates: samples a second of each group of iterations.
        ready: seconds from the begin of the backward pass to each parameter's gradient, of each
            iteration.
        buckets: of each iteration, in the order of launches; none without an engine.
    """

    parts: list[dict[str, float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    ready: list[list[float]] = field(default_factory=list)
    buckets: list[list[BucketTimes]] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """What all ranks have measured.

    Attributes:
        parts: seconds, means over ranks, of which medians and quartiles over iterations; and their
            sum, "iteration".
        ready: medians of `Samples.ready` over iterations, means over ranks.
        buckets: the same of `Samples.buckets`.
        per_worker: samples a second of one rank.
        total: of all ranks together.
        rates: means over ranks of each group of iterations.
    """

    parts: dict[str, Spread]
    ready: list[float]
    buckets: list[BucketTimes]
    per_worker: Rate
    total: Rate
    rates: list[float]

    @property
    def iteration(self) -> float:
        """Seconds."""
        return self.parts["iteration"].median

    @classmethod
    def of(cls, ranks: list[Samples]) -> Measured:
        """Bring together what the ranks have measured in the same iterations."""
        iterations = []
        for rows in zip(*(samples.parts for samples in ranks), strict=True):
            means = {part: statistics.fmean(row[part] for row in rows) for part in rows[0]}
            iterations.append({**means, "iteration": sum(means[part] for part in LAPS)})
        parts = {name: spread([row[name] for row in iterations]) for name in iterations[0]}
        groups = list(zip(*(samples.rates for samples in ranks), strict=True))
        numels, selects, communicates = (
            _typical([[[bucket[at] for bucket in row] for row in one.buckets] for one in ranks])
            for at in range(len(BucketTimes._fields))
        )
        buckets = zip(map(int, numels), selects, communicates, strict=True)
        return cls(
            parts=parts,
            ready=_typical([samples.ready for samples in ranks]),
            buckets=[BucketTimes(*bucket) for bucket in buckets],
            per_worker=rate([one for group in groups for one in group]),
            total=rate([sum(group) for group in groups]),
            rates=[statistics.fmean(group) for group in groups],
        )


def _typical(ranks: list[list[list[float]]]) -> list[float]:
    """Medians over iterations, of which means over ranks; indices are rank, iteration, number."""
    medians = [[statistics.median(of) for of in zip(*rows, strict=True)] for rows in ranks]
    return [statistics.fmean(column) for column in zip(*medians, strict=True)]


class GradientTimes:
    """Notes when each parameter gets its gradient."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        """Listen to every parameter of the model."""
        self._parameters = list(model.parameters())
        self._clock = clock
        self._moments: dict[int, Any] = {}
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: Tensor) -> None:
        self._moments[id(parameter)] = self._clock.now()

    def since(self, begin: Any) -> list[float]:
        """Seconds from a moment to each gradient, in the order of the model's parameters."""
        return [self._clock.between(begin, self._moments[id(p)]) for p in self._parameters]


class Training:
    """One rank's model, data and optimizer."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], Optimizer],
        batches: Iterator[list[Tensor]],
        batch_size: int,
        device: torch.device,
        *,
        channels_last: bool,
        non_blocking: bool,
    ) -> None:
        """Bring the model to the device. Collective if its optimizer is a distributed one.

        Args:
            model: on the CPU.
            make_optimizer: of the model on the device; a `ddl.DistributedOptimizer` communicates.
            batches: pairs of inputs and targets, for ever.
            batch_size: samples in each.
            device: where to compute.
            channels_last: whether images and weights lie in that order in memory.
            non_blocking: whether copies to the device are not waited for; needs pinned memory.
        """
        self.model = model.train().to(device)
        if channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.optimizer = make_optimizer(self.model)
        self._batches, self._batch_size = batches, batch_size
        self._device, self._channels_last = device, channels_last
        self._non_blocking = non_blocking
        self._clock = Clock(device)
        self._times = GradientTimes(self.model, self._clock)

    def warm_up(self, count: int) -> None:
        """Iterations that do not count: they compile, allocate and start threads."""
        for _ in range(count):
            self._iterate(Samples())

    def group(self, count: int, samples: Samples) -> None:
        """Iterations that are added to the samples, one by one and as a rate."""
        begin = time.perf_counter()
        for _ in range(count):
            self._iterate(samples)
        samples.rates.append(self._batch_size * count / (time.perf_counter() - begin))

    def _iterate(self, samples: Samples) -> None:
        """One iteration, added to the samples."""
        optimizer = self.optimizer
        engine = optimizer if isinstance(optimizer, ddl.DistributedOptimizer) else None
        before = {} if engine is None else _by_bucket(engine)
        moments = [self._clock.now()]

        def lap() -> None:
            moments.append(self._clock.now())

        inputs, targets = next(self._batches)
        lap()
        inputs, targets = self._copy(inputs), self._copy(targets)
        lap()
        loss = loss_of(self.model, inputs, targets)
        lap()
        loss.backward()
        lap()
        if engine is not None:
            engine.synchronize()
        lap()
        optimizer.step()
        optimizer.zero_grad()
        lap()
        self._clock.settle()
        parts = dict(zip(LAPS, self._clock.laps(moments), strict=True))
        if engine is not None:
            none = BucketTimes(0, 0.0, 0.0)
            buckets = [
                BucketTimes(
                    now.numel,
                    now.select - before.get(key, none).select,
                    now.communicate - before.get(key, none).communicate,
                )
                for key, now in _by_bucket(engine).items()
            ]
            parts["t_s"] = sum(bucket.select for bucket in buckets)
            parts["t_c"] = sum(bucket.communicate for bucket in buckets)
            samples.buckets.append(buckets)
        samples.parts.append(parts)
        samples.ready.append(self._times.since(moments[BACKWARD_BEGINS]))

    def _copy(self, tensor: Tensor) -> Tensor:
        is_image = self._channels_last and tensor.dim() == 4
        order = torch.channels_last if is_image else torch.preserve_format
        return tensor.to(self._device, non_blocking=self._non_blocking, memory_format=order)


def _by_bucket(engine: ddl.DistributedOptimizer) -> dict[tuple[str, int], BucketTimes]:
    """Seconds of all steps so far, in the order of launches."""
    return {
        key: BucketTimes(key[1], totals.select_seconds, totals.communicate_seconds)
        for key, totals in engine.totals.by_bucket.items()
    }


def take_turns(
    comm: Communicator, trainings: Sequence[Training], schedule: Schedule
) -> list[Measured]:
    """Train on all ranks at once; of several trainings a group each in turn. Collective.

    So the noise of a machine that others use, too, meets all alike.
    """
    everything = [Samples() for _ in trainings]
    for training in trainings:
        messages.barrier(comm)
        training.warm_up(schedule.warmup)
    for _ in range(schedule.iters):
        for training, samples in zip(trainings, everything, strict=True):
            messages.barrier(comm)
            training.group(schedule.batches, samples)
    return [Measured.of(messages.gather_objects(comm, samples)) for samples in everything]


def alone(comm: Communicator, training: Training, schedule: Schedule) -> Measured:
    """Train on rank 0 while the others wait. Collective."""
    messages.barrier(comm)
    samples = Samples()
    if comm.rank == 0:
        training.warm_up(schedule.warmup)
        for _ in range(schedule.iters):
            training.group(schedule.batches, samples)
    return Measured.of([messages.broadcast_object(comm, samples)])
