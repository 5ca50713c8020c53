"""Aggregation in two levels, for nodes that hold several ranks: densely within, sparsely between.

A bucket is cut into as many shards as every node has ranks; the first ranks of all nodes own the
first shard, the second ranks the second, and so on. In `begin`

1. *Reduce.* Within a node each rank sends its gradient, shard by shard, to the shards' owners, who
   add up. Nothing is selected yet, so nothing is lost or delayed inside a node.
2. *Aggregate.* The owners of a shard, one per node, select from the node's sum and what they owe,
   and run the sparse collective among themselves: an aggregator of their own does that.
3. *Share.* Within a node the owners pass on the averages that they have got.

A residual exists once per node, in pieces: each owner owes for its shard only. Links between nodes
carry the entries of a bucket once per node instead of once per rank.

Nodes may hold different numbers of ranks. There are as many shards as the smallest node has ranks;
ranks beyond them own none: they give their gradient to the owners and get the averages.
"""

from __future__ import annotations

import dataclasses
import time
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ddl import kernels
from ddl.aggregation.aggregator import Outcome, SparseAggregator
from ddl.aggregation.dense_where_faster import DenseWhereFaster, with_dense_steps
from ddl.collectives import Collected, Collective, messages
from ddl.comm import Communicator
from ddl.compressors import Compressor
from ddl.errors import DDLError
from ddl.nodes import Teams
from ddl.selectors import RandomK
from ddl.sparse import Packet, SparseVector
from ddl.wires import PLAIN, WireFormat


def make_aggregator(
    comm: Communicator,
    teams: Teams | None,
    numel: int,
    device: torch.device,
    compressor: Compressor,
    seed: int,
) -> SparseAggregator | DenseWhereFaster | HierarchicalAggregator:
    """What aggregates a bucket in parts.

    Args:
        comm: the ranks.
        teams: for two levels; None for one.
        numel: length of the bucket.
        device: where the bucket lives.
        compressor: any but the dense one.
        seed: of this bucket, the same on every rank.
    """
    if compressor.make_collective is None:
        raise ValueError(f"a selector is needed to aggregate in parts, got {compressor.name!r}")
    if teams is not None:
        return HierarchicalAggregator(teams, numel, device, compressor, seed)
    collective = compressor.make_collective()
    compressor = dataclasses.replace(compressor, make_collective=lambda: collective)
    sparse = SparseAggregator(comm, numel, device, compressor, seed)
    return with_dense_steps(comm, sparse, collective, compressor)


class HierarchicalAggregator:
    """Reduce within nodes, aggregate across them, share. See `ddl.aggregation.aggregator.Aggregator`.

    Attributes:
        first: see `Aggregator.first`.
    """

    def __init__(
        self,
        teams: Teams,
        numel: int,
        device: torch.device,
        compressor: Compressor,
        seed: int,
    ) -> None:
        """Owe nothing yet.

        Args:
            teams: the ranks; this aggregator uses them only within `begin`.
            numel: length of the bucket.
            device: where the bucket lives.
            compressor: any but the dense one.
            seed: of this bucket, the same on every rank.
        """
        self._teams = teams
        shards = max(1, min(teams.shards, numel))
        bounds = [numel * shard // shards for shard in range(shards + 1)]
        self._shards = [slice(low, high) for low, high in pairwise(bounds)]
        self._own: _Owner | None = None
        self.first = 0
        if teams.shard is not None and teams.shard < shards:
            self.first, end = bounds[teams.shard : teams.shard + 2]
            # Another seed for each shard, the same on all of its owners.
            shard_seed = (seed + 0x9E3779B97F4A7C15 * teams.shard) % 2**64
            shard = slice(self.first, end)
            self._own = _Owner(teams, shard, device, compressor, shard_seed)
        self._begun: _Begun | None = None

    @property
    def residual(self) -> Tensor | None:
        """float32 [length of this rank's shard]; None if it owns none."""
        return None if self._own is None else self._own.inner.residual

    @property
    def draws(self) -> RandomK | None:
        """See `Aggregator.draws`."""
        return None if self._own is None else self._own.inner.draws

    def begin(self, flat: Tensor, density: float) -> Outcome:
        """See `Aggregator.begin`."""
        teams = self._teams
        teams.label()
        bytes_before = teams.within.bytes_sent + teams.across.bytes_sent
        begin = time.perf_counter()
        node_sum = self._reduce(flat)
        share, select_seconds = torch.empty(0, dtype=torch.uint8), 0.0
        if self._own is not None and node_sum is not None:
            outcome = self._own.begin(node_sum, density)
            select_seconds = outcome.select_seconds
            share = _encode(self._own.average(), outcome.finite, outcome.picked)
        gathered = messages.all_gather(teams.within, share)
        averages, finite, picked = [], True, 0
        for shard, message in zip(self._shards, gathered, strict=False):
            average, shard_finite, shard_picked = _decode(message, shard, flat.device)
            averages.append(average)
            finite &= shard_finite and _fits(average, flat.dtype)
            picked += shard_picked
        ended = time.perf_counter()
        self._begun = _Begun(averages, finite)
        return Outcome(
            finite=finite,
            picked=picked,
            select_seconds=select_seconds,
            started=begin + select_seconds,  # without the selection, which lies in between
            ended=ended,
            bytes_sent=teams.within.bytes_sent + teams.across.bytes_sent - bytes_before,
        )

    def apply(self, flat: Tensor) -> None:
        """See `Aggregator.apply`."""
        for shard, average in zip(self._shards, self._take_begun().averages, strict=True):
            if isinstance(average, SparseVector):
                kernels.scatter(flat[shard], average.indices, average.values)
            else:
                flat[shard].copy_(average)
        if self._own is not None:
            self._own.apply(flat)

    def owe(self, flat: Tensor) -> None:
        """See `Aggregator.owe`."""
        begun = self._take_begun()
        if self._own is not None and self._teams.shard is not None:
            self._own.owe(begun.averages[self._teams.shard], flat.dtype)
        if not begun.finite:
            flat.fill_(float("nan"))

    def discard(self, flat: Tensor) -> None:
        """See `Aggregator.discard`; takes back what the node's ranks gave."""
        self._take_begun()
        if self._own is not None:
            self._own.discard()

    # 1. Reduce.

    def _reduce(self, flat: Tensor) -> _NodeSum | None:
        """The sum of the node's gradients on this rank's shard, None if it owns none.

        In step s each rank sends to the s-th rank after it and receives from the s-th before. What
        travels has the gradient's dtype; sums are in float32.
        """
        within = self._teams.within
        node_sum = None if self._own is None else _NodeSum(flat[self._own.shard])
        for step in range(1, within.size):
            dest, source = (within.rank + step) % within.size, (within.rank - step) % within.size
            theirs = None
            if dest < len(self._shards):
                sent = messages.bytes_of(flat[self._shards[dest]])
                if node_sum is None:
                    within.send(sent, dest)
                else:
                    theirs = within.sendrecv(sent, dest, source)
            elif node_sum is not None:
                theirs = within.recv(source)
            if node_sum is not None and theirs is not None:
                node_sum.add(theirs.view(flat.dtype).to(flat.device))
        return node_sum

    def _take_begun(self) -> _Begun:
        begun, self._begun = self._begun, None
        if begun is None:
            raise DDLError(
                "nothing has begun, expected one begin() before each apply, owe, discard"
            )
        return begun


Average = Tensor | SparseVector


class _Begun(NamedTuple):
    """What `begin` leaves for the second half."""

    averages: list[Average]  # of each shard: float32 [its length], or its entries
    finite: bool


class _NodeSum:
    """The sum of the gradients of a node's ranks, apart from what is not finite in them.

    Attributes:
        total: float32 [shard length], where a number that is not finite counts as 0.
        spoiled: bool [shard length], where there was such a number; None if there was none.
    """

    def __init__(self, flat: Tensor) -> None:
        """Begin with one rank's; `flat` is unchanged."""
        self.spoiled: Tensor | None = None
        self.total = self._finite_part(flat.to(torch.float32, copy=True))

    def add(self, flat: Tensor) -> None:
        """Add one rank's gradient."""
        self.total += self._finite_part(flat.float())

    def _finite_part(self, part: Tensor) -> Tensor:
        # One pass without a mask: what is not finite makes the sum so. Large sums may be, too.
        if torch.isfinite(part.sum()):
            return part
        spoiled = ~torch.isfinite(part)
        if spoiled.any():
            self.spoiled = spoiled if self.spoiled is None else self.spoiled | spoiled
        return part.masked_fill(spoiled, 0.0)


class _Owner:
    """What the owner of a shard does with the node's sum.

    Attributes:
        shard: its place in the bucket.
        inner: aggregates among the owners of this shard.
    """

    def __init__(
        self, teams: Teams, shard: slice, device: torch.device, compressor: Compressor, seed: int
    ) -> None:
        self.shard = shard
        if compressor.make_collective is None:
            raise ValueError(f"a hierarchy needs a selector, got compressor {compressor.name!r}")
        self._workers = teams.job.size
        across = self._across = _Across(compressor.make_collective(), teams.across)
        compressor = dataclasses.replace(compressor, make_collective=lambda: across)
        # It divides the owners' sum by the number of all ranks, so that it owes gradients of ranks,
        # not averages of nodes.
        numel = shard.stop - shard.start
        sparse = SparseAggregator(teams.job, numel, device, compressor, seed)
        self.inner = with_dense_steps(
            teams.across, sparse, across.collective, compressor, workers=teams.job.size
        )
        self._node_sum: _NodeSum | None = None

    def begin(self, node_sum: _NodeSum, density: float) -> Outcome:
        """See `Aggregator.begin`."""
        self._node_sum = node_sum
        if node_sum.spoiled is None:
            return self.inner.begin(node_sum.total, density)
        # For the aggregator, as for all the others, a spoiled entry is not finite. What was finite
        # in it is owed.
        outcome = self.inner.begin(
            node_sum.total.masked_fill(node_sum.spoiled, float("nan")), density
        )
        self.inner.residual[node_sum.spoiled] += node_sum.total[node_sum.spoiled]
        return outcome

    def average(self) -> Average:
        """What `begin` has collected, divided by the number of all ranks."""
        inner = self.inner
        if isinstance(inner, DenseWhereFaster) and inner.dense_average is not None:
            return inner.dense_average
        total = self._across.total
        return SparseVector(total.indices, total.values / self._workers, total.numel)

    def apply(self, flat: Tensor) -> None:
        """See `Aggregator.apply`."""
        self._take_node_sum()
        self.inner.apply(flat[self.shard])

    def owe(self, average: Average, dtype: torch.dtype) -> None:
        """See `Aggregator.owe`; `dtype` is that of the gradient."""
        self.inner.owe(self._take_node_sum().total)
        if not _fits(average, dtype):
            values = average.values if isinstance(average, SparseVector) else average
            overflowing = ~torch.isfinite(values.to(dtype))
            if isinstance(average, SparseVector):
                overflowing = average.indices[overflowing].long()
            self.inner.residual[overflowing] = 0.0

    def discard(self) -> None:
        """See `Aggregator.discard`."""
        self.inner.discard(self._take_node_sum().total)

    def _take_node_sum(self) -> _NodeSum:
        node_sum, self._node_sum = self._node_sum, None
        if node_sum is None:
            raise DDLError("nothing has begun, expected one begin() before each half")
        return node_sum


class _Across:
    """A collective among the owners of a shard, for an aggregator that counts all ranks.

    Attributes:
        total: what the last aggregation has given.
    """

    def __init__(self, collective: Collective, owners: Communicator) -> None:
        self.collective = collective
        self._owners = owners
        self.total: SparseVector

    def __call__(
        self, comm: Communicator, packet: Packet, k: int, wire: WireFormat = PLAIN
    ) -> Collected:
        """See `Collective`; `comm` is not used."""
        collected = self.collective(self._owners, packet, k, wire)
        self.total = collected.total
        return collected


# 3. Share.


def _encode(average: Average, finite: bool, picked: int) -> Tensor:
    """A message: int32 whether dense, whether finite, how many were picked; then the average."""
    dense = not isinstance(average, SparseVector)
    header = torch.tensor([dense, finite, picked], dtype=torch.int32).view(torch.uint8)
    if isinstance(average, SparseVector):
        return torch.cat([header, PLAIN.encode(Packet(average, finite))])
    return torch.cat([header, messages.bytes_of(average)])


def _decode(message: Tensor, shard: slice, device: torch.device) -> tuple[Average, bool, int]:
    dense, finite, picked = message[:12].clone().view(torch.int32).tolist()
    body, numel = message[12:].clone(), shard.stop - shard.start
    if dense:
        return body.view(torch.float32).to(device), bool(finite), picked
    return PLAIN.decode(body, numel, device).vector, bool(finite), picked


def _fits(average: Average, dtype: torch.dtype) -> bool:
    """Whether a gradient of that dtype can hold the average."""
    values = average.values if isinstance(average, SparseVector) else average
    return bool(torch.isfinite(values.to(dtype)).all())
