"""An aggregator that sends a bucket whole in those steps in which that is the fastest.

At the densities of a warm-up, or on a fast network, a dense all-reduce beats every sum of sparse
vectors. What is sent then is all that is accumulated, the gradient and what is owed, so nothing is
owed any more. Steps of both kinds can follow each other, since they share the residual.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ddl.aggregation.aggregator import Observation, Outcome, SparseAggregator
from ddl.aggregation.feedback import ErrorFeedback
from ddl.collectives import Collective, dense
from ddl.collectives.auto import Auto
from ddl.comm import Communicator
from ddl.compressors import Compressor
from ddl.density import entries
from ddl.errors import DDLError
from ddl.selectors import RandomK


class DenseWhereFaster:
    """Sparse or dense, step by step. See `ddl.aggregation.aggregator.Aggregator`."""

    first = 0

    def __init__(
        self,
        comm: Communicator,
        sparse: SparseAggregator,
        dense_is_faster: Callable[[int, float], bool],
        workers: int | None = None,
    ) -> None:
        """Owe what `sparse` owes.

        Args:
            comm: the ranks; used only within `begin`.
            sparse: what aggregates in all other steps, with the same ranks.
            dense_is_faster: tells from the length of the bucket and the density; the same on every
                rank.
            workers: the number to divide sums by; default the number of ranks.
        """
        self._comm = comm
        self._sparse = sparse
        self._dense_is_faster = dense_is_faster
        self._workers = comm.size if workers is None else workers
        self._begun: _Begun | None = None

    @property
    def feedback(self) -> ErrorFeedback:
        """The residual, and what else belongs to it."""
        return self._sparse.feedback

    @property
    def residual(self) -> Tensor | None:
        """See `Aggregator.residual`."""
        return self.feedback.owed

    @property
    def velocity(self) -> Tensor | None:
        """See `Aggregator.velocity`."""
        return self.feedback.velocity

    @property
    def draws(self) -> RandomK | None:
        """See `Aggregator.draws`."""
        return self._sparse.draws

    @property
    def observer(self) -> Callable[[Observation], None] | None:
        """See `SparseAggregator.observer`; is not shown steps that send the bucket whole."""
        return self._sparse.observer

    @observer.setter
    def observer(self, observer: Callable[[Observation], None] | None) -> None:
        self._sparse.observer = observer

    @property
    def dense_average(self) -> Tensor | None:
        """float32 [numel], what a dense `begin` has collected; None after a sparse one.

        Times the loss scale, as the gradient is.
        """
        return None if self._begun is None else self._begun.average

    def begin(self, flat: Tensor, density: float, loss_scale: float = 1.0) -> Outcome:
        """See `Aggregator.begin`."""
        if not self._dense_is_faster(flat.numel(), density):
            return self._sparse.begin(flat, density, loss_scale)
        bytes_before = self._comm.bytes_sent
        begin = time.perf_counter()
        accumulated, finite = self._accumulate(flat, 1.0 / loss_scale)
        started = time.perf_counter()
        # One value more: how many ranks saw a gradient that was not finite.
        total = torch.cat([accumulated, accumulated.new_tensor([0.0 if finite else 1.0])])
        dense.all_reduce_(self._comm, total)
        ended = time.perf_counter()
        average = (total[:-1] / self._workers) * loss_scale
        overflowing = ~torch.isfinite(average.to(flat.dtype))
        finite = total[-1].item() == 0.0 and not bool(overflowing.any())
        self._begun = _Begun(average, overflowing, finite, loss_scale)
        return Outcome(
            finite=finite,
            picked=flat.numel(),
            select_seconds=started - begin,
            started=started,
            ended=ended,
            bytes_sent=self._comm.bytes_sent - bytes_before,
        )

    def apply(self, flat: Tensor) -> None:
        """See `Aggregator.apply`."""
        if self._begun is None:
            self._sparse.apply(flat)
        else:
            flat.copy_(self._take_begun().average)
            self.feedback.applied_all()

    def owe(self, flat: Tensor) -> None:
        """See `Aggregator.owe`."""
        if self._begun is None:
            self._sparse.owe(flat)
        else:
            begun = self._take_begun()
            self.feedback.residual.masked_fill_(begun.overflowing, 0.0)
            if not begun.finite:
                flat.fill_(float("nan"))

    def discard(self, flat: Tensor) -> None:
        """See `Aggregator.discard`."""
        if self._begun is None:
            self._sparse.discard(flat)
        else:
            self.feedback.take_back(flat, 1.0 / self._take_begun().loss_scale)

    def _accumulate(self, flat: Tensor, scale: float) -> tuple[Tensor, bool]:
        """Bring `flat` into the residual; return that, and whether all of it was finite.

        What is not finite leaves the residual as it was, and counts as nothing in the sum.
        """
        brought, scale = self.feedback.bring(flat, scale)
        residual = self.feedback.residual
        accumulated = torch.add(residual, brought, alpha=scale)
        # One pass without a mask: what is not finite makes the sum so. Large sums may be, too.
        if torch.isfinite(accumulated.sum()) or bool(torch.isfinite(accumulated).all()):
            residual.copy_(accumulated)
            return accumulated, True
        finite = torch.isfinite(accumulated)
        torch.where(finite, accumulated, residual, out=residual)
        return torch.where(finite, accumulated, 0.0), False

    def _take_begun(self) -> _Begun:
        begun, self._begun = self._begun, None
        if begun is None:
            raise DDLError(
                "nothing has begun, expected one begin() before each apply, owe, discard"
            )
        return begun


def with_dense_steps(
    comm: Communicator,
    sparse: SparseAggregator,
    collective: Collective,
    compressor: Compressor,
    workers: int | None = None,
) -> SparseAggregator | DenseWhereFaster:
    """What aggregates a bucket with a collective that may prefer to send it whole.

    Args:
        comm: see `DenseWhereFaster`.
        sparse: see there.
        collective: the one that `sparse` uses.
        compressor: its settings.
        workers: see there.
    """
    if not isinstance(collective, Auto):
        return sparse

    def dense_is_faster(numel: int, density: float) -> bool:
        winners = entries(numel, min(1.0, density * compressor.ratio(comm.size)))
        return collective.choice(comm, numel, winners, compressor.wire).dense

    return DenseWhereFaster(comm, sparse, dense_is_faster, workers)


class _Begun(NamedTuple):
    """What a dense `begin` leaves for the second half. The residual holds all that was sent."""

    average: Tensor  # times the loss scale
    overflowing: Tensor  # bool [numel]: where the gradient's dtype cannot hold the average
    finite: bool
    loss_scale: float
