"""The reducer: listens to gradients, launches buckets in a fixed order, waits for the results.

1. *Ready.* Autograd has accumulated a parameter's gradient; a hook brings it into its bucket.
2. *Launch.* Once a bucket and all before it are ready they go to the worker thread. The order is
   the same on every rank, whatever the order of the gradients, so collectives always match.
3. *Wait.* `synchronize` launches what is left and waits for all buckets. Only then gradients become
   averages, so that until then a gradient can be given up (`discard`); and if one of any rank was
   not finite, all are owed.

On a GPU the worker thread works on a stream of its own, which follows the streams that wrote the
gradients; it is the only thread that waits for the device.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ddl.aggregation.aggregator import Aggregator, Outcome
from ddl.aggregation.clipping import clip_later
from ddl.collectives import messages
from ddl.collectives.dense import dense_bytes
from ddl.comm import Communicator
from ddl.comm.base import LARGEST_LABEL
from ddl.comm.nccl import WorkerStreams
from ddl.compressors import Compressor
from ddl.errors import CommunicationError, DDLError, GradientError
from ddl.metrics import BucketMetrics, StepMetrics
from ddl.metrics.recorder import Recorder, Stopwatch
from ddl.metrics.timeline import StepSpans, open_track
from ddl.reduction.agreement import Agreement, ReducerConfig
from ddl.reduction.buckets import Bucket, NamedParameter, make_buckets
from ddl.reduction.holdings import Holdings
from ddl.reduction.hooks import check_unclaimed
from ddl.reduction.launches import Launch, Patience, glance
from ddl.reduction.loss_scale import GradScaler, LossScale
from ddl.reduction.planning import Planner, core_seconds, planner_of
from ddl.reduction.readiness import Readiness
from ddl.reduction.worker import Worker

logger = logging.getLogger(__name__)


class Reducer:
    """Owns the buckets of one optimizer on one rank.

    Attributes:
        density: fraction of entries to keep; the same on every rank; change it between steps.
        step: aggregations so far.
        taken: steps that the optimizer has taken.
        recorder: what the steps so far have cost.
    """

    def __init__(
        self,
        members: Sequence[NamedParameter],
        comm: Communicator,
        compressor: Compressor,
        density: float,
        config: ReducerConfig,
        *,
        stall_check_seconds: float,
        scaler: GradScaler | None = None,
        mark: Callable[[], int] = int,
    ) -> None:
        """Make the buckets and hook into the parameters; give all ranks rank 0's. Collective.

        Args:
            members: trainable parameters, in the order of the forward pass.
            comm: the ranks; the reducer takes duplicates.
            compressor: how buckets are aggregated.
            density: see the attribute.
            config: see there.
            stall_check_seconds: after this long a wait is reported in the log.
            scaler: what multiplies losses, if anything does.
            mark: a number that ranks must have in common between two steps, whoever they are.

        Raises:
            ValueError: a parameter that cannot be handled.
            DisagreementError: ranks differ in their parameters or settings.
        """
        self.density = density
        self.step = 0
        self.taken = 0
        self._discarded = 0
        self._config = config
        self._comm = comm.duplicate()  # the worker thread's
        self._control = comm.duplicate()  # the caller's
        self._agreement = Agreement(self._comm, self._control, compressor, config)
        self._worker = Worker(f"ddl-reducer-{comm.rank}", self._agreement.cancel)
        self._stall_check_seconds = stall_check_seconds
        self._mark_now = mark
        self._loss_scale = LossScale(scaler)
        self._lock = threading.Lock()  # CUDA gradients arrive on autograd's threads
        self._held = Holdings(self._agreement.make_aggregator)
        self._streams = WorkerStreams(self._comm)
        self._readiness = Readiness(config.backward_passes_per_step)
        self._planner: Planner | None = None
        self.recorder = Recorder()
        self._start_step()
        self.add(members)
        if config.plan_buckets and comm.size > 1:
            self._planner = planner_of(
                self._held.buckets, self._held.aggregators, compressor, self._control
            )
        self.recorder.track = open_track(config.timeline, comm, self._control)

    def add(self, members: Sequence[NamedParameter], *, within_step: bool = False) -> None:
        """Take in more parameters, in buckets behind the present ones. Collective.

        Args:
            members: trainable parameters, in the order of the forward pass.
            within_step: gradients that they have already belong to the step under way.

        Raises:
            ValueError: a parameter that cannot be handled, or that another reducer has.
            DisagreementError: ranks differ in their parameters or settings.
            CommunicationError: not every rank takes in parameters now.
        """
        for member in members:
            check_unclaimed(member)
        try:
            self._agreement.reach(members, self.density)
            for member in members:
                messages.broadcast_(self._control, member.parameter)
        except CommunicationError as error:
            raise type(error)(
                f"step {self.step}, new parameter {members[0].name!r}, rank {self._comm.rank} of "
                f"{self._comm.size}: {error}"
            ) from error
        with self._lock:
            counted = {
                id(m.parameter) for m in members if within_step and m.parameter.grad is not None
            }
            config = self._config
            added = make_buckets(
                members,
                config.bucket_bytes,
                config.dense_below,
                first_index=len(self._held.buckets),
            )
            for bucket in added:
                self._held.append(bucket, self)
                self._marks.append(self._streams[bucket.flat.device].mark_caller({}))
                came = [id(member.parameter) in counted for member in bucket.members]
                self._readiness.add(came)
        self._planner = None  # it knows only the first ones

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is in a bucket."""
        return self._held.knows(parameter)

    def average(self, value: float) -> float:
        """The average of a number over ranks, the same everywhere. Collective."""
        numbers = messages.gather_objects(self._control, value)
        return sum(numbers) / len(numbers)

    def _start_step(self) -> None:
        # What a launch follows: the last work so far on each stream that wrote its gradients, and
        # what the step before still does with the results of its own launches.
        self._marks = [self._streams[b.flat.device].mark_caller({}) for b in self._held.buckets]
        self._readiness.start(self._held.buckets)
        self._launched: list[Launch] = []
        self._loss_scale.forget()
        # What would lead ranks apart, though they take the same steps.
        self._mark = self._mark_now() + self._held.mark

    # 1. Ready.

    def on_gradient(self, index: int, place: int) -> None:
        """Take in the gradient that autograd has just accumulated; never blocks.

        Args:
            index: of the bucket.
            place: of the parameter in it.

        Raises:
            GradientError: one more than `backward_passes_per_step`.
        """
        with self._lock:
            bucket = self._held.buckets[index]
            if index < len(self._launched) or not self._readiness.tick(index, place):
                expected = self._config.backward_passes_per_step
                raise GradientError(
                    f"parameter {bucket.members[place].name!r} got another gradient in step "
                    f"{self.step} on rank {self._comm.rank}, expected {expected} before "
                    "optimizer.step() or optimizer.zero_grad(); call step(), or pass "
                    "backward_passes_per_step= the number of backward passes per step"
                )
            bucket.absorb(place)
            if self._planner is not None:
                self._planner.saw_gradient(index, place)
            self._streams[bucket.flat.device].mark_caller(self._marks[index])
            if self._readiness.is_ready(index):
                self._launch_ready()

    # 2. Launch.

    def _launch_ready(self) -> None:
        if self._config.local_clip_norm is not None and not self._readiness.all_ready:
            return  # the norm is that of all gradients
        while len(self._launched) < len(self._held.buckets):
            index = len(self._launched)
            if not self._readiness.is_ready(index):
                return
            self._launch(index)

    def _launch(self, index: int) -> None:
        bucket, begin, comm = (
            self._held.buckets[index],
            self._held.aggregators[index].begin,
            self._comm,
        )
        # What ranks must have in common, so that one that left out a step is found out. The primes
        # keep one count from making up for another.
        history = self.step + 101 * self._discarded + 1009 * self.taken
        label = (history * len(self._held.buckets) + index + self._mark) % (LARGEST_LABEL + 1)
        # An alias with a version count of its own: what the count of `flat` then tells is whether
        # somebody else changes gradients that are under way.
        flat, density = bucket.flat.data, self.density
        doing = f"step {self.step}, bucket {index}"
        stream, marks = self._streams[flat.device], self._marks[index]
        stream.mark_caller(marks)
        planner = self._planner
        loss_scale, clip = self._loss_scale, self._clipping() if index == 0 else None

        def task() -> Outcome:
            comm.label, comm.doing = label, doing
            begun = 0.0 if planner is None else core_seconds()
            with stream.current():
                stream.follow(marks.values())
                if clip is not None:
                    clip(loss_scale.read())
                outcome = begin(flat, density, loss_scale.read())
                launch.after = glance(flat)
                stream.synchronize()  # what comes next runs on the caller's streams
            if planner is not None:
                planner.saw_work(index, core_seconds() - begun)
            return outcome

        # What is aggregated whole, or clipped, the worker itself changes.
        kept = self._held.aggregators[index].residual is not None
        kept &= self._config.local_clip_norm is None
        launch = Launch(bucket.flat._version, glance(flat) if kept else None)
        launch.future = self._worker.submit(task)
        self._launched.append(launch)

    def _clipping(self) -> Callable[[float], None] | None:
        """What clips all gradients of this rank, on the worker thread; None if nothing is to."""
        threshold, P = self._config.local_clip_norm, self._comm.size
        if threshold is None:
            return None
        flats = [bucket.flat.data for bucket in self._held.buckets]
        streams = [self._streams[flat.device] for flat in flats]
        for stream, marks in zip(streams, self._marks, strict=True):
            stream.mark_caller(marks)
        return clip_later(flats, list(zip(streams, self._marks, strict=True)), threshold, P)

    def _launch_rest(self) -> None:
        """Launch the buckets that still lack gradients; what is missing counts as zero."""
        if self._config.unused_parameters != "zero":
            where = f"step {self.step} on rank {self._comm.rank}"
            self._readiness.check_complete(self._held.buckets, where)
        self._launch_first(len(self._held.buckets))

    def _launch_first(self, count: int) -> None:
        rest = range(len(self._launched), count)
        for index in rest:
            bucket = self._held.buckets[index]
            for place, member in enumerate(bucket.members):
                bucket.absorb(place)
                if not member.parameter.requires_grad:
                    self._held.stop(index, place)
        for index in rest:
            self._launch(index)

    def stand_in(self, count: int | None = None, loss_scale: float = 1.0) -> None:
        """Take part in what other ranks do: where no gradient has come, it is zero.

        Args:
            loss_scale: that of the other ranks.
            count: so many buckets are launched, as on the others, to be given up. None: none is
                yet, but each may be, in a step.
        """
        with self._lock:
            if not self._launched:
                self._loss_scale.use(loss_scale)
            for bucket in self._held.buckets[:count]:
                for place in self._readiness.stand_in(bucket):
                    bucket.members[place].parameter.grad = None
            self._launch_first(count or 0)

    # 3. Wait.

    def synchronize(self) -> bool:
        """Aggregate what is not aggregated yet; afterwards every gradient is the average.

        Returns:
            Whether every gradient of every rank was finite; the same on all ranks. If not, the
            step must not be taken: nothing was applied, and every finite gradient is still owed.

        Raises:
            GradientError: a parameter has no gradient, or one that changed while under way.
            DeadlineError: another rank did not take part in time.
            CommunicationError: another rank is gone or out of step.
        """
        frozen_without_gradient = [
            member.parameter
            for bucket in self._held.buckets
            for member in bucket.members
            if not member.parameter.requires_grad and member.parameter.grad is None
        ]
        with self._lock:
            self._launch_rest()
        outcomes, waited = self._wait_for_all(self._launched)
        finite = all(outcome.finite for outcome in outcomes)
        applied = Stopwatch()
        for bucket, aggregator in zip(self._held.buckets, self._held.aggregators, strict=True):
            if finite:
                aggregator.apply(bucket.flat)
            else:
                aggregator.owe(bucket.flat)
            applied.lap()
        for parameter in frozen_without_gradient:
            parameter.grad = None
        self._record(outcomes, waited, applied, finite=finite)
        if self._planner is not None and finite:
            self._planner.end_step(outcomes)
            if self._planner.due:
                groups, self._planner = self._planner.plan(self.density), None
                if groups is not None:
                    self._held.regroup(groups, self)
        self.step += 1
        self._start_step()
        return finite

    def discard(self) -> None:
        """Forget the gradients since the last step, as torch does at `zero_grad`. Collective."""
        with self._lock:
            launched, self._launched = self._launched, []
        outcomes, waited = self._wait_for_all(launched)
        # Only now: on a GPU, a launch under way could take memory over that is still being read.
        applied = Stopwatch()
        for bucket, aggregator, _ in zip(
            self._held.buckets, self._held.aggregators, launched, strict=False
        ):
            aggregator.discard(bucket.flat)
            applied.lap()
        if launched:
            self._discarded += 1
            self._record(outcomes, waited, applied, kept=False)
        self._start_step()

    @property
    def control(self) -> Communicator:
        """The ranks, for the caller's thread."""
        return self._control

    @property
    def loss_scale(self) -> float:
        """What the gradients of this step are multiplied by; on a GPU this waits for it."""
        return self._loss_scale.read()

    @property
    def under_way(self) -> int:
        """Buckets launched in this step."""
        return len(self._launched)

    @property
    def idle(self) -> bool:
        """Whether no gradient has come since the last `synchronize`."""
        return self._readiness.idle

    def _wait_for_all(self, launched: Sequence[Launch]) -> tuple[list[Outcome], Stopwatch]:
        outcomes, waited = [], Stopwatch()
        patience = Patience(self._stall_check_seconds, self._comm.timeout, self._agreement.waiting)
        rank = f"rank {self._comm.rank} of {self._comm.size}"
        for launch, bucket in zip(launched, self._held.buckets, strict=False):
            try:
                where = f"step {self.step}, {bucket}, {rank}"
                outcomes.append(launch.outcome(bucket, where, patience))
            except DDLError:
                self.recorder.give_up()
                raise
            waited.lap()
        return outcomes, waited

    @property
    def owing(self) -> Iterable[tuple[Bucket, Aggregator]]:
        """Every bucket and its aggregator, for checkpoints; to be touched between steps only."""
        return self._held.owing

    @property
    def history(self) -> tuple[int, int, int]:
        """Aggregations, gradients given up, steps taken; what ranks must have in common."""
        return self.step, self._discarded, self.taken

    @history.setter
    def history(self, counts: Sequence[int]) -> None:
        self.step, self._discarded, self.taken = counts

    def take(self, step: Callable[[], Any]) -> Any:
        """Let the wrapped optimizer step, and count it."""
        self.taken += 1
        return self.recorder.update(step)

    def _record(
        self,
        outcomes: Sequence[Outcome],
        waited: Stopwatch,
        applied: Stopwatch,
        *,
        finite: bool = True,
        kept: bool = True,
    ) -> None:
        first = self._readiness.first
        happened = zip(outcomes, waited.spans, applied.spans, strict=True)
        buckets = [
            BucketMetrics(
                b.index, b.label, b.flat.numel(), self._bytes_dense(b), outcome, wait, apply
            )
            for b, (outcome, wait, apply) in zip(self._held.buckets, happened, strict=False)
        ]
        backward = None if first is None else (first, self._readiness.last)
        self.recorder.step(StepSpans(self.step, backward, buckets, kept), finite)

    def _bytes_dense(self, bucket: Bucket) -> int:
        return dense_bytes(bucket.flat.numel(), bucket.flat.element_size(), self._comm.size)

    def metrics(self) -> StepMetrics:
        """What the last step cost; takes a pass over the residuals."""
        residuals = [a.residual for a in self._held.aggregators if a.residual is not None]
        norms = [float(torch.linalg.vector_norm(residual)) for residual in residuals]
        return self.recorder.metrics(math.hypot(*norms))

    def close(self) -> None:
        """Let go of the parameters, end the worker thread, free the communicators. Collective."""
        self._held.let_go()
        self._worker.close()
        self.recorder.close()
        self._agreement.close()
