"""The operations of sparse gradients: select from what was accumulated, merge, scatter, give back.

One public function per operation. It checks its arguments, picks the implementation for the
tensors' device and calls it: compiled loops on the CPU, CUDA kernels where CuPy finds the device,
plain torch elsewhere. All implementations give the same bits. Tensors are 1-D and contiguous;
indices are int32, values float32.

Importing this package compiles nothing. The first operation on a CPU tensor compiles the kernels
and caches them on disk; of many processes that start together one compiles and the others wait.
"""

from typing import Any

import torch
from torch import Tensor

from ddl.kernels import checks, reference
from ddl.kernels.cuda import CudaOperations
from ddl.kernels.results import Merged, Selection
from ddl.kernels.threads import workers

__all__ = [
    "CudaOperations",
    "Merged",
    "Selection",
    "accumulate_at",
    "accumulate_gaussiank",
    "accumulate_topk",
    "device_operations",
    "get_num_threads",
    "give_back",
    "merge",
    "random_indices",
    "scatter",
    "set_num_threads",
    "warm_up",
]


def _implementation(device: torch.device) -> Any:
    """Return what has the operations for a device: a module or `CudaOperations`."""
    if device.type != "cpu":
        return device_operations(device) or reference
    from ddl.kernels import cpu  # compiles, or loads from the cache

    return cpu


def device_operations(device: torch.device) -> CudaOperations | None:
    """Return the CUDA kernels of a device, for those who keep results on it.

    Returns:
        None on the CPU, and where CuPy does not find the device.
    """
    if device.type != "cuda":
        return None
    from ddl.kernels import nvrtc  # looks for CuPy

    driver = nvrtc.driver_for(device)
    return None if driver is None else CudaOperations(driver)


def accumulate_topk(
    flat: Tensor,
    residual: Tensor,
    k: int,
    *,
    scale: float = 1.0,
    threshold: float | None = None,
) -> Selection:
    """Accumulate x = scale * flat + residual and move its k largest magnitudes out.

    Exact: ties go to the lower index, whatever the distribution. Zeros are never selected, so the
    count is min(k, number of finite non-zero x). x is computed in float32, product and sum rounded
    one after the other.

    Afterwards the residual is 0 where x was selected and x elsewhere. Where x is not finite it
    keeps its old value, the entry is not selected, and `finite` is False; the finite entries are
    accumulated and selected as usual. `flat` is untouched.

    Args:
        flat: [numel] float32, bfloat16 or float16, the gradient; numel <= 2^31 - 1.
        residual: [numel] float32 on the same device, changed in place.
        k: entries wanted, 0 <= k <= numel.
        scale: factor of flat, finite.
        threshold: a prediction of the k-th magnitude, best a little below it: entries that reach
            it are the candidates, and fewer than k of them cost a second pass. Any value is
            allowed and costs time only; 0, NaN, infinity and None predict nothing (a small sample
            is taken instead).

    Returns:
        The selection. Its `threshold` is the k-th magnitude.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or range.
    """
    checks.gradient(flat, residual)
    k = checks.kept(k, flat.numel())
    scale = checks.scale(scale)
    predicted = checks.prediction(threshold)
    return _implementation(flat.device).accumulate_topk(flat, residual, k, scale, predicted)


def accumulate_gaussiank(
    flat: Tensor, residual: Tensor, k: int, *, scale: float = 1.0
) -> Selection:
    """Accumulate x = scale * flat + residual and move out what exceeds a Gaussian's threshold.

    The rule of arXiv 1911.08772: magnitudes above mean + std * ppf(1 - k / numel / 2), halved or
    raised by half, three evaluations at most. Where none of the three selects between 2k/3 and
    4k/3 entries, the k largest are selected instead. So the count lies in [2k/3, 4k/3], or is
    that of all finite non-zero x where there are fewer than 2k/3. Mean and (population) standard
    deviation are those of the finite x, in float64.

    The residual, non-finite x and `flat` are treated as by `accumulate_topk`.

    Args:
        flat: [numel] float32, bfloat16 or float16, the gradient; numel <= 2^31 - 1.
        residual: [numel] float32 on the same device, changed in place.
        k: entries wanted, 0 <= k <= numel.
        scale: factor of flat, finite.

    Returns:
        The selection.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or range.
    """
    checks.gradient(flat, residual)
    k = checks.kept(k, flat.numel())
    scale = checks.scale(scale)
    return _implementation(flat.device).accumulate_gaussiank(flat, residual, k, scale)


def accumulate_at(
    flat: Tensor, residual: Tensor, indices: Tensor, *, scale: float = 1.0
) -> Selection:
    """Accumulate x = scale * flat + residual and move out the entries at the given indices.

    Exactly these are selected, zeros included. Where x is not finite the value is 0, the residual
    keeps its old value, and `finite` is False.

    Args:
        flat: [numel] float32, bfloat16 or float16, the gradient; numel <= 2^31 - 1.
        residual: [numel] float32 on the same device, changed in place.
        indices: [count] int32 on the same device, strictly ascending, in [0, numel).
        scale: factor of flat, finite.

    Returns:
        The selection.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or range. The values of the
            indices are checked on the CPU only; elsewhere the check would stop the device.
    """
    checks.gradient(flat, residual)
    checks.indices_of(flat, indices)
    scale = checks.scale(scale)
    return _implementation(flat.device).accumulate_at(flat, residual, indices, scale)


def random_indices(numel: int, k: int, seed: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Draw k distinct indices below numel, the same everywhere for the same seed.

    A keyed permutation of [0, numel), in integers only, applied to 0..k-1: O(k) work and memory.

    Args:
        numel: number of indices to draw from, at most 2^31 - 1.
        k: how many to draw, 0 <= k <= numel.
        seed: any integer; its low 64 bits count.
        device: where the result shall be.

    Returns:
        int32 [k], strictly ascending.

    Raises:
        ValueError: k or numel is out of range, or not an integer.
    """
    numel = checks.numel(numel)
    k = checks.kept(k, numel)
    seed = checks.seed(seed)
    device = torch.device(device)
    return _implementation(device).random_indices(numel, k, seed, device)


def merge(
    a_indices: Tensor,
    a_values: Tensor,
    b_indices: Tensor,
    b_values: Tensor,
    k: int | None = None,
) -> Merged:
    """Add two sparse vectors and keep the k largest magnitudes of the sum.

    Where both have an index, the value is a + b in that order. Ties go to the lower index. Zeros
    are ordinary entries of magnitude 0; sums that are not finite rank as the largest, all alike.
    O(count of a + count of b); the inputs are untouched.

    Args:
        a_indices: [count of a] int32, strictly ascending.
        a_values: [count of a] float32.
        b_indices: [count of b] int32, strictly ascending, on the same device.
        b_values: [count of b] float32.
        k: entries kept at most; None keeps all.

    Returns:
        The sum, and the fate of every entry of a and b.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or range, or indices do not
            ascend (checked on the CPU only).
    """
    checks.sparse("a_", a_indices, a_values)
    checks.sparse("b_", b_indices, b_values)
    checks.same_device("a_indices", a_indices, "b_indices", b_indices)
    checks.ascending("a_indices", a_indices)
    checks.ascending("b_indices", b_indices)
    k = checks.kept_or_all(k)
    return _implementation(a_indices.device).merge(a_indices, a_values, b_indices, b_values, k)


def scatter(dense: Tensor, indices: Tensor, values: Tensor, *, scale: float = 1.0) -> None:
    """Set dense to zero, then dense[indices] to scale * values.

    The product is computed in float32 and rounded to the dtype of dense.

    Args:
        dense: [numel] float32, bfloat16 or float16, overwritten.
        indices: [count] int32 on the same device, distinct, in [0, numel).
        values: [count] float32 on the same device.
        scale: factor of the values, finite.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or range; indices are checked
            against numel on the CPU only.
    """
    checks.target("dense", dense, indices, values, checks.GRADIENT_DTYPES)
    scale = checks.scale(scale)
    _implementation(dense.device).scatter(dense, indices, values, scale)


def give_back(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """Add values to residual[indices]: what was selected but not applied is owed again.

    Args:
        residual: [numel] float32, changed in place.
        indices: [count] int32 on the same device, distinct, in [0, numel).
        values: [count] float32 on the same device.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or range; indices are checked
            against numel on the CPU only.
    """
    checks.target("residual", residual, indices, values, (torch.float32,))
    _implementation(residual.device).give_back(residual, indices, values)


def set_num_threads(count: int) -> None:
    """Set how many CPU threads one operation uses, in this process; results do not depend on it.

    Raises:
        ValueError: count is below 1.
    """
    workers.count = checks.threads(count)


def get_num_threads() -> int:
    """Return how many CPU threads one operation uses: torch's number unless set."""
    return workers.count


def warm_up() -> None:
    """Compile the CPU kernels, or load them from the cache, so that no step has to wait for it."""
    _implementation(torch.device("cpu"))
