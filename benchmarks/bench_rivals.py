"""What the kernels are measured against: compositions of torch's own operations.

Each takes a gradient and a residual, leaves the residual without what it selects, and returns how
many entries it selected, or the selected values.
"""

from statistics import NormalDist

import torch
from torch import Tensor


def add(flat: Tensor, residual: Tensor) -> None:
    """Accumulate only: the floor, 12 bytes an element."""
    residual.add_(flat)


def composition(flat: Tensor, residual: Tensor, k: int) -> Tensor:
    """Top-k as it is usually written; return the values."""
    residual.add_(flat)
    indices = torch.topk(residual.abs(), k, sorted=False).indices
    values = residual[indices]
    residual[indices] = 0.0
    return values


def at(flat: Tensor, residual: Tensor, indices: Tensor) -> Tensor:
    """Select the given int64 indices, as for random-k."""
    residual.add_(flat)
    values = residual[indices]
    residual[indices] = 0.0
    return values


def merge(
    a_indices: Tensor, a_values: Tensor, b_indices: Tensor, b_values: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Add two sparse vectors and keep k: sort, add, top-k."""
    union, place = torch.unique(torch.cat([a_indices, b_indices]), return_inverse=True)
    sums = torch.zeros(union.numel(), dtype=a_values.dtype, device=a_values.device)
    sums.index_add_(0, place, torch.cat([a_values, b_values]))
    kept = torch.topk(sums.abs(), min(k, sums.numel()), sorted=False).indices.sort().values
    return union[kept], sums[kept]


def scatter(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    """Make a sparse vector dense."""
    dense.zero_()
    dense[indices] = values.to(dense.dtype)


def _move_out(residual: Tensor, indices: Tensor) -> Tensor:
    values = residual[indices]
    residual[indices] = 0.0
    return values


# Constants of the published rule of DGC (arXiv 1712.01887) as its authors released it.
DGC_SAMPLE = 0.01
DGC_LOWER, DGC_UPPER = 0.8, 1.3
DGC_ADAPTATIONS = 10


def dgc(flat: Tensor, residual: Tensor, k: int) -> tuple[int, int]:
    """Deep Gradient Compression's threshold, as described; return the entries sent and found.

    A sample of 1 % gives the threshold. It is lowered by a fifth while fewer than 0.8 k entries
    reach it, raised by 0.3 while more than 1.3 k do, ten times at most. Then the first k by index
    are sent.
    """
    residual.add_(flat)
    magnitude = residual.abs()
    numel = magnitude.numel()
    size = max(1, min(numel, int(DGC_SAMPLE * numel)))
    sample = magnitude[torch.randint(0, numel, (size,), device=magnitude.device)]
    wanted = max(1, int(k * size / numel))
    threshold = float(torch.topk(sample, wanted).values.min())
    indices = (magnitude >= threshold).nonzero().flatten()
    for _ in range(DGC_ADAPTATIONS):
        if indices.numel() < DGC_LOWER * k:
            threshold *= DGC_LOWER
        elif indices.numel() > DGC_UPPER * k:
            threshold *= DGC_UPPER
        else:
            break
        indices = (magnitude >= threshold).nonzero().flatten()
    sent = _move_out(residual, indices[:k]).numel()
    return sent, indices.numel()


def gaussiank(flat: Tensor, residual: Tensor, k: int) -> tuple[int, int]:
    """Gaussian-k's threshold (arXiv 1911.08772), as described; return the entries sent, twice.

    Mean + std * ppf(1 - density / 2); halved where it selects fewer than 2k/3, raised by half where
    more than 4k/3; of three evaluations the last one counts, whatever it selects.
    """
    residual.add_(flat)
    std, mean = torch.std_mean(residual)
    cutoff = float(mean) + float(std) * NormalDist().inv_cdf(1.0 - k / flat.numel() / 2.0)
    magnitude = residual.abs()
    for evaluation in range(3):
        mask = magnitude > cutoff
        count = int(mask.sum())
        if 2 * k / 3 <= count <= 4 * k / 3 or evaluation == 2:
            break
        cutoff *= 0.5 if count < 2 * k / 3 else 1.5
    sent = _move_out(residual, mask.nonzero().flatten()).numel()
    return sent, sent
