"""Every operation on the GPU gives the bits of the reference and of the CPU's kernels."""

import math
from typing import Any

import pytest
import torch
from kernel_cases import (
    BEST,
    COSTS,
    DISTRIBUTIONS,
    DTYPES,
    OPERATIONS,
    Operation,
    assert_same,
    draw,
    same_bits,
    some_indices,
    using,
    with_nonfinite,
)
from places import Place
from torch import Tensor

from ddl import kernels
from ddl.kernels import Merged, Selection, cuda_selection
from ddl.kernels.launch import COUNT, NONFINITE, PADDING, REPAIRED

CASES = [
    pytest.param(operation, dtype, id=f"{operation}-{str(dtype).removeprefix('torch.')}")
    for operation in OPERATIONS
    for dtype in operation.dtypes
]
STALE = (0.0, 1e-45, 1e-30, 1e30, "x10", "/10", "exact")
TILE = cuda_selection.TILE


def outcome(place: Place, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Call an operation on copies on the device; return results and changed tensors, on the CPU.

    The same names as `Operation.call` gives.
    """
    there = place.put(arguments)
    if name == "random_indices":
        there["device"] = place.device
    result = getattr(place.operations, name)(**there)
    changed: dict[str, Any] = {
        f"{name} after": value for name, value in there.items() if isinstance(value, Tensor)
    }
    if isinstance(result, (Selection, Merged)):
        changed |= result._asdict()
    else:
        changed["result"] = result
    return {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in changed.items()
    }


def expected(name: str, arguments: dict[str, Any], implementation: str) -> dict[str, Any]:
    with using(implementation):
        return Operation(name, lambda n, seed, dtype: {}).call(arguments)


def internal(operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Complete the arguments by what the public functions fill in."""
    if operation.startswith("accumulate") or operation == "scatter":
        arguments = {"scale": 1.0} | arguments
    if operation == "accumulate_topk":
        arguments = {"threshold": 0.0} | arguments
    return arguments


@pytest.mark.parametrize(("operation", "dtype"), CASES)
def test_every_operation_gives_the_bits_of_the_cpu(
    operation: Operation, dtype: torch.dtype, place: Place
) -> None:
    sizes = (0, 1, 5, 8, 255, 256, 257, TILE - 1, TILE, TILE + 1, place.longest)
    for n in sizes:
        arguments = operation.arguments(n, n, dtype)
        got = outcome(place, operation.name, internal(operation.name, arguments))
        implementation = "reference" if n < 100_000 else f"{BEST}-2"
        assert_same(got, expected(operation.name, arguments, implementation), without=COSTS)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_topk_is_exact_for_every_distribution_and_prediction(
    distribution: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so little room for candidates and samples that short vectors go every way."""
    monkeypatch.setattr(cuda_selection, "SLACK", 3)
    monkeypatch.setattr(cuda_selection, "SAMPLE", 64)
    emulator = place.device.type == "cpu"
    for n in (1, 65, 700) if emulator else (1, 65, 700, TILE + 77, 100_003):
        residual = draw(distribution, n, 2)
        for dtype in DTYPES:
            flat = draw(distribution, n, 1, dtype)
            for k in {0, 1, n // 20, n - 1, n}:
                arguments = {"flat": flat, "residual": residual, "k": k, "scale": 1.0}
                right = expected("accumulate_topk", arguments, "reference")
                for stale in STALE[:: 3 if emulator else 1]:
                    threshold = predicted(stale, right["threshold"])
                    got = outcome(place, "accumulate_topk", arguments | {"threshold": threshold})
                    assert_same(got, right, without=COSTS)


def predicted(stale: float | str, kth: float) -> float:
    """What a caller would pass, as the public function hands it on."""
    if isinstance(stale, str):
        stale = kth * {"x10": 10.0, "/10": 0.1, "exact": 1.0}[stale]
    stale = float(torch.tensor(stale, dtype=torch.float32))
    return stale if 0.0 < stale < math.inf else 0.0


@pytest.mark.parametrize("odd", [0, 1, 5000])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_selection_with_real_buffers_and_what_is_not_finite(
    distribution: str, odd: int, place: Place
) -> None:
    n = place.longest
    arguments = {
        "flat": with_nonfinite(draw(distribution, n, 1), 3, odd),
        "residual": with_nonfinite(draw(distribution, n, 2), 4, odd // 2),
        "scale": 1 / 3,
    }
    for k in (1, n // 1000, n // 20):
        right = expected("accumulate_topk", arguments | {"k": k}, f"{BEST}-2")
        for threshold in (0.0, 1e-30, 1e30, predicted("exact", right["threshold"])):
            got = outcome(place, "accumulate_topk", arguments | {"k": k, "threshold": threshold})
            assert_same(got, right, without=COSTS)
        got = outcome(place, "accumulate_gaussiank", arguments | {"k": k})
        right = expected("accumulate_gaussiank", arguments | {"k": k}, f"{BEST}-2")
        assert_same(got, right, without=COSTS)
        assert 3 * len(got["indices"]) <= 4 * k


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", range(4))
def test_misaligned_views_are_no_different(shift: int, dtype: torch.dtype, place: Place) -> None:
    n = TILE + 9
    arguments = {
        "flat": with_nonfinite(draw("normal", n, 1, dtype), 2, 5),
        "residual": draw("laplace", n, 3),
        "k": 40,
        "scale": 0.3,
        "threshold": 0.0,
    }
    right = expected("accumulate_topk", arguments, "reference")
    for shift_of_flat in (*range(4), 7) if shift else range(8):
        there = place.put(arguments)
        for name, by in (("flat", shift_of_flat), ("residual", shift)):
            room = torch.full((n + 8,), 7.0, dtype=there[name].dtype, device=place.device)
            room[by : by + n] = there[name]
            there[name] = room[by : by + n]
        selection = place.operations.accumulate_topk(**there)
        assert torch.equal(selection.indices.cpu(), right["indices"])
        assert same_bits(selection.values.cpu(), right["values"])
        assert same_bits(there["residual"].cpu(), right["residual after"])
        # Nothing was written beside the views.
        for name, by in (("flat", shift_of_flat), ("residual", shift)):
            around = there[name].new_empty(0).set_(there[name].untyped_storage())
            assert bool((around[:by] == 7.0).all())
            assert bool((around[by + n :] == 7.0).all())


def test_room_for_candidates_that_just_suffices_and_just_does_not(place: Place) -> None:
    n, k = TILE + 100, 50
    capacity = 2 * k + cuda_selection.SLACK
    flat = torch.arange(1.0, n + 1.0)
    arguments = {"flat": flat, "residual": torch.zeros(n), "k": k, "scale": 1.0}
    right = expected("accumulate_topk", arguments, "reference")
    for passed in (k - 1, k, capacity - 1, capacity, capacity + 1):
        there = place.put(arguments)
        threshold = float(n + 1 - passed)
        picks = place.operations.launch_topk(
            **there, threshold=threshold, workspace=place.workspace()
        )
        report = picks.report.tolist()
        assert torch.equal(picks.indices.cpu(), right["indices"])
        assert same_bits(picks.values.cpu(), right["values"])
        assert same_bits(there["residual"].cpu(), right["residual after"])
        assert (report[COUNT], report[NONFINITE]) == (k, 0)
        assert bool(report[REPAIRED]) == (not k <= passed <= capacity)


def test_a_workspace_can_be_used_again_for_anything(place: Place) -> None:
    """Large, then small, of other dtypes, after a failed prediction: nothing stale remains."""
    workspace = place.workspace()
    for seed, n in enumerate((place.longest, 10, 0, TILE, 700, place.longest)):
        dtype = DTYPES[seed % 3]
        k = -(-n // 30)
        arguments = {
            "flat": with_nonfinite(draw("normal", n, seed, dtype), seed, seed),
            "residual": draw("student", n, seed + 1),
            "k": k,
            "scale": 1.0,
        }
        for threshold in (0.0, 1e30):
            right = expected("accumulate_topk", arguments, f"{BEST}-2")
            there = place.put(arguments)
            picks = place.operations.launch_topk(**there, threshold=threshold, workspace=workspace)
            count = int(picks.report[COUNT])
            assert torch.equal(picks.indices[:count].cpu(), right["indices"])
            assert same_bits(picks.values[:count].cpu(), right["values"])
            assert bool((picks.indices[count:] == PADDING).all())
            assert not bool(picks.values[count:].any())
            assert same_bits(there["residual"].cpu(), right["residual after"])


@pytest.mark.parametrize("distribution", ["normal", "few_values", "zeros", "equal", "denormals"])
def test_long_merges_equal_the_cpu(distribution: str, place: Place) -> None:
    n = place.longest
    count = n // 10
    arguments = {
        "a_indices": some_indices(n, count, 1),
        "a_values": with_nonfinite(draw(distribution, count, 2), 3, 5),
        "b_indices": some_indices(n, count // 2, 4),
        "b_values": draw(distribution, count // 2, 5),
    }
    for k in (None, 0, 1, count, 2 * count):
        got = outcome(place, "merge", arguments | {"k": k})
        assert_same(got, expected("merge", arguments | {"k": k}, f"{BEST}-2"), without=())


def test_padded_entries_are_none(place: Place) -> None:
    """What a selection padded goes through merge, scatter and give_back as if cut off."""
    n, k = 900, 400
    operations, workspace = place.operations, place.workspace()
    halves = []
    for seed in (1, 2):
        flat = (draw("sparse", n, seed) * 0 + draw("few_values", n, seed)).to(place.device)
        flat[seed::2] = 0
        residual = torch.zeros(n, device=place.device)
        picks = operations.launch_topk(flat, residual, k + 200, 1.0, 0.0, workspace)
        count = int(picks.report[COUNT])
        assert count < k + 200
        halves.append((picks, count))
    (a, count_a), (b, count_b) = halves
    cut = [a.indices[:count_a], a.values[:count_a], b.indices[:count_b], b.values[:count_b]]
    merged = operations.launch_merge(a.indices, a.values, b.indices, b.values, k, workspace)
    names = ("a_indices", "a_values", "b_indices", "b_values")
    on_cpu = dict(zip(names, (tensor.cpu() for tensor in cut), strict=True))
    right = expected("merge", on_cpu | {"k": k}, "reference")
    count = int(merged.report[COUNT])
    assert torch.equal(merged.indices[:count].cpu(), right["indices"])
    assert same_bits(merged.values[:count].cpu(), right["values"])
    assert bool((merged.indices[count:] == PADDING).all())
    for fate, length, name in (
        (merged.fate_a, count_a, "fate_a"),
        (merged.fate_b, count_b, "fate_b"),
    ):
        assert torch.equal(fate[:length].cpu(), right[name])
        assert bool((fate[length:] == -1).all())

    dense = torch.ones(n, device=place.device)
    operations.scatter(dense, merged.indices, merged.values, 0.5)
    assert same_bits(
        dense.cpu(), torch.zeros(n).index_put((right["indices"].long(),), right["values"] * 0.5)
    )
    residual = torch.zeros(n, device=place.device)
    dropped = merged.fate_a < 0
    operations.give_back(residual, a.indices, a.values, dropped)
    owed = torch.zeros(n)
    lost = right["fate_a"] < 0
    owed[on_cpu["a_indices"][lost].long()] = on_cpu["a_values"][lost]
    assert torch.equal(residual.cpu(), owed)


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "dtype"), CASES)
def test_the_public_functions_come_here(
    operation: Operation, dtype: torch.dtype, gpu: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not fall back on torch's operations."""
    arguments = operation.arguments(5000, 1, dtype)
    right = expected(operation.name, arguments, "reference")
    there = gpu.put(arguments)
    if operation.name == "random_indices":
        there["device"] = gpu.device

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the reference was called")

    monkeypatch.setattr(f"ddl.kernels.reference.{operation.name}", refuse)
    result = getattr(kernels, operation.name)(**there)
    got = result._asdict() if isinstance(result, tuple) else {"result": result}
    got |= {f"{name} after": value for name, value in there.items() if isinstance(value, Tensor)}
    got = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in got.items()}
    assert_same(got, right, without=COSTS)
