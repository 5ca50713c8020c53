"""Bells: the condition under which theory promises that top-k leaves little."""

import numpy as np
import pytest
import torch

import ddl
from ddl.diagnostics.bells import LARGEST_SAMPLE, bell_of
from ddl.diagnostics.statistics import contraction, gaussian_count, norm_of

DENSITIES = (0.001, 0.01, 0.1, 0.5, 0.9)
BELLS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "student-t": lambda rng, n: rng.standard_t(3, size=n),
    "uniform": lambda rng, n: rng.uniform(-1, 1, size=n),
    "mostly zero": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 0.1),
}
OTHERS = {
    "constant": lambda rng, n: np.full(n, 0.3),
    "signs": lambda rng, n: rng.choice([-1.0, 1.0], size=n),
    "two bumps": lambda rng, n: rng.choice([-3.0, 3.0], size=n) + rng.normal(size=n),
    "one bump beside zero": lambda rng, n: rng.normal(4.0, 1.0, size=n),
    "few signs": lambda rng, n: rng.choice([-1.0, 1.0], size=n) * (rng.random(n) < 0.1),
}


def draw(shapes, name, n, seed=5):
    values = shapes[name](np.random.default_rng(seed), n)
    return torch.from_numpy(values.astype(np.float32))


def left_by_topk(u, k):
    residual = torch.zeros_like(u)
    ddl.kernels.accumulate_topk(u, residual, k)
    return contraction(norm_of(residual), norm_of(u), k, u.numel())


@pytest.mark.parametrize("n", [100, 3_000, 20 * LARGEST_SAMPLE])
@pytest.mark.parametrize("name", BELLS)
def test_one_mode_at_zero_is_a_bell(name, n):
    assert bell_of(draw(BELLS, name, n)).shaped


@pytest.mark.parametrize("n", [500, 3_000, 20 * LARGEST_SAMPLE])
@pytest.mark.parametrize("name", OTHERS)
def test_equal_magnitudes_and_bumps_away_from_zero_are_no_bell(name, n):
    bell = bell_of(draw(OTHERS, name, n))
    assert not bell.shaped and bell.limit < bell.dip <= 1


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("name", BELLS)
def test_topk_of_a_bell_leaves_at_most_the_square(name, density):
    u = draw(BELLS, name, 100_000)
    measured = left_by_topk(u, round(density * len(u)))
    assert measured.left <= measured.bound_topk


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("name", ["constant", "signs"])
def test_topk_of_equal_magnitudes_leaves_what_random_choice_does(name, density):
    u = draw(OTHERS, name, 100_000)
    measured = left_by_topk(u, round(density * len(u)))
    assert measured.left == pytest.approx(measured.bound_random, rel=1e-6)
    assert measured.left > measured.bound_topk


def test_the_theorem_holds_for_every_k_where_its_condition_does_exactly():
    rng = np.random.default_rng(0)
    for _ in range(20):
        steps = np.sort(rng.pareto(1.0, size=60))  # a convex curve, from zero on
        steps[0] = 0.0
        squares = np.cumsum(steps)
        assert bell_of(torch.from_numpy(np.sqrt(squares))).dip < 2 / 60
        left = np.cumsum(squares) / squares.sum()
        assert (left <= (np.arange(1, 61) / 60) ** 2 + 1e-12).all()


def dip_by_definition(values):
    """Against every chord between points of the distribution function, the origin among them."""
    squares = np.sort(values[values != 0].double().numpy() ** 2)
    n = len(squares)
    x, y = np.concatenate([[0.0], squares]), np.arange(n + 1) / n
    dip = 0.0
    for i, place in enumerate(squares):
        for a in range(i + 1):
            for b in range(i + 1, n + 1):
                along = (place - x[a]) / (x[b] - x[a])
                dip = max(dip, y[a] + along * (y[b] - y[a]) - i / n)
    return dip


@pytest.mark.parametrize("name", ["normal", "uniform", "two bumps", "mostly zero"])
def test_a_dip_is_what_its_definition_says(name):
    u = draw(BELLS | OTHERS, name, 40)
    assert bell_of(u).dip == pytest.approx(dip_by_definition(u), abs=1e-6)


@pytest.mark.parametrize("n", [20, 500])
def test_the_least_pronounced_bell_is_refuted_in_one_of_twenty_cases_at_most(n):
    rng = np.random.default_rng(1)
    draws = (torch.from_numpy(np.sqrt(rng.random(n))) for _ in range(400))  # squares are uniform
    assert sum(not bell_of(u).shaped for u in draws) <= 0.05 * 400


def test_neither_scale_nor_sign_nor_zeros_nor_order_matter():
    u = draw(OTHERS, "two bumps", 1_000)
    dip = bell_of(u).dip
    assert bell_of(-1e-20 * u).dip == pytest.approx(dip, rel=1e-3)
    assert bell_of(u.abs().flip(0)).dip == dip
    assert bell_of(torch.cat([u, torch.zeros(9_000)])).dip == dip


def test_nothing_refutes_a_vector_of_zeros():
    assert bell_of(torch.zeros(5)).shaped


def test_a_gaussian_threshold_selects_as_many_of_normal_values_and_others_of_others():
    n, k = 200_000, 2_000
    normal, uniform = draw(BELLS, "normal", n), draw(BELLS, "uniform", n)
    assert gaussian_count(normal, norm_of(normal), k) == pytest.approx(k, rel=0.1)
    assert gaussian_count(uniform, norm_of(uniform), k) == 0
    assert gaussian_count(normal, norm_of(normal), 0) == 0
    assert gaussian_count(normal, norm_of(normal), n) == pytest.approx(n, rel=0.1)


def test_a_norm_of_a_million_equal_values_is_right():
    assert norm_of(torch.full((1_000_000,), 0.5)) == pytest.approx(500.0, rel=1e-12)
