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
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
from torch import nn

from ddl.aggregation.aggregator import Aggregator, Outcome
from ddl.collectives import messages
from ddl.collectives.dense import dense_bytes
from ddl.comm import Communicator
from ddl.comm.base import LARGEST_LABEL
from ddl.comm.nccl import WorkerStreams
from ddl.compressors import Compressor
from ddl.errors import CommunicationError, DDLError, DeadlineError, GradientError
from ddl.metrics import StepMetrics, overlap_fraction
from ddl.reduction.agreement import Agreement, ReducerConfig
from ddl.reduction.buckets import Bucket, NamedParameter, make_buckets
from ddl.reduction.hooks import check_unclaimed, listen
from ddl.reduction.planning import Planner, can_plan, carry_over, core_seconds
from ddl.reduction.worker import Worker

logger = logging.getLogger(__name__)

# The worker's own waits have the same deadline and know more; let their error come first.
GRACE_SECONDS = 10.0
CHANGE_CURE = (
    "call optimizer.synchronize() between backward() and any change of gradients, such as clipping"
)


class Reducer:
    """Owns the buckets of one optimizer on one rank.

    Attributes:
        density: fraction of entries to keep; the same on every rank; change it between steps.
        step: aggregations so far.
        taken: steps that the optimizer has taken; it counts them.
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
    ) -> None:
        """Make the buckets and hook into the parameters; give all ranks rank 0's. Collective.

        Args:
            members: trainable parameters, in the order of the forward pass.
            comm: the ranks; the reducer takes duplicates.
            compressor: how buckets are aggregated.
            density: see the attribute.
            config: see there.
            stall_check_seconds: after this long a wait is reported in the log.

        Raises:
            ValueError: a parameter that cannot be handled.
            DisagreementError: ranks differ in their parameters or settings.
        """
        self.density = density
        self.step = 0
        self.taken = 0
        self._discarded = 0
        self._config = config
        self._compressor = compressor
        self._comm = comm.duplicate()  # the worker thread's
        self._control = comm.duplicate()  # the caller's
        self._agreement = Agreement(self._comm, self._control, compressor, config)
        self._worker = Worker(f"ddl-reducer-{comm.rank}", self._agreement.cancel)
        self._stall_check_seconds = stall_check_seconds
        self._lock = threading.Lock()  # CUDA gradients arrive on autograd's threads
        self._buckets: list[Bucket] = []
        self._aggregators: list[Aggregator] = []
        self._streams = WorkerStreams(self._comm)
        self._hooks: dict[int, Any] = {}  # by id of the parameter, which its bucket keeps alive
        self._outcomes: list[Outcome] = []
        self._overlap = 0.0
        self._wait_seconds = 0.0
        self._planner: Planner | None = None
        self._start_step()
        self.add(members)
        if config.plan_buckets and comm.size > 1:
            if can_plan(self._buckets, self._aggregators):
                self._planner = Planner(self._buckets, self._control)
            else:
                logger.warning('bucket_bytes="auto" has no effect: parameters are of several kinds')

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
                members, config.bucket_bytes, config.dense_below, first_index=len(self._buckets)
            )
            for bucket in added:
                self._append(bucket)
                self._marks.append(self._streams[bucket.flat.device].mark_caller({}))
                self._passes.append([int(id(m.parameter) in counted) for m in bucket.members])
                self._unready.append(len(bucket.members))
        self._planner = None  # it knows only the first ones

    def _append(self, bucket: Bucket) -> None:
        self._buckets.append(bucket)
        self._aggregators.append(self._agreement.make_aggregator(bucket))
        for place, member in enumerate(bucket.members):
            handle = listen(self, member.parameter, bucket.index, place)
            self._hooks[id(member.parameter)] = handle

    def _regroup(self, groups: Sequence[Sequence[NamedParameter]]) -> None:
        """Move all parameters, with what is owed for them, into other buckets; between steps."""
        before = list(self.owing)
        self._unhook()
        self._buckets, self._aggregators = [], []
        for group in groups:
            self._append(Bucket(len(self._buckets), group, dense=before[0][0].dense))
        carry_over(before, list(self.owing))

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is in a bucket."""
        return id(parameter) in self._hooks

    def average(self, value: float) -> float:
        """The average of a number over ranks, the same everywhere. Collective."""
        numbers = messages.gather_objects(self._control, value)
        return sum(numbers) / len(numbers)

    def _start_step(self) -> None:
        # What a launch follows: the last work so far on each stream that wrote its gradients, and
        # what the step before still does with the results of its own launches.
        self._marks = [self._streams[b.flat.device].mark_caller({}) for b in self._buckets]
        self._passes = [[0] * len(bucket.members) for bucket in self._buckets]
        self._unready = [len(bucket.members) for bucket in self._buckets]
        self._launched: list[_Launch] = []
        self._last_gradient = time.perf_counter()

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
            bucket, passes = self._buckets[index], self._passes[index]
            expected = self._config.backward_passes_per_step
            if passes[place] == expected or index < len(self._launched):
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
            passes[place] += 1
            if passes[place] == expected:
                self._unready[index] -= 1
                self._last_gradient = time.perf_counter()
                self._launch_ready()

    # 2. Launch.

    def _launch_ready(self) -> None:
        while len(self._launched) < len(self._buckets):
            index = len(self._launched)
            if self._unready[index]:
                return
            self._launch(index)

    def _launch(self, index: int) -> None:
        bucket, begin, comm = self._buckets[index], self._aggregators[index].begin, self._comm
        # What ranks must have in common, so that one that left out a step is found out. The primes
        # keep one count from making up for another.
        history = self.step + 101 * self._discarded + 1009 * self.taken
        label = (history * len(self._buckets) + index) % (LARGEST_LABEL + 1)
        # An alias with a version count of its own: what the count of `flat` then tells is whether
        # somebody else changes gradients that are under way.
        flat, density = bucket.flat.data, self.density
        stream, marks = self._streams[flat.device], self._marks[index]
        stream.mark_caller(marks)
        planner = self._planner

        def task() -> Outcome:
            comm.label = label
            begun = 0.0 if planner is None else core_seconds()
            with stream.current():
                stream.follow(marks.values())
                outcome = begin(flat, density)
                stream.synchronize()  # what comes next runs on the caller's streams
            if planner is not None:
                planner.saw_work(index, core_seconds() - begun)
            return outcome

        self._launched.append(_Launch(self._worker.submit(task), bucket.flat._version))

    def _launch_rest(self) -> None:
        """Launch the buckets that still lack gradients; what is missing counts as zero."""
        self._check_every_parameter_has_a_gradient()
        for index in range(len(self._launched), len(self._buckets)):
            bucket = self._buckets[index]
            for place, member in enumerate(bucket.members):
                bucket.absorb(place)
                owing = self._aggregators[index]
                if not member.parameter.requires_grad and owing.residual is not None:
                    # It must not move while it is frozen.
                    bucket.part(owing.residual, place, owing.first).zero_()
            self._launch(index)

    def _check_every_parameter_has_a_gradient(self) -> None:
        if self._config.unused_parameters == "zero":
            return
        missing = [
            member.name
            for bucket, passes in zip(self._buckets, self._passes, strict=True)
            for member, count in zip(bucket.members, passes, strict=True)
            if count == 0 and member.parameter.requires_grad
        ]
        if missing and self.idle:
            raise GradientError(
                f"no parameter got a gradient in step {self.step} on rank {self._comm.rank}, "
                "expected a backward() before each optimizer.step(); or pass "
                'unused_parameters="zero"'
            )
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise GradientError(
                f"parameter {missing[0]!r}{more} got no gradient in step {self.step} on rank "
                f"{self._comm.rank}, expected one from every backward pass; set its "
                'requires_grad to False, or pass unused_parameters="zero"'
            )

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
            for bucket in self._buckets
            for member in bucket.members
            if not member.parameter.requires_grad and member.parameter.grad is None
        ]
        with self._lock:
            self._launch_rest()
        begin = time.perf_counter()
        self._outcomes = [
            self._wait_for(launch, bucket)
            for launch, bucket in zip(self._launched, self._buckets, strict=True)
        ]
        self._wait_seconds = time.perf_counter() - begin
        self._overlap = overlap_fraction(self._outcomes, self._last_gradient)
        finite = all(outcome.finite for outcome in self._outcomes)
        for bucket, aggregator in zip(self._buckets, self._aggregators, strict=True):
            if finite:
                aggregator.apply(bucket.flat)
            else:
                aggregator.owe(bucket.flat)
        if self._planner is not None and finite:
            self._plan(self._planner)
        for parameter in frozen_without_gradient:
            parameter.grad = None
        self.step += 1
        self._start_step()
        return finite

    def _plan(self, planner: Planner) -> None:
        """Take in a step, and plan after enough of them."""
        planner.end_step(self._outcomes)
        if planner.due:
            self._planner = None
            groups = planner.plan(self._compressor, self.density)
            if groups is not None:
                self._regroup(groups)

    def discard(self) -> None:
        """Forget the gradients since the last step, as torch does at `zero_grad`. Collective."""
        with self._lock:
            launched, self._launched = self._launched, []
        for bucket, launch in zip(self._buckets, launched, strict=False):
            self._wait_for(launch, bucket)
        # Only now: on a GPU, a launch under way could take memory over that is still being read.
        for bucket, aggregator, _ in zip(self._buckets, self._aggregators, launched, strict=False):
            aggregator.discard(bucket.flat)
        self._discarded += bool(launched)
        self._start_step()

    @property
    def idle(self) -> bool:
        """Whether no gradient has come since the last `synchronize`."""
        return not any(any(passes) for passes in self._passes)

    def _check_unchanged(self, launch: _Launch, bucket: Bucket) -> None:
        replaced = bucket.first_detached()
        if replaced is not None or bucket.flat._version != launch.version:
            what = f"of parameter {replaced!r}" if replaced else f"in {bucket}"
            raise GradientError(
                f"a gradient {what} was changed in step {self.step} on rank {self._comm.rank} "
                f"while it was under way, expected it untouched; {CHANGE_CURE}"
            )

    def _wait_for(self, launch: _Launch, bucket: Bucket) -> Outcome:
        where = f"step {self.step}, {bucket}, rank {self._comm.rank} of {self._comm.size}"
        begin = time.monotonic()
        while not wait([launch.future], timeout=self._stall_check_seconds).done:
            waited = time.monotonic() - begin
            logger.warning("%s: waiting for other ranks for %.0f s", where, waited)
            if waited > self._comm.timeout + GRACE_SECONDS:
                raise DeadlineError(f"{where}: nothing after {waited:.0f} s; is a rank dead?")
        self._check_unchanged(launch, bucket)
        try:
            return launch.future.result()
        except DDLError as error:
            raise type(error)(f"{where}: {error}") from error
        except Exception as error:
            raise DDLError(f"{where}: {type(error).__name__}: {error}") from error

    @property
    def owing(self) -> Iterable[tuple[Bucket, Aggregator]]:
        """Every bucket and its aggregator, for checkpoints; to be touched between steps only."""
        return zip(self._buckets, self._aggregators, strict=True)

    @property
    def history(self) -> tuple[int, int, int]:
        """Aggregations, gradients given up, steps taken; what ranks must have in common."""
        return self.step, self._discarded, self.taken

    @history.setter
    def history(self, counts: Sequence[int]) -> None:
        self.step, self._discarded, self.taken = counts

    def metrics(self) -> StepMetrics:
        """What the last step cost; takes a pass over the residuals."""
        numel = sum(bucket.flat.numel() for bucket in self._buckets)
        outcomes = self._outcomes
        residuals = [a.residual for a in self._aggregators if a.residual is not None]
        norms = [float(torch.linalg.vector_norm(residual)) for residual in residuals]
        return StepMetrics(
            step=self.step - 1,
            finite=all(outcome.finite for outcome in outcomes),
            select_seconds=sum(outcome.select_seconds for outcome in outcomes),
            communicate_seconds=sum(outcome.ended - outcome.started for outcome in outcomes),
            wait_seconds=self._wait_seconds,
            bytes_sent=sum(outcome.bytes_sent for outcome in outcomes),
            bytes_dense=sum(
                dense_bytes(bucket.flat.numel(), bucket.flat.element_size(), self._comm.size)
                for bucket in self._buckets
            ),
            density_actual=sum(outcome.picked for outcome in outcomes) / max(1, numel),
            overlap_fraction=self._overlap,
            residual_norm=math.hypot(*norms),
        )

    def _unhook(self) -> None:
        """Hear of no more gradients."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def close(self) -> None:
        """Let go of the parameters, end the worker thread, free the communicators. Collective."""
        self._unhook()
        self._worker.close()
        self._agreement.close()


class _Launch(NamedTuple):
    """A bucket under way: its result to come, and the version of its gradient at the launch."""

    future: Future[Outcome]
    version: int
