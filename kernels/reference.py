"""Every operation in plain torch, on any device: slow, obvious, and the truth for the others.

The arguments are those of the public functions in `ddl.kernels`, already checked.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

from ddl.kernels.results import Merged, Selection

HALF_ROUNDS = 8  # rounds of the permutation behind random_indices


def accumulate(flat: Tensor, residual: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return x = scale * flat + residual and where it is finite.

    Product and sum are rounded one after the other (no fused multiply-add), so that every
    implementation gives the same bits.
    """
    x = flat.to(torch.float32) * scale + residual
    return x, torch.isfinite(x)


def largest(magnitude: Tensor, k: int) -> Tensor:
    """Return the ascending positions of the k largest magnitudes, ties to the lower position."""
    order = torch.sort(magnitude, descending=True, stable=True).indices
    return torch.sort(order[:k]).values


def _take(
    x: Tensor, finite: Tensor, residual: Tensor, chosen: Tensor, candidates: int
) -> Selection:
    """Move the chosen entries out of x, leave the others in the residual."""
    values = torch.where(finite, x, 0.0)[chosen]
    residual.copy_(torch.where(finite, x, residual))
    residual[chosen[finite[chosen]]] = 0.0
    return Selection(
        indices=chosen.to(torch.int32),
        values=values,
        finite=bool(finite.all()),
        threshold=float(values.abs().min()) if values.numel() else 0.0,
        candidates=candidates,
        repaired=False,
    )


def accumulate_topk(
    flat: Tensor, residual: Tensor, k: int, scale: float, threshold: float
) -> Selection:
    """See `ddl.kernels.accumulate_topk`; here a prediction is only counted against."""
    x, finite = accumulate(flat, residual, scale)
    magnitude = torch.where(finite, x.abs(), 0.0)
    chosen = largest(magnitude, k)
    chosen = chosen[magnitude[chosen] > 0]
    passed = int((magnitude >= threshold).sum()) if threshold > 0 else chosen.numel()
    return _take(x, finite, residual, chosen, min(passed, 2 * k))


def gaussian_quantile(k: int, numel: int) -> float:
    """Return ppf(1 - density / 2): of a standard normal, k of numel magnitudes exceed it."""
    return NormalDist().inv_cdf(1.0 - k / numel / 2.0)


def gaussian_cutoff(
    mean: float, std: float, k: int, numel: int, count_above: Callable[[float], int]
) -> float | None:
    """Return the magnitude that Gaussian-k selects above, None where its rule finds none.

    The rule of arXiv 1911.08772: mean + std * ppf(1 - density / 2), halved while it selects
    fewer than 2k/3 and raised by half while it selects more than 4k/3, three evaluations at most.

    Args:
        mean: mean of the accumulated gradient.
        std: its population standard deviation.
        k: entries wanted, at least 1.
        numel: entries there are.
        count_above: number of non-zero magnitudes greater than its argument; any number above
            4k/3 will do where there are more.
    """
    cutoff = mean + std * gaussian_quantile(k, numel)
    for _ in range(3):
        count = count_above(cutoff)
        if 3 * count < 2 * k:
            cutoff *= 0.5
        elif 3 * count > 4 * k:
            cutoff *= 1.5
        else:
            return cutoff
    return None


def accumulate_gaussiank(flat: Tensor, residual: Tensor, k: int, scale: float) -> Selection:
    """See `ddl.kernels.accumulate_gaussiank`."""
    x, finite = accumulate(flat, residual, scale)
    magnitude = torch.where(finite, x.abs(), 0.0)
    cutoff = None
    if k > 0 and bool(finite.any()):
        sound = x[finite].to(torch.float64)
        mean, std = float(sound.mean()), float(sound.std(correction=0))
        cutoff = gaussian_cutoff(
            mean, std, k, flat.numel(), lambda c: int(_above(magnitude, c).sum())
        )
    if cutoff is None:
        chosen = largest(magnitude, k)
        chosen = chosen[magnitude[chosen] > 0]
    else:
        chosen = _above(magnitude, cutoff).nonzero().flatten()
    return _take(x, finite, residual, chosen, chosen.numel())


def _above(magnitude: Tensor, cutoff: float) -> Tensor:
    """Mark the non-zero magnitudes above the cutoff, which is rounded to float32."""
    least = torch.tensor(max(cutoff, 0.0), dtype=torch.float32, device=magnitude.device)
    return magnitude > least


def accumulate_at(flat: Tensor, residual: Tensor, indices: Tensor, scale: float) -> Selection:
    """See `ddl.kernels.accumulate_at`."""
    x, finite = accumulate(flat, residual, scale)
    return _take(x, finite, residual, indices.to(torch.int64), indices.numel())


def round_keys(seed: int) -> list[int]:
    """Return the 32-bit keys of the permutation's rounds (splitmix64 over the seed)."""
    keys = []
    state = seed & (2**64 - 1)
    for _ in range(HALF_ROUNDS):
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        keys.append((mixed ^ (mixed >> 31)) >> 32)
    return keys


def half_bits(numel: int) -> int:
    """Return h, half the bits of the smallest domain 2^(2h) that holds numel indices."""
    return max(1, ((numel - 1).bit_length() + 1) // 2)


def random_indices(numel: int, k: int, seed: int, device: torch.device) -> Tensor:
    """See `ddl.kernels.random_indices`.

    1. A Feistel network permutes [0, 2^(2h)), the smallest such domain that holds numel.
    2. An image outside [0, numel) is permuted again until it falls inside (cycle walking), so the
       network permutes [0, numel) too, in four tries a number at most on average.
    3. The images of 0..k-1 are the indices; they are distinct because the map is one to one.
    """
    h = half_bits(numel)
    low = (1 << h) - 1

    def permute(number: Tensor) -> Tensor:
        left, right = number >> h, number & low
        for key in round_keys(seed):
            mixed = (right + key) & 0xFFFFFFFF
            mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
            mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
            left, right = right, left ^ ((mixed ^ (mixed >> 16)) & low)
        return (left << h) | right

    numbers = permute(torch.arange(k, dtype=torch.int64, device=device))
    while bool((numbers >= numel).any()):
        numbers = torch.where(numbers >= numel, permute(numbers), numbers)
    return torch.sort(numbers).values.to(torch.int32)


def merge(
    a_indices: Tensor, a_values: Tensor, b_indices: Tensor, b_values: Tensor, k: int | None
) -> Merged:
    """See `ddl.kernels.merge`."""
    union, place = torch.unique(torch.cat([a_indices, b_indices]), return_inverse=True)
    place_a, place_b = place[: a_indices.numel()], place[a_indices.numel() :]
    values = torch.zeros(union.numel(), dtype=torch.float32, device=a_values.device)
    values[place_a] = a_values
    in_a = torch.zeros(union.numel(), dtype=torch.bool, device=a_values.device)
    in_a[place_a] = True
    values[place_b] = torch.where(in_a[place_b], values[place_b] + b_values, b_values)

    magnitude = torch.where(torch.isfinite(values), values.abs(), math.inf)
    keep = largest(magnitude, union.numel() if k is None else k)
    fate = torch.full((union.numel(),), -1, dtype=torch.int32, device=a_values.device)
    fate[keep] = torch.arange(keep.numel(), dtype=torch.int32, device=a_values.device)
    return Merged(union[keep], values[keep], fate[place_a], fate[place_b])


def scatter(dense: Tensor, indices: Tensor, values: Tensor, scale: float) -> None:
    """See `ddl.kernels.scatter`."""
    dense.zero_()
    dense[indices.to(torch.int64)] = (values * scale).to(dense.dtype)


def give_back(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """See `ddl.kernels.give_back`."""
    places = indices.to(torch.int64)
    residual[places] = residual[places] + values
