"""Merging loses nothing unseen, random indices are fair, dense vectors get what they are due."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    COMPILED,
    IMPLEMENTATIONS,
    Operation,
    assert_same,
    draw,
    some_indices,
    using,
    with_nonfinite,
)
from torch import Tensor

from ddl import kernels

MERGE = Operation("merge", lambda n, seed, dtype: {})


def vector(pairs: dict[int, float]) -> tuple[Tensor, Tensor]:
    indices = sorted(pairs)
    return (
        torch.tensor(indices, dtype=torch.int32),
        torch.tensor([pairs[i] for i in indices], dtype=torch.float32),
    )


PAIRS = st.dictionaries(
    st.integers(0, 60) | st.integers(0, 2**31 - 2), st.floats(width=32), max_size=40
)


@settings(max_examples=300, deadline=None)
@given(a=PAIRS, b=PAIRS, k=st.none() | st.integers(0, 90))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_merge_keeps_the_largest_sums_and_every_fate_is_true(
    implementation: str, a: dict[int, float], b: dict[int, float], k: int | None
) -> None:
    (ai, av), (bi, bv) = vector(a), vector(b)
    with using(implementation):
        merged = kernels.merge(ai, av, bi, bv, k)

    left, right = dict(zip(ai.tolist(), av, strict=True)), dict(zip(bi.tolist(), bv, strict=True))
    sums = {
        i: left[i] + right[i] if i in left and i in right else left.get(i, right.get(i))
        for i in left.keys() | right.keys()
    }

    def rank(i: int) -> tuple[float, int]:
        value = float(sums[i])  # type: ignore[arg-type]
        finite = abs(value) < float("inf")
        return (-abs(value) if finite else -float("inf"), i)

    kept = sorted(sorted(sums, key=rank)[: len(sums) if k is None else k])
    assert merged.indices.tolist() == kept
    assert merged.indices.dtype == torch.int32
    expected = torch.tensor([float(sums[i]) for i in kept])  # type: ignore[arg-type]
    assert torch.equal(merged.values.nan_to_num(7.0), expected.nan_to_num(7.0))
    place = {i: position for position, i in enumerate(kept)}
    assert merged.fate_a.tolist() == [place.get(i, -1) for i in ai.tolist()]
    assert merged.fate_b.tolist() == [place.get(i, -1) for i in bi.tolist()]
    assert merged.fate_a.dtype == merged.fate_b.dtype == torch.int32


@pytest.mark.parametrize("implementation", COMPILED)
@pytest.mark.parametrize("odd", [0, 50])
def test_long_merges_equal_the_reference(implementation: str, odd: int) -> None:
    n, count = 200_000, 20_000
    arguments = {
        "a_indices": some_indices(n, count, 1),
        "a_values": with_nonfinite(draw("student", count, 2), 3, odd),
        "b_indices": some_indices(n, count // 2, 4),
        "b_values": with_nonfinite(draw("student", count // 2, 5), 6, odd),
    }
    for k in (None, 0, 1, count, 2 * count):
        with using("reference"):
            expected = MERGE.call(arguments | {"k": k})
        with using(implementation):
            assert_same(MERGE.call(arguments | {"k": k}), expected, without=())


@settings(max_examples=200, deadline=None)
@given(numel=st.integers(0, 2**31 - 1), k=st.integers(0, 300), seed=st.integers())
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_random_indices_are_distinct_and_ascending(
    implementation: str, numel: int, k: int, seed: int
) -> None:
    k = min(k, numel)
    with using(implementation):
        indices = kernels.random_indices(numel, k, seed)
        again = kernels.random_indices(numel, k, seed)
    assert indices.dtype == torch.int32
    assert indices.numel() == k
    assert torch.equal(indices, again)
    assert bool((indices[1:] > indices[:-1]).all())
    assert k == 0 or (int(indices[0]) >= 0 and int(indices[-1]) < numel)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_random_indices_are_the_same_on_every_machine(implementation: str) -> None:
    with using(implementation):
        assert kernels.random_indices(1_000_000, 5, 42).tolist() == GOLDEN


GOLDEN = [302593, 480842, 523224, 643753, 942435]


@pytest.mark.parametrize("numel", [5, 17, 64, 1000])
def test_random_indices_are_fair(numel: int) -> None:
    """Chi-square over seeds: every index, and every pair of neighbours, equally often."""
    k, seeds = -(-numel // 3), 3000
    hits = torch.zeros(numel)
    pairs = 0
    for seed in range(seeds):
        indices = kernels.random_indices(numel, k, seed)
        hits[indices.long()] += 1
        pairs += int((indices[1:] - indices[:-1] == 1).sum())
    p = k / numel
    chi = float(((hits - seeds * p) ** 2 / (seeds * p * (1 - p))).sum())
    assert abs(chi - numel) < 6 * (2 * numel) ** 0.5
    expected = seeds * (numel - 1) * p * (k - 1) / (numel - 1)
    assert abs(pairs - expected) < 6 * expected**0.5 + 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scatter_then_give_back_conserves(implementation: str) -> None:
    n = 1000
    indices = some_indices(n, 100, 1)
    values = draw("few_values", 100, 2)
    dense = draw("normal", n, 3)
    residual = draw("few_values", n, 4)
    total = residual + torch.zeros(n).index_put((indices.long(),), values)
    with using(implementation):
        kernels.scatter(dense, indices, values, scale=0.5)
        assert torch.equal(dense[indices.long()], values * 0.5)
        assert int((dense != 0).sum()) == int((values != 0).sum())
        kernels.give_back(residual, indices, values)
    assert torch.equal(residual, total)
