"""What the operations accept: one line per refusal, with got, expected and the cure."""

import ctypes
import math
import operator

import torch
from torch import Tensor

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_NUMEL = 2**31 - 1  # indices are int32


def _flat(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name} must be {names}, got {got}; convert it with .to()")
    if tensor.dim() != 1:
        raise ValueError(
            f"{name} must be 1-D, got shape {tuple(tensor.shape)}; pass {name}.view(-1)"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got stride {tensor.stride(0)}; pass {name}.contiguous()"
        )


def same_device(first_name: str, first: Tensor, name: str, tensor: Tensor) -> None:
    """Check that two tensors are on one device."""
    if tensor.device != first.device:
        raise ValueError(
            f"{name} must be on the device of {first_name}, {first.device}, got {tensor.device}; "
            "move one of them with .to()"
        )


def gradient(flat: Tensor, residual: Tensor) -> None:
    """Check a flat gradient and the residual it is added to."""
    _flat("flat", flat, GRADIENT_DTYPES)
    _flat("residual", residual, (torch.float32,))
    same_device("flat", flat, "residual", residual)
    if flat.numel() != residual.numel():
        raise ValueError(
            f"residual must have as many entries as flat, {flat.numel()}, got {residual.numel()}; "
            "keep one residual per bucket"
        )
    numel(flat.numel())
    if flat.numel() and flat.data_ptr() == residual.data_ptr():
        raise ValueError(
            "residual must have memory of its own, got that of flat; pass torch.zeros of its size"
        )


def numel(count: int) -> int:
    """Check the length of a flat vector."""
    count = _integer("numel", count)
    if not 0 <= count <= LARGEST_NUMEL:
        raise ValueError(
            f"numel must lie in [0, {LARGEST_NUMEL}], got {count}; indices are int32: split it"
        )
    return count


def kept(k: int, count: int) -> int:
    """Check how many of `count` entries are to be kept."""
    k = _integer("k", k)
    if not 0 <= k <= count:
        raise ValueError(
            f"k must lie in [0, numel] = [0, {count}], got {k}; "
            "it is the number of entries kept, not a density"
        )
    return k


def kept_or_all(k: int | None) -> int | None:
    """Check how many entries of a merge are to be kept; None keeps all."""
    if k is None:
        return None
    k = _integer("k", k)
    if k < 0:
        raise ValueError(f"k must be at least 0, got {k}; pass None to keep every entry")
    return k


def _integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(
            f"{name} must be an integer, got {value!r} ({type(value).__name__}); round it first"
        ) from None


def seed(value: int) -> int:
    """Check a seed: any integer."""
    return _integer("seed", value)


def scale(value: float) -> float:
    """Check a factor: finite in float32."""
    value = float(value)
    if not math.isfinite(value) or abs(value) > torch.finfo(torch.float32).max:
        raise ValueError(
            f"scale must be finite in float32, got {value}; "
            "skip the step if the factor itself overflowed"
        )
    return value


def prediction(threshold: float | None) -> float:
    """Return the threshold as a usable float32 magnitude, or 0.0 where it predicts nothing."""
    if threshold is None:
        return 0.0
    value = ctypes.c_float(float(threshold)).value
    return value if 0.0 < value < math.inf else 0.0


def sparse(name: str, indices: Tensor, values: Tensor) -> None:
    """Check the two halves of a sparse vector against each other."""
    _flat(f"{name}indices", indices, (torch.int32,))
    _flat(f"{name}values", values, (torch.float32,))
    same_device(f"{name}indices", indices, f"{name}values", values)
    if indices.numel() != values.numel():
        raise ValueError(
            f"{name}values must have one entry per index, {indices.numel()}, got {values.numel()}"
        )


def ascending(name: str, indices: Tensor) -> None:
    """Check that indices ascend strictly; on the CPU only, elsewhere it would synchronise."""
    if indices.device.type != "cpu" or indices.numel() == 0:
        return
    if int(indices[0]) < 0 or not bool((indices[1:] > indices[:-1]).all()):
        raise ValueError(
            f"{name} must ascend strictly from 0 up, got {_excerpt(indices)}; "
            "sort by index and add up duplicates first"
        )


def inside(indices: Tensor, count: int) -> None:
    """Check that indices lie in [0, count); on the CPU only, elsewhere it would synchronise."""
    if indices.device.type != "cpu" or indices.numel() == 0:
        return
    least, most = torch.aminmax(indices)
    if int(least) < 0 or int(most) >= count:
        raise ValueError(
            f"indices must lie in [0, {count}), got {int(least)}..{int(most)}; "
            "do they belong to another bucket?"
        )


def _excerpt(indices: Tensor) -> str:
    shown = ", ".join(str(index) for index in indices[:6].tolist())
    return f"[{shown}{', ...' if indices.numel() > 6 else ''}]"


def indices_of(flat: Tensor, indices: Tensor) -> None:
    """Check the indices that random-k selects from flat."""
    _flat("indices", indices, (torch.int32,))
    same_device("flat", flat, "indices", indices)
    ascending("indices", indices)
    inside(indices, flat.numel())


def target(
    name: str, dense: Tensor, indices: Tensor, values: Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Check a dense vector that a sparse one is written or added to."""
    _flat(name, dense, dtypes)
    sparse("", indices, values)
    same_device(name, dense, "indices", indices)
    inside(indices, dense.numel())


def threads(count: int) -> int:
    """Check a number of threads."""
    count = _integer("number of threads", count)
    if count < 1:
        raise ValueError(f"number of threads must be at least 1, got {count}")
    return count
