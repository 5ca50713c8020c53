"""Aggregators: replace a flat gradient by its average over ranks, in full or in part.

An aggregator knows nothing of models or hooks. It belongs to one bucket and owns that bucket's
residual.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ddl import kernels
from ddl.collectives import dense
from ddl.comm import Communicator
from ddl.compressors import Compressor
from ddl.density import entries
from ddl.feedback import ErrorFeedback
from ddl.sparse import SparseVector


@dataclass(frozen=True)
class Outcome:
    """What one aggregation did.

    Attributes:
        finite: every rank's gradient, and the sum, was finite; the same on every rank. If False
            nothing was applied: `flat` is all NaN, and what was finite of this rank's gradient is
            owed (by a dense aggregator: dropped).
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


class Aggregator(Protocol):
    """Aggregates one bucket, step after step."""

    @property
    def residual(self) -> Tensor | None:
        """float32 [numel] this rank still owes; None where nothing is ever owed."""

    def aggregate(self, flat: Tensor, density: float) -> Outcome:
        """Replace `flat` by the average over ranks. Collective; same `density` on every rank."""

    def revoke(self) -> None:
        """Owe again what the last `aggregate` applied, because its step will not be taken."""


class SparseAggregator:
    """Select, collect, repay."""

    def __init__(
        self,
        comm: Communicator,
        numel: int,
        device: torch.device,
        compressor: Compressor,
        seed: int,
    ) -> None:
        """Owe nothing yet.

        Args:
            comm: the ranks; this aggregator uses it only within `aggregate`.
            numel: length of the bucket.
            device: where the bucket lives.
            compressor: any but the dense one.
            seed: of this bucket, the same on every rank.
        """
        if compressor.make_selector is None or compressor.collective is None:
            raise ValueError(f"a sparse aggregator needs a selector, got {compressor.name!r}")
        self._comm = comm
        self._select = compressor.make_selector(seed).select
        self._collect = compressor.collective
        self._feedback = ErrorFeedback(numel, device)
        self._applied: SparseVector | None = None

    @property
    def residual(self) -> Tensor:
        """See `Aggregator.residual`."""
        return self._feedback.residual

    def aggregate(self, flat: Tensor, density: float) -> Outcome:
        """See `Aggregator.aggregate`."""
        bytes_before = self._comm.bytes_sent
        begin = time.perf_counter()
        k = entries(flat.numel(), density)
        packet = self._select(flat, self.residual, k, scale=1.0)
        picks = packet.vector
        started = time.perf_counter()
        total, included, finite = self._collect(self._comm, packet, k)
        ended = time.perf_counter()
        if finite and bool(torch.isfinite(total.values).all()):
            kernels.scatter(flat, total.indices, total.values, scale=1.0 / self._comm.size)
            self._feedback.owe(picks.where(~included))
            self._applied = picks.where(included)
        else:
            finite = False
            flat.fill_(float("nan"))
            self._feedback.owe(picks)
            self._applied = None
        return Outcome(
            finite=finite,
            picked=picks.count,
            select_seconds=started - begin,
            started=started,
            ended=ended,
            bytes_sent=self._comm.bytes_sent - bytes_before,
        )

    def revoke(self) -> None:
        """See `Aggregator.revoke`."""
        if self._applied is not None:
            self._feedback.owe(self._applied)
            self._applied = None


class DenseAggregator:
    """The plain average; owes nothing."""

    def __init__(self, comm: Communicator) -> None:
        """`comm`: the ranks; used only within `aggregate`."""
        self._comm = comm

    def aggregate(self, flat: Tensor, density: float) -> Outcome:
        """See `Aggregator.aggregate`; `density` is not used."""
        bytes_before = self._comm.bytes_sent
        started = time.perf_counter()
        if self._comm.size > 1:
            # Before the sum, because half-precision sums overflow where their average does not.
            flat.div_(self._comm.size)
            dense.all_reduce_(self._comm, flat)
        ended = time.perf_counter()
        finite = bool(torch.isfinite(flat).all())
        if not finite:
            flat.fill_(float("nan"))
        return Outcome(
            finite=finite,
            picked=flat.numel(),
            select_seconds=0.0,
            started=started,
            ended=ended,
            bytes_sent=self._comm.bytes_sent - bytes_before,
        )

    @property
    def residual(self) -> None:
        """See `Aggregator.residual`."""
        return None

    def revoke(self) -> None:
        """See `Aggregator.revoke`; nothing is owed."""
