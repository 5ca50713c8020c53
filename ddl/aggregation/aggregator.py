"""Aggregators: replace a flat gradient by its average over ranks, in full or in part.

An aggregator knows nothing of models or hooks. It belongs to one bucket and owns that bucket's
residual. Residuals are in the units of the true gradient; where losses are scaled, so that small
gradients survive in half precision, `begin` is told by how much.

A step has two halves, so that the first can run in the background of a backward pass whose gradient
may still be given up:

1. `begin`: select, collect, repay what was not collected. The gradient stays as it is.
2. One of `apply` (the gradient becomes the average), `owe` (the step is skipped, what was picked
   is owed) and `discard` (the gradient never was). Each forgets what `begin` has kept for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ddl import kernels
from ddl.aggregation.feedback import Feedback, advance
from ddl.collectives import Collected, dense
from ddl.comm import Communicator
from ddl.compressors import Compressor
from ddl.density import entries
from ddl.errors import DDLError
from ddl.selectors import RandomK
from ddl.sparse import SparseVector
from ddl.wires import PLAIN

PLAIN_FEEDBACK = Feedback()


@dataclass(frozen=True)
class Outcome:
    """What one `begin` did.

    Attributes:
        finite: every rank's gradient, and the average, is finite; the same on every rank. If not,
            the step is to be skipped.
        picked: entries this rank selected.
        select_seconds: time spent accumulating and selecting.
        started, ended: clock (time.perf_counter) at the begin and end of communication.
        bytes_sent: bytes this rank sent.
    """

    finite: bool
    picked: int
    select_seconds: float
    started: float
    ended: float
    bytes_sent: int


class Observation(NamedTuple):
    """What `begin` of a sparse aggregator shows to an observer, who must not change or keep it."""

    flat: Tensor  # this rank's gradient, times the loss scale
    loss_scale: float
    residual: Tensor  # the accumulated values that were not picked; 0 where one was
    picks: SparseVector
    collected: Collected


class Aggregator(Protocol):
    """Aggregates one bucket, step after step."""

    @property
    def residual(self) -> Tensor | None:
        """float32, what this rank still owes of the bucket's entries, from `first` on.

        All of them, unless other ranks owe for the rest; None where nothing is ever owed.
        """

    @property
    def first(self) -> int:
        """The entry of the bucket that `residual` begins with."""

    @property
    def velocity(self) -> Tensor | None:
        """float32, of momentum correction; None without. As long as the residual, if there is one.

        Where there is none, of the average over ranks: the whole bucket's, the same on every rank.
        """

    @property
    def draws(self) -> RandomK | None:
        """The sequence of random draws; None where nothing is drawn."""

    def begin(self, flat: Tensor, density: float, loss_scale: float = 1.0) -> Outcome:
        """Select from `flat` and collect. Collective.

        Args:
            flat: this rank's gradient of the bucket.
            density: fraction of entries to keep, the same on every rank.
            loss_scale: `flat` is so many times the gradient; the same on every rank.
        """

    def apply(self, flat: Tensor) -> None:
        """Make `flat` the average over ranks, times the loss scale. Only after a finite outcome."""

    def owe(self, flat: Tensor) -> None:
        """Skip the step: what was picked is owed again.

        Makes `flat` NaN where the outcome was not finite, so that whoever looks can see it. What is
        not finite is dropped, and so is an entry whose average over ranks overflows: owed, it would
        overflow in every later step.
        """

    def discard(self, flat: Tensor) -> None:
        """Take the gradient back, to rounding, as if `begin` had not been called.

        Args:
            flat: unchanged since `begin`.
        """


class SparseAggregator:
    """Select, collect, repay.

    Attributes:
        observer: is shown every `begin`, on the thread that calls it; None: nobody looks.
    """

    first = 0

    def __init__(
        self,
        comm: Communicator,
        numel: int,
        device: torch.device,
        compressor: Compressor,
        seed: int,
        feedback: Feedback = PLAIN_FEEDBACK,
    ) -> None:
        """Owe nothing yet.

        Args:
            comm: the ranks; this aggregator uses it only within `begin`.
            numel: length of the bucket.
            device: where the bucket lives.
            compressor: any but the dense one.
            seed: of this bucket, the same on every rank.
            feedback: what becomes of gradients that are not applied at once.
        """
        if compressor.make_selector is None or compressor.make_collective is None:
            raise ValueError(f"a sparse aggregator needs a selector, got {compressor.name!r}")
        self._comm = comm
        selector = compressor.make_selector(seed)
        self._select = selector.select
        self.draws = selector if isinstance(selector, RandomK) else None
        self._collect = compressor.make_collective()
        # A single rank sends nothing, and so has nothing to round.
        self._wire = compressor.wire if comm.size > 1 else PLAIN
        self._winners_per_pick = compressor.ratio(comm.size)
        self.feedback = feedback.of_bucket(numel, device)
        self._begun: _Begun | None = None
        self.observer: Callable[[Observation], None] | None = None

    @property
    def residual(self) -> Tensor | None:
        """See `Aggregator.residual`."""
        return self.feedback.owed

    @property
    def velocity(self) -> Tensor | None:
        """See `Aggregator.velocity`."""
        return self.feedback.velocity

    def begin(self, flat: Tensor, density: float, loss_scale: float = 1.0) -> Outcome:
        """See `Aggregator.begin`."""
        bytes_before = self._comm.bytes_sent
        begin = time.perf_counter()
        k = entries(flat.numel(), density)
        brought, scale = self.feedback.bring(flat, 1.0 / loss_scale)
        packet = self._select(brought, self.feedback.residual, k, scale=scale)
        picks = packet.vector
        started = time.perf_counter()
        winners = entries(flat.numel(), min(1.0, density * self._winners_per_pick))
        collected = self._collect(self._comm, packet, winners, self._wire)
        ended = time.perf_counter()

        total, included = collected.total, collected.included
        if self.observer is not None:
            kept = self.feedback.residual
            self.observer(Observation(flat, loss_scale, kept, picks, collected))
        self.feedback.owe(picks.where(~included))
        # As the gradient will hold it: scaled.
        values = (total.values / self._comm.size) * loss_scale
        average = SparseVector(total.indices, values, total.numel)
        overflowing = average.where(~torch.isfinite(values.to(flat.dtype)))
        finite = collected.finite and overflowing.count == 0
        self._begun = _Begun(
            average, picks.where(included), collected.owed, overflowing, finite, loss_scale
        )
        return Outcome(
            finite=finite,
            picked=picks.count,
            select_seconds=started - begin,
            started=started,
            ended=ended,
            bytes_sent=self._comm.bytes_sent - bytes_before,
        )

    def apply(self, flat: Tensor) -> None:
        """See `Aggregator.apply`."""
        begun = self._take_begun()
        kernels.scatter(flat, begun.average.indices, begun.average.values)
        self.feedback.applied(begun.included)
        for rounded_off in begun.rounded_off:
            self.feedback.owe(rounded_off)

    def owe(self, flat: Tensor) -> None:
        """See `Aggregator.owe`."""
        begun = self._take_begun()
        picks = begun.included
        self.feedback.owe(picks.where(~torch.isin(picks.indices, begun.overflowing.indices)))
        if not begun.finite:
            flat.fill_(float("nan"))

    def discard(self, flat: Tensor) -> None:
        """See `Aggregator.discard`."""
        begun = self._take_begun()
        self.feedback.owe(begun.included)
        self.feedback.take_back(flat, 1.0 / begun.loss_scale)

    def _take_begun(self) -> _Begun:
        begun, self._begun = self._begun, None
        if begun is None:
            raise DDLError(
                "nothing has begun, expected one begin() before each apply, owe, discard"
            )
        return begun


class _Begun(NamedTuple):
    """What `begin` leaves for the second half."""

    average: SparseVector  # times the loss scale
    included: SparseVector  # picks of this rank that the average contains
    rounded_off: tuple[SparseVector, ...]  # what the average lacks and this rank owes
    overflowing: SparseVector  # entries of the average that the gradient's dtype cannot hold
    finite: bool
    loss_scale: float


class DenseAggregator:
    """The plain average; owes nothing. `begin` already makes the gradient the average.

    Sums are of gradients as they come, times the loss scale: half precision needs it here too.
    """

    first = 0
    draws = None

    def __init__(self, comm: Communicator, numel: int = 0, momentum: float = 0.0) -> None:
        """Stand still.

        Args:
            comm: the ranks; used only within `begin`.
            numel: length of the bucket; only momentum needs it.
            momentum: m of u = m u + average; what is applied is u. 0: the average itself.
        """
        self._comm = comm
        self._momentum = momentum
        self.velocity = torch.zeros(numel) if momentum else None
        self._loss_scale = 1.0

    @property
    def residual(self) -> None:
        """See `Aggregator.residual`."""
        return None

    def begin(self, flat: Tensor, density: float, loss_scale: float = 1.0) -> Outcome:
        """See `Aggregator.begin`; `density` is not used."""
        self._loss_scale = loss_scale
        bytes_before = self._comm.bytes_sent
        started = time.perf_counter()
        if self._comm.size > 1:
            # Before the sum, because half-precision sums overflow where their average does not.
            flat.div_(self._comm.size)
            dense.all_reduce_(self._comm, flat)
        ended = time.perf_counter()
        return Outcome(
            finite=bool(torch.isfinite(flat).all()),
            picked=flat.numel(),
            select_seconds=0.0,
            started=started,
            ended=ended,
            bytes_sent=self._comm.bytes_sent - bytes_before,
        )

    def apply(self, flat: Tensor) -> None:
        """See `Aggregator.apply`."""
        if self.velocity is not None:
            self.velocity = self.velocity.to(flat.device)
            advance(self.velocity, flat, 1.0 / self._loss_scale, self._momentum)
            flat.copy_(self.velocity * self._loss_scale)

    def owe(self, flat: Tensor) -> None:
        """See `Aggregator.owe`; a dense gradient of a skipped step is dropped."""

    def discard(self, flat: Tensor) -> None:
        """See `Aggregator.discard`."""


def aggregate(
    aggregator: Aggregator, flat: Tensor, density: float, loss_scale: float = 1.0
) -> Outcome:
    """Replace `flat` by its average over ranks, or skip where that is not finite. Collective."""
    outcome = aggregator.begin(flat, density, loss_scale)
    if outcome.finite:
        aggregator.apply(flat)
    else:
        aggregator.owe(flat)
    return outcome
