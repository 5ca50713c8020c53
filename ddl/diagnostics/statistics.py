"""Numbers about one layer: what was accumulated, and what selecting from it has left."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ddl.diagnostics.samples import LARGEST, sample
from ddl.kernels.reference import gaussian_quantile

BINS = 41  # odd, so that zero has a bin of its own
RANGE_IN_DEVIATIONS = 4.0


@dataclass(frozen=True)
class Shape:
    """How the values of a layer are distributed.

    Attributes:
        norm: Euclidean, of all values.
        deviation: standard deviation.
        kurtosis: fourth central moment over the squared variance; 3 for a Gaussian, 6 for a
            Laplacian. NaN where all values are equal.
        largest: the largest magnitude among the sampled values.
        bound: the histogram runs from -bound to bound; what lies beyond is in the outermost bins.
        counts: of the sampled values, in BINS equal bins.
    """

    norm: float
    deviation: float
    kurtosis: float
    largest: float
    bound: float
    counts: list[int]


def norm_of(values: Tensor) -> float:
    """Euclidean; summed in float64, since float32 loses 0.1 % of a million equal values."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def shape_of(values: Tensor) -> Shape:
    """Describe finite values, float32 [at least 1], unchanged."""
    norm = norm_of(values)
    # In float64, since the squares of what float32 holds may be beyond its range.
    sampled = sample(values, LARGEST).double()
    squares = (sampled - sampled.mean()).square_()
    variance = float(squares.mean())
    deviation = math.sqrt(variance)
    fourth = float(squares.div_(variance).square_().mean()) if variance > 0 else math.nan
    bound = RANGE_IN_DEVIATIONS * deviation or 1.0
    counts = torch.histc(sampled.clamp(-bound, bound), BINS, -bound, bound)
    return Shape(
        norm=norm,
        deviation=deviation,
        kurtosis=fourth,
        largest=float(sampled.abs().max()),
        bound=bound,
        counts=[int(count) for count in counts.tolist()],
    )


@dataclass(frozen=True)
class Contraction:
    """What selecting k of d entries leaves of a vector u, beside what theory promises.

    Shi et al., arXiv 1911.08772: for random-k, and any u, the expectation of the share left is
    1 - k/d; for top-k, and bell-shaped u, it is at most (1 - k/d)^2 (Theorem 1).

    Attributes:
        left: ||u - selected(u)||^2 / ||u||^2; 0 where u is zero.
        bound_random: 1 - k/d.
        bound_topk: (1 - k/d)^2.
    """

    left: float
    bound_random: float
    bound_topk: float


def contraction(norm_left: float, norm: float, k: int, d: int) -> Contraction:
    """Compare the Euclidean norms of u - selected(u) and of u, for k of d entries."""
    kept = 1 - k / d
    left = (norm_left / norm) ** 2 if norm > 0 else 0.0
    return Contraction(left, kept, kept * kept)


def gaussian_count(values: Tensor, norm: float, k: int) -> int:
    """Entries beyond the threshold that would select k of as many normal values.

    mean + std * ppf(1 - k/d/2): arXiv 1911.08772, Algorithm 1, before its corrections.

    Args:
        values: finite, float32 [d].
        norm: Euclidean, of the values.
        k: from 0 to d.
    """
    if k == 0:
        return 0
    d = values.numel()
    mean = float(values.mean(dtype=torch.float64))
    std = math.sqrt(max(0.0, norm * norm / d - mean * mean))
    cutoff = mean + std * gaussian_quantile(k, d)
    return int((values.abs() > max(cutoff, 0.0)).sum())
