"""Inputs, implementations and operations of the kernel tests: one list, one test body."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator.emulated import EmulatedDriver
from torch import Tensor

from ddl import kernels
from ddl.kernels import CudaOperations, cpu, cuda_selection, native, numba_loops, reference, threads
from ddl.kernels import cpu_layout as layout


def _loops() -> dict[str, Any]:
    """Name every set of compiled loops that this installation and processor have."""
    found: dict[str, Any] = {"numba": numba_loops}
    path = native.find(Path(native.__file__).parent)
    if path is not None:
        library = native.open_library(path)
        names = ("portable", "avx2", "avx512")
        found |= {names[level]: native.Loops(library, level) for level in native.levels(library)}
    return found


LOOPS = _loops()
BEST = list(LOOPS)[-1]
# Every set of loops, the best one with several numbers of threads.
CPU = (
    *(f"{name}-{threads}" for name, threads in zip(LOOPS, (2, 3, 2, 3), strict=False)),
    f"{BEST}-1",
    f"{BEST}-2",
)
# The CUDA kernels, on an emulated device whose threads and blocks run in an order of their own at
# every launch.
COMPILED = (*CPU, "emulated")
IMPLEMENTATIONS = ("reference", *COMPILED)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def emulated(seed: int = 0) -> CudaOperations:
    """The CUDA operations on an emulated device of a few multiprocessors."""
    return CudaOperations(EmulatedDriver(seed))


@contextmanager
def using(implementation: str, small_buffers: bool = False) -> Iterator[None]:
    """Route the public functions to one implementation, on so many threads.

    Args:
        implementation: one of IMPLEMENTATIONS, or "emulated" and a seed.
        small_buffers: cut small inputs into pieces too, and leave so little room for candidates
            and samples that short vectors go every way that long ones do. Not for sums, whose
            pieces must be whole chunks.
    """
    with pytest.MonkeyPatch.context() as patch:
        if implementation == "reference":
            patch.setattr(kernels, "_implementation", lambda device: reference)
        elif implementation.startswith("emulated"):
            operations = emulated(int(implementation.removeprefix("emulated") or 0))
            patch.setattr(kernels, "_implementation", lambda device: operations)
            if small_buffers:
                patch.setattr(cuda_selection, "SLACK", 3)
                patch.setattr(cuda_selection, "SAMPLE", 64)
            small_buffers = False
        else:
            name, count = implementation.split("-")
            patch.setattr(cpu, "loops", LOOPS[name])
            patch.setattr(threads.workers, "_wanted", int(count))
            patch.setattr(threads.workers, "_pool", None)
            patch.setattr(threads, "INLINE_NUMEL", 1 << 18)  # threads for less long vectors
        if small_buffers:
            patch.setattr(threads, "INLINE_NUMEL", 0)
            patch.setattr(threads, "PIECE_NUMEL", layout.BLOCK)
            patch.setattr(cpu, "GRANULE", layout.BLOCK)
            patch.setattr(cpu, "SLACK", 3)
            patch.setattr(cpu, "SAMPLE", 64)
        yield


def distributions() -> dict[str, Callable[[int, torch.Generator], Tensor]]:
    """Name every distribution that selection must survive."""

    def normal(n: int, g: torch.Generator) -> Tensor:
        return torch.randn(n, generator=g)

    def laplace(n: int, g: torch.Generator) -> Tensor:
        u = torch.rand(n, generator=g) - 0.5
        return -u.sign() * torch.log1p(-2 * u.abs().clamp(max=0.49999997))

    def student(n: int, g: torch.Generator) -> Tensor:
        chi = torch.randn(3, n, generator=g).square().sum(0)
        return torch.randn(n, generator=g) / (chi / 3).sqrt()

    def uniform(n: int, g: torch.Generator) -> Tensor:
        return torch.rand(n, generator=g) * 2 - 1

    def layers(n: int, g: torch.Generator) -> Tensor:
        scales = torch.tensor([10.0, 0.01, 1.0, 1e-4, 0.3])
        return torch.randn(n, generator=g) * scales[torch.arange(n) * 5 // max(n, 1)]

    def dominating(n: int, g: torch.Generator) -> Tensor:
        x = torch.randn(n, generator=g) * 1e-3
        x[n // 2 : n // 2 + n // 8] *= 1e6
        return x

    def rising(n: int, g: torch.Generator) -> Tensor:
        return torch.arange(1, n + 1, dtype=torch.float32)

    def sparse(n: int, g: torch.Generator) -> Tensor:
        return torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.005)

    def zeros(n: int, g: torch.Generator) -> Tensor:
        return torch.zeros(n)

    def signed_zeros(n: int, g: torch.Generator) -> Tensor:
        return torch.zeros(n).copysign(torch.randn(n, generator=g))

    def equal(n: int, g: torch.Generator) -> Tensor:
        return torch.full((n,), 0.1)

    def few_values(n: int, g: torch.Generator) -> Tensor:
        return torch.randint(-3, 4, (n,), generator=g).float()

    def denormals(n: int, g: torch.Generator) -> Tensor:
        return torch.randint(-1000, 1000, (n,), generator=g).float() * 2.0**-149

    return {
        function.__name__: function
        for function in (
            normal,
            laplace,
            student,
            uniform,
            layers,
            dominating,
            rising,
            sparse,
            zeros,
            signed_zeros,
            equal,
            few_values,
            denormals,
        )
    }


DISTRIBUTIONS = distributions()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(distribution: str, n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return DISTRIBUTIONS[distribution](n, generator(seed)).to(dtype)


def with_nonfinite(tensor: Tensor, seed: int, count: int) -> Tensor:
    """Return a copy in which some entries are NaN or infinite."""
    tensor = tensor.clone()
    if tensor.numel() and count:
        places = torch.randint(0, tensor.numel(), (count,), generator=generator(seed))
        odd = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=tensor.dtype)
        tensor[places] = odd[torch.arange(count) % 3]
    return tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare bit by bit (so that -0 is not 0); every NaN is like another."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    bits = torch.int32 if one.dtype == torch.float32 else torch.int16
    nan = one.isnan() & other.isnan()
    return bool((nan | (one.view(bits) == other.view(bits))).all())


@dataclass(frozen=True)
class Operation:
    """One public function: its arguments from a seed, and a call that returns all it changed."""

    name: str
    arguments: Callable[[int, int, torch.dtype], dict[str, Any]]  # n, seed, dtype
    dtypes: tuple[torch.dtype, ...] = DTYPES

    def __str__(self) -> str:
        return self.name

    def call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call the public function on copies; return the results and the tensors afterwards."""
        copies = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        result = getattr(kernels, self.name)(**copies)
        outcome: dict[str, Any] = {
            f"{name} after": value for name, value in copies.items() if isinstance(value, Tensor)
        }
        if isinstance(result, tuple):
            outcome.update(result._asdict())  # type: ignore[attr-defined]
        else:
            outcome["result"] = result
        return outcome


def _accumulate(n: int, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "flat": draw("normal", n, seed, dtype),
        "residual": draw("laplace", n, seed + 1),
        "scale": 0.3,
    }


def _selected(n: int, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    return _accumulate(n, seed, dtype) | {"k": -(-n // 50)}


def some_indices(n: int, count: int, seed: int) -> Tensor:
    order = torch.randperm(n, generator=generator(seed))[:count]
    return order.sort().values.to(torch.int32)


def _at(n: int, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    return _accumulate(n, seed, dtype) | {"indices": some_indices(n, -(-n // 50), seed)}


def _merge(n: int, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    count = -(-n // 3)
    return {
        "a_indices": some_indices(n, count, seed),
        "a_values": draw("few_values", count, seed + 1),
        "b_indices": some_indices(n, count, seed + 2),
        "b_values": draw("few_values", count, seed + 3),
        "k": count,
    }


def _scatter(n: int, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    count = -(-n // 3)
    return {
        "dense": draw("normal", n, seed, dtype),
        "indices": some_indices(n, count, seed),
        "values": draw("student", count, seed) * 1e4,
        "scale": 0.7,
    }


def _give_back(n: int, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    arguments = _scatter(n, seed, dtype)
    return {
        "residual": arguments["dense"],
        "indices": arguments["indices"],
        "values": arguments["values"],
    }


OPERATIONS = (
    Operation("accumulate_topk", _selected),
    Operation("accumulate_gaussiank", _selected),
    Operation("accumulate_at", _at),
    Operation(
        "random_indices",
        lambda n, seed, dtype: {"numel": n, "k": -(-n // 3), "seed": seed},
        (torch.float32,),
    ),
    Operation("merge", _merge, (torch.float32,)),
    Operation("scatter", _scatter),
    Operation("give_back", _give_back, (torch.float32,)),
)


def assert_same(got: dict[str, Any], expected: dict[str, Any], without: tuple[str, ...]) -> None:
    """Compare two outcomes bit by bit, except for what depends on the way taken."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if name in without:
            continue
        if isinstance(value, Tensor):
            assert same_bits(got[name], value), name
        else:
            assert got[name] == value, name


# What a prediction cost is the implementation's own affair.
COSTS = ("candidates", "repaired")
