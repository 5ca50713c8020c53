"""The CUDA kernels give the reference's bits, whatever the order of threads and blocks."""

from typing import Any

import pytest
import torch
from kernel_cases import (
    COSTS,
    DISTRIBUTIONS,
    DTYPES,
    OPERATIONS,
    Operation,
    assert_same,
    draw,
    emulated,
    generator,
    same_bits,
    some_indices,
    using,
    with_nonfinite,
)
from torch import Tensor

from ddl.kernels.launch import COUNT, NONFINITE, PADDING, REPAIRED, Workspace

SEEDS = range(20)
TILE = 4096
TOPK = Operation("accumulate_topk", lambda n, seed, dtype: {})
GAUSSIANK = Operation("accumulate_gaussiank", lambda n, seed, dtype: {})
MERGE = Operation("merge", lambda n, seed, dtype: {})


def check(operation: Operation, arguments: dict[str, Any], seed: int) -> None:
    with using("reference"):
        expected = operation.call(arguments)
    with using(f"emulated{seed}"):
        got = operation.call(arguments)
    assert_same(got, expected, without=COSTS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_selection_is_exact_in_every_order(distribution: str, seed: int) -> None:
    """Several tiles and blocks, a ragged end, each prediction, few and many non-finite entries."""
    n = 2 * TILE + 77 + seed
    odd = (0, 3, 600, 0)[seed % 4]
    dtype = DTYPES[seed % 3]
    flat = with_nonfinite(draw(distribution, n, seed, dtype), seed, odd)
    residual = with_nonfinite(draw(distribution, n, seed + 100), seed + 1, odd)
    for k in (1, 90, n - 1):
        threshold = (None, 1e-30, 1e30)[seed % 3]
        arguments = {"flat": flat, "residual": residual, "k": k, "scale": 0.7}
        check(TOPK, arguments | {"threshold": threshold}, seed)
        check(GAUSSIANK, arguments, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_every_operation_is_the_same_in_every_order(operation: Operation, seed: int) -> None:
    for n in (0, 1, 5, 1023, TILE + 1 + seed):
        for dtype in operation.dtypes:
            check(operation, operation.arguments(n, seed, dtype), seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("distribution", ["normal", "few_values", "zeros", "equal", "denormals"])
def test_merges_are_exact_in_every_order(distribution: str, seed: int) -> None:
    n, count = 9000, 2500
    arguments = {
        "a_indices": some_indices(n, count, seed),
        "a_values": with_nonfinite(draw(distribution, count, seed), seed, seed % 3),
        "b_indices": some_indices(n, count // 2, seed + 1),
        "b_values": draw(distribution, count // 2, seed + 2),
    }
    for k in (None, 0, 1, 700, count):
        check(MERGE, arguments | {"k": k}, seed)


@pytest.mark.parametrize("shift_of_flat", range(4))
@pytest.mark.parametrize("shift_of_residual", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_misalignment(dtype: torch.dtype, shift_of_residual: int, shift_of_flat: int) -> None:
    n = TILE + 9
    flat = torch.empty(n + 4, dtype=dtype)[shift_of_flat:][:n]
    residual = torch.empty(n + 4)[shift_of_residual:][:n]
    flat.copy_(with_nonfinite(draw("normal", n, 1, dtype), 2, 5))
    before = draw("laplace", n, 3)
    for threshold in (0.0, 1e-30, 1e30):
        with using("reference"):
            expected = TOPK.call(
                {"flat": flat, "residual": before, "k": 40, "threshold": threshold}
            )
        residual.copy_(before)
        picked = emulated(1).accumulate_topk(flat, residual, 40, 1.0, threshold)
        assert torch.equal(picked.indices, expected["indices"])
        assert same_bits(picked.values, expected["values"])
        assert same_bits(residual, expected["residual after"])


def padded(indices: Tensor, values: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    room = capacity - indices.numel()
    return (
        torch.cat([indices, torch.full((room,), PADDING, dtype=torch.int32)]),
        torch.cat([values, torch.zeros(room)]),
    )


@pytest.mark.parametrize("room_a", [0, 1, 300])
@pytest.mark.parametrize("room_b", [0, 1, 300])
def test_padding_is_no_entry(room_a: int, room_b: int) -> None:
    operations, workspace = emulated(2), Workspace(torch.device("cpu"))
    a = some_indices(900, 400, 1), draw("few_values", 400, 2)
    b = some_indices(900, 150, 3), draw("few_values", 150, 4)
    for k in (1, 200, 2000):
        with using("reference"):
            expected = MERGE.call(
                dict(zip(("a_indices", "a_values", "b_indices", "b_values"), (*a, *b), strict=True))
                | {"k": k}
            )
        merged = operations.launch_merge(
            *padded(*a, 400 + room_a), *padded(*b, 150 + room_b), k, workspace
        )
        count = int(merged.report[COUNT])
        assert torch.equal(merged.indices[:count], expected["indices"])
        assert same_bits(merged.values[:count], expected["values"])
        assert bool((merged.indices[count:] == PADDING).all())
        assert not merged.values[count:].any()
        for name, fate in (("fate_a", merged.fate_a), ("fate_b", merged.fate_b)):
            known = expected[name].numel()
            assert torch.equal(fate[:known], expected[name])
            assert bool((fate[known:] == -1).all())

    indices, values = padded(*a, 500)
    for dtype in DTYPES:
        dense = torch.ones(900, dtype=dtype)
        operations.scatter(dense, indices, values, 0.5)
        expected_dense = torch.zeros(900).index_put((a[0].long(),), a[1] * 0.5).to(dtype)
        assert torch.equal(dense, expected_dense)


def test_only_what_the_mask_says_is_given_back() -> None:
    residual = draw("normal", 900, 1)
    indices, values = padded(some_indices(900, 400, 2), draw("normal", 400, 3), 450)
    mask = torch.rand(450, generator=generator(4)) < 0.5
    given = mask[:400]
    expected = residual.clone()
    expected[indices[:400][given].long()] += values[:400][given]
    emulated(3).give_back(residual, indices, values, mask)
    assert same_bits(residual, expected)


def test_a_workspace_carries_nothing_from_call_to_call() -> None:
    """Overflow, non-finite entries and a miss leave marks; the next call must not see them."""
    operations, workspace = emulated(4), Workspace(torch.device("cpu"))
    calls = [
        ("normal", 3 * TILE, 30, 1e-30, 50),
        ("zeros", TILE + 5, 100, 0.0, 0),
        ("equal", 2 * TILE, 700, 1e30, 0),
        ("laplace", 3 * TILE + 1, 50, 2.0, 3),
        ("normal", 100, 7, 0.0, 0),
    ]
    for distribution, n, k, threshold, odd in calls * 2:
        flat = with_nonfinite(draw(distribution, n, 1), 2, odd)
        residual = draw(distribution, n, 3)
        with using("reference"):
            expected = TOPK.call(
                {"flat": flat, "residual": residual, "k": k, "threshold": threshold}
            )
        picks = operations.launch_topk(flat, residual, k, 1.0, threshold, workspace)
        count = int(picks.report[COUNT])
        assert torch.equal(picks.indices[:count], expected["indices"])
        assert same_bits(picks.values[:count], expected["values"])
        assert bool((picks.indices[count:] == PADDING).all())
        assert same_bits(residual, expected["residual after"])
        assert (int(picks.report[NONFINITE]) == 0) == expected["finite"]


def test_a_failed_prediction_is_repaired_on_the_device() -> None:
    flat, n = draw("normal", 2 * TILE, 1), 2 * TILE
    for threshold, repaired in ((1e30, 1), (1e-30, 1), (2.0, 0), (0.0, 0)):
        picks = emulated(5).launch_topk(
            flat, torch.zeros(n), 100, 1.0, threshold, Workspace(torch.device("cpu"))
        )
        assert int(picks.report[REPAIRED]) == repaired
