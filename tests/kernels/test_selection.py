"""Selection is exact and conserves every entry on every input; predictions cost time only."""

import gc
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BEST,
    COMPILED,
    COSTS,
    CPU,
    DISTRIBUTIONS,
    DTYPES,
    IMPLEMENTATIONS,
    Operation,
    assert_same,
    draw,
    same_bits,
    some_indices,
    using,
    with_nonfinite,
)
from torch import Tensor

from ddl import kernels
from ddl.kernels import Selection

STALE = (None, 0.0, -1.0, math.inf, math.nan, 1e-45, 1e300, "x10", "/10", "exact")
TOPK = Operation("accumulate_topk", lambda n, seed, dtype: {})
GAUSSIANK = Operation("accumulate_gaussiank", lambda n, seed, dtype: {})


def accumulated(flat: Tensor, residual: Tensor, scale: float = 1.0) -> np.ndarray:
    """Accumulate in NumPy, independently of the code under test."""
    with np.errstate(all="ignore"):
        product = np.float32(scale) * flat.to(torch.float32).numpy()
        return product + residual.numpy()


def oracle(x: np.ndarray, k: int) -> list[int]:
    """Select by sorting Python tuples: larger magnitude first, then lower index."""
    ranked = sorted((-abs(v), i) for i, v in enumerate(x.tolist()) if math.isfinite(v) and v)
    return sorted(i for _, i in ranked[:k])


def check_laws(flat: Tensor, before: Tensor, after: Tensor, s: Selection, scale: float) -> None:
    """Every finite x is in exactly one place, values or residual; the rest is as it was."""
    x = torch.from_numpy(accumulated(flat, before, scale))
    finite = torch.isfinite(x)
    chosen = torch.zeros(x.numel(), dtype=torch.bool)
    chosen[s.indices.long()] = True
    assert s.indices.dtype == torch.int32
    assert s.values.dtype == torch.float32
    assert bool((s.indices[1:] > s.indices[:-1]).all())
    assert s.finite == bool(finite.all())
    assert not bool((chosen & ~finite).any())
    assert same_bits(s.values, x[chosen])
    assert same_bits(after[finite & ~chosen], x[finite & ~chosen])
    assert not bool(after[chosen].any())
    assert same_bits(after[~finite], before[~finite])
    assert bool((s.values != 0).all())
    assert s.threshold == (float(s.values.abs().min()) if len(s.values) else 0.0)


def predicted(stale: float | str | None, x: np.ndarray, chosen: list[int]) -> float | None:
    if not isinstance(stale, str):
        return stale
    kth = min((abs(float(x[i])) for i in chosen), default=1.0)
    return kth * {"x10": 10.0, "/10": 0.1, "exact": 1.0}[stale]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_topk_is_exact_for_every_distribution_and_prediction(
    distribution: str, implementation: str
) -> None:
    for n in (1, 65, 700):
        residual = draw(distribution, n, 2)
        for dtype in DTYPES:
            flat = draw(distribution, n, 1, dtype)
            x = accumulated(flat, residual)
            for k in {0, 1, n // 20, n - 1, n}:
                expected = oracle(x, k)
                for stale in STALE:
                    after = residual.clone()
                    with using(implementation, small_buffers=True):
                        s = kernels.accumulate_topk(
                            flat, after, k, threshold=predicted(stale, x, expected)
                        )
                    assert s.indices.tolist() == expected, (n, k, stale)
                    check_laws(flat, residual, after, s, 1.0)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("implementation", COMPILED)
def test_topk_equals_the_reference_on_random_cases(
    implementation: str, data: st.DataObject
) -> None:
    n = data.draw(st.integers(0, 700), "n")
    names = st.sampled_from(sorted(DISTRIBUTIONS))
    seed = data.draw(st.integers(0, 2**30), "seed")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    odd = st.sampled_from((0, 0, 1, 5, n))
    flat = with_nonfinite(
        draw(data.draw(names, "flat"), n, seed, dtype), seed, data.draw(odd, "odd in flat")
    )
    residual = with_nonfinite(
        draw(data.draw(names, "residual"), n, seed + 1),
        seed + 2,
        data.draw(odd, "odd in residual"),
    )
    scale = data.draw(st.sampled_from((1.0, -0.125, 1 / 3, 0.0, 3e38)), "scale")
    k = data.draw(st.sampled_from((0, 1, n // 100, n // 4, n - 1, n)), "k")
    k = min(max(k, 0), n)
    x = accumulated(flat, residual, scale)
    threshold = predicted(data.draw(st.sampled_from(STALE), "stale"), x, oracle(x, k))
    arguments = {
        "flat": flat,
        "residual": residual,
        "k": k,
        "scale": scale,
        "threshold": threshold,
    }
    with using("reference"):
        expected = TOPK.call(arguments)
    with using(implementation, small_buffers=True):
        got = TOPK.call(arguments)
    assert_same(got, expected, without=COSTS)
    s = Selection(**{name: got[name] for name in Selection._fields})
    check_laws(flat, residual, got["residual after"], s, scale)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=True), max_size=150),
    k=st.integers(0, 150),
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_topk_is_exact_on_any_floats(implementation: str, values: list[float], k: int) -> None:
    residual = torch.tensor(values, dtype=torch.float32)
    flat = torch.zeros_like(residual)
    k = min(k, len(values))
    after = residual.clone()
    with using(implementation, small_buffers=True):
        s = kernels.accumulate_topk(flat, after, k)
    assert s.indices.tolist() == oracle(accumulated(flat, residual), k)
    check_laws(flat, residual, after, s, 1.0)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("odd", [0, 1000])
def test_long_vectors_with_real_buffers(distribution: str, odd: int) -> None:
    n = 4 * 65536 + 77  # several pieces of whole chunks
    arguments = {
        "flat": with_nonfinite(draw(distribution, n, 1), 3, odd),
        "residual": draw(distribution, n, 2),
    }
    for k in (1, 500):
        for operation, extra in (
            (TOPK, {"threshold": None}),
            (TOPK, {"threshold": 1e-30}),
            (TOPK, {"threshold": 1e30}),
            (GAUSSIANK, {}),
        ):
            with using("reference"):
                expected = operation.call(arguments | {"k": k} | extra)
            for implementation in COMPILED:
                with using(implementation):
                    got = operation.call(arguments | {"k": k} | extra)
                assert_same(got, expected, without=COSTS)


def test_every_half_precision_number_is_widened_exactly() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        flat = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        residual = torch.zeros(flat.numel())
        kernels.accumulate_topk(flat, residual, 0)
        finite = torch.isfinite(flat)
        assert torch.equal(residual[finite], flat[finite].float())
        assert not residual[~finite].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_costs_are_reported_for_the_callers_controller(implementation: str) -> None:
    flat = torch.arange(1.0, 1001.0)
    with using(implementation):
        low = kernels.accumulate_topk(flat, torch.zeros(1000), 10, threshold=986.0)
        far = kernels.accumulate_topk(flat, torch.zeros(1000), 10, threshold=1.0)
        high = kernels.accumulate_topk(flat, torch.zeros(1000), 10, threshold=996.0)
    assert low.candidates == 15
    assert far.candidates == 20
    assert high.candidates == 5
    assert not low.repaired
    assert high.repaired == (implementation != "reference")
    assert low.threshold == far.threshold == high.threshold == 991.0


def test_costs_do_not_depend_on_the_number_of_threads() -> None:
    flat, residual = draw("layers", 2_000_000, 1), draw("layers", 2_000_000, 2)
    for threshold in (None, 1e-3, 1e3):
        arguments = {"flat": flat, "residual": residual, "k": 2000, "threshold": threshold}
        outcomes = []
        for implementation in CPU:
            with using(implementation):
                outcomes.append(TOPK.call(arguments))
        for outcome in outcomes[1:]:
            assert_same(outcome, outcomes[0], without=())


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("threshold", [None, 1e-30, 1e30])
def test_memory_beyond_inputs_and_outputs_is_8k_entries_and_1_megabyte(
    distribution: str, threshold: float | None
) -> None:
    n, k = 2_000_000, 20_000
    flat, residual = draw(distribution, n, 1), draw(distribution, n, 2)
    with using(f"{BEST}-2"):
        tracemalloc.start()
        selection = kernels.accumulate_topk(flat, residual, k, threshold=threshold)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # Torch's memory, the output, is not traced; nor is what the native loops take for a moment:
    # half as many keys as there are candidates, 2k + 1024 at most on each thread.
    assert selection.indices.numel() <= k
    native_scratch = 2 * (2 * k + 1024) // 2 * 4
    assert peak + native_scratch <= 8 * k * 8 + 2**20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("distribution", ["normal", "rising", "equal"])
def test_the_process_does_not_grow_by_more_than_that(distribution: str) -> None:
    n, k = 8_000_000, 80_000
    flat, residual = draw(distribution, n, 1), draw(distribution, n, 2)
    with using(f"{BEST}-2"):
        kernels.accumulate_topk(flat, residual.clone(), 100)  # starts threads
        gc.collect()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        except OSError:
            pytest.skip("the peak cannot be reset here")
        before = resident_bytes("VmRSS")
        selection = kernels.accumulate_topk(flat, residual, k, threshold=1e-30)
        grown = resident_bytes("VmHWM") - before
    assert grown <= 8 * k * 8 + 2**20 + selection.indices.numel() * 8


def resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_gaussiank_counts_are_bounded(distribution: str, implementation: str) -> None:
    for n in (1, 65, 5000):
        for k in {0, 1, 2, n // 100, n // 10, n}:
            k = min(k, n)
            flat, residual = draw(distribution, n, 1), draw(distribution, n, 2)
            x = accumulated(flat, residual)
            nonzero = int(np.count_nonzero(x))
            after = residual.clone()
            with using(implementation):
                s = kernels.accumulate_gaussiank(flat, after, k)
            count = s.indices.numel()
            assert 3 * count <= 4 * k
            assert 3 * count >= 2 * k or count == nonzero
            assert count > 0 or nonzero == 0 or k == 0
            assert s.indices.tolist() == oracle(x, count)
            check_laws(flat, residual, after, s, 1.0)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("implementation", COMPILED)
def test_gaussiank_equals_the_reference_on_random_cases(
    implementation: str, data: st.DataObject
) -> None:
    n = data.draw(st.integers(0, 3000), "n")
    names = st.sampled_from(sorted(DISTRIBUTIONS))
    seed = data.draw(st.integers(0, 2**30), "seed")
    odd = data.draw(st.sampled_from((0, 3, n)), "odd")
    arguments = {
        "flat": with_nonfinite(draw(data.draw(names, "flat"), n, seed), seed, odd),
        "residual": draw(data.draw(names, "residual"), n, seed + 1),
        "k": min(n, data.draw(st.sampled_from((0, 1, n // 100, n // 4, n)), "k")),
    }
    with using("reference"):
        expected = GAUSSIANK.call(arguments)
    with using(implementation):
        got = GAUSSIANK.call(arguments)
    assert_same(got, expected, without=COSTS)


def test_gaussiank_takes_the_published_threshold_on_a_gaussian() -> None:
    n, k = 400_000, 4000
    flat, residual = draw("normal", n, 1), draw("normal", n, 2)
    x = torch.from_numpy(accumulated(flat, residual)).double()
    normal = torch.distributions.Normal(0.0, 1.0)
    ppf = float(normal.icdf(torch.tensor(1 - k / n / 2, dtype=torch.float64)))
    cutoff = float(x.mean() + x.std() * ppf)
    s = kernels.accumulate_gaussiank(flat, residual, k)
    assert s.indices.numel() == int((x.abs() > cutoff).sum())


@settings(max_examples=100, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_randomk_takes_exactly_the_given_entries(implementation: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 400), "n")
    seed = data.draw(st.integers(0, 2**30), "seed")
    odd = data.draw(st.sampled_from((0, 0, 5, n)), "odd")
    distribution = data.draw(st.sampled_from(("normal", "sparse", "signed_zeros")))
    flat = with_nonfinite(draw(distribution, n, seed), seed, odd)
    residual = draw(distribution, n, seed + 1)
    indices = some_indices(n, data.draw(st.integers(0, n), "count"), seed)
    x = torch.from_numpy(accumulated(flat, residual, 0.5))
    finite = torch.isfinite(x)
    after = residual.clone()
    with using(implementation, small_buffers=True):
        s = kernels.accumulate_at(flat, after, indices, scale=0.5)
    at = indices.long()
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[at] = True
    assert torch.equal(s.indices, indices)
    assert same_bits(s.values, torch.where(finite, x, 0.0)[at])
    assert s.finite == bool(finite.all())
    assert same_bits(after[finite & ~chosen], x[finite & ~chosen])
    assert not bool(after[finite & chosen].any())
    assert same_bits(after[~finite], residual[~finite])
