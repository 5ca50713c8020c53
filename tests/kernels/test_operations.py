"""Every operation does the same on every implementation and number of threads, bit by bit."""

import threading
from typing import Any

import pytest
import torch
from kernel_cases import (
    BEST,
    COMPILED,
    COSTS,
    IMPLEMENTATIONS,
    OPERATIONS,
    Operation,
    assert_same,
    using,
)

from ddl import kernels

# Around one block of 64, one vector of 8 or 16, and several pieces of whole chunks.
SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 127, 1001, 300_001)
CASES = [
    pytest.param(operation, dtype, id=f"{operation}-{str(dtype).removeprefix('torch.')}")
    for operation in OPERATIONS
    for dtype in operation.dtypes
]


@pytest.mark.parametrize("implementation", COMPILED)
@pytest.mark.parametrize(("operation", "dtype"), CASES)
def test_every_implementation_gives_the_reference_bits(
    operation: Operation, dtype: torch.dtype, implementation: str
) -> None:
    for n in SIZES:
        arguments = operation.arguments(n, n, dtype)
        with using("reference"):
            expected = operation.call(arguments)
        with using(implementation):
            got = operation.call(arguments)
        assert_same(got, expected, without=COSTS)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("operation", "dtype"), CASES)
def test_misaligned_views_are_no_different(
    operation: Operation, dtype: torch.dtype, implementation: str
) -> None:
    arguments = operation.arguments(1001, 5, dtype)
    shifted: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            room = torch.empty(value.numel() + 1, dtype=value.dtype)
            room[1:] = value
            shifted[name] = room[1:]
    with using(implementation):
        expected = operation.call(arguments)
        result = getattr(kernels, operation.name)(**(arguments | shifted))
        got: dict[str, Any] = {f"{name} after": value for name, value in shifted.items()}
        got |= result._asdict() if hasattr(result, "_asdict") else {"result": result}
        assert_same(got, expected, without=COSTS)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("operation", "dtype"), CASES)
def test_strided_views_are_refused(
    operation: Operation, dtype: torch.dtype, implementation: str
) -> None:
    arguments = operation.arguments(100, 5, dtype)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            strided = torch.stack([value, value], dim=1)[:, 0]
            with (
                using(implementation),
                pytest.raises(ValueError, match=rf"^{name} must be contiguous, got stride 2"),
            ):
                getattr(kernels, operation.name)(**(arguments | {name: strided}))


def test_many_python_threads_may_call_at_once() -> None:
    """As many ranks in one process do, each with several threads of its own."""
    jobs = [
        (operation, operation.arguments(300_001, seed, torch.float32))
        for seed in range(3)
        for operation in OPERATIONS
        if operation.name != "random_indices"
    ]
    with using(f"{BEST}-1"):
        expected = [operation.call(arguments) for operation, arguments in jobs]
    got: list = [None] * len(jobs)
    gate = threading.Barrier(len(jobs))

    def work(i: int) -> None:
        operation, arguments = jobs[i]
        gate.wait()
        got[i] = operation.call(arguments)

    with using(f"{BEST}-3"):
        ranks = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other, without=())
