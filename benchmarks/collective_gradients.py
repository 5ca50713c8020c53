"""What ranks aggregate, drawn without ever holding a whole gradient, and what became of it.

A rank's gradient is correlation * shared + (1 - correlation) * own, both Gaussian noise; its picks
are the k largest magnitudes. The truth is known from the picks alone: the sum over ranks, and the
k largest of that.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ddl.collectives import Collected, messages
from ddl.comm import Communicator
from ddl.sparse import SparseVector

CHUNK = 1 << 20
# float32 sums of up to 2**10 values differ from the exact sum by less.
ROUNDING = 1e-4


def picks(numel: int, k: int, correlation: float, rank: int, seed: int = 0) -> SparseVector:
    """The k largest entries of a rank's gradient; O(k) memory."""
    indices = torch.empty(0, dtype=torch.int64)
    values = torch.empty(0)
    threshold = -1.0
    for chunk, start in enumerate(range(0, numel, CHUNK)):
        count = min(CHUNK, numel - start)
        x = (1 - correlation) * _noise(count, seed, chunk, rank + 1)
        if correlation:
            x += correlation * _noise(count, seed, chunk, 0)
        found = (x.abs() >= threshold).nonzero().flatten()
        indices = torch.cat([indices, found + start])
        values = torch.cat([values, x[found]])
        if values.numel() > k:
            largest = torch.topk(values.abs(), k)
            threshold = float(largest.values[-1])
            indices, values = indices[largest.indices], values[largest.indices]
    order = indices.argsort()
    return SparseVector(indices[order].int(), values[order], numel)


def _noise(count: int, seed: int, chunk: int, source: int) -> Tensor:
    # Sources, chunks and seeds are small, so that the three fit one number without overlap.
    number = (seed * 100_003 + chunk) * 10_007 + source
    return torch.randn(count, generator=torch.Generator().manual_seed(number))


@dataclass(frozen=True)
class Fate:
    """What a collective did with the picks of all ranks.

    Attributes:
        delivered: entries of the result.
        recall: of the k largest entries of the sum over all ranks, the share that the result has.
        lost_share: coordinates of which some gradient is neither in the result nor owed by any
            rank, as a share of k.
        lost_mass: how much that is, as a share of all that was picked (L1).
    """

    delivered: int
    recall: float
    lost_share: float
    lost_mass: float


def fate(comm: Communicator, k: int, local: SparseVector, collected: Collected) -> Fate:
    """Find out, on every rank, from what each rank picked and what it believes was included.

    Raises:
        SystemExit: two ranks hold different results.
    """
    total = collected.total
    bits = messages.bytes_of(torch.cat([total.indices, total.values.view(torch.int32)]))
    reports = messages.gather_objects(
        comm,
        (
            hashlib.sha256(bits.numpy().tobytes()).digest(),
            (local.indices, local.values, collected.included),
            [(owed.indices, owed.values) for owed in collected.owed],
        ),
    )
    if any(report[0] != reports[0][0] for report in reports):
        raise SystemExit("the ranks' results differ; none of what follows would mean anything")

    picked = [report[1] for report in reports]
    everything = _sum([(indices, values) for indices, values, _ in picked])
    claimed = [(indices[there], values[there]) for indices, values, there in picked]
    kept = [(total.indices, total.values)] + [owed for report in reports for owed in report[2]]
    missing = _sum([*claimed, *((indices, -values) for indices, values in kept)])
    size = max(float(everything.values.abs().max()), 1e-30) if everything.count else 1.0
    lost = missing.values.abs() > ROUNDING * size
    mass = sum(float(values.double().abs().sum()) for _, values, _ in picked)
    return Fate(
        delivered=total.count,
        recall=_recall(everything, total, k),
        lost_share=int(lost.sum()) / k,
        lost_mass=float(missing.values[lost].abs().sum()) / mass if mass else 0.0,
    )


def _sum(parts: list[tuple[Tensor, Tensor]]) -> SparseVector:
    """Add up, in float64."""
    indices = torch.cat([indices for indices, _ in parts])
    values = torch.cat([values for _, values in parts]).double()
    union, place = torch.unique(indices, return_inverse=True)
    sums = torch.zeros(union.numel(), dtype=torch.float64).index_add_(0, place, values)
    return SparseVector(union, sums, 0)


def _recall(everything: SparseVector, total: SparseVector, k: int) -> float:
    """Which share of the k largest sums the result has; equals at the boundary count alike."""
    magnitudes = everything.values.abs()
    wanted = min(k, magnitudes.numel())
    if wanted == 0:
        return 1.0
    kth = float(torch.topk(magnitudes, wanted).values[-1])
    # The sum in float32 may put equals to either side of the boundary.
    large = everything.indices[magnitudes >= kth * (1 - 1e-6)]
    return min(1.0, int(torch.isin(large, total.indices).sum()) / wanted)
