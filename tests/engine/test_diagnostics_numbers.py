"""The numbers of diagnostics, each by itself: shapes, contractions, ages and samples."""

import math

import pytest
import torch

import ddl
from ddl.diagnostics.ages import LARGEST_SAMPLE, Ages
from ddl.diagnostics.samples import places
from ddl.diagnostics.statistics import contraction, shape_of


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize(
    "draw",
    [
        lambda generator: torch.randn(100_000, generator=generator),
        lambda generator: (
            torch.empty(100_000).exponential_(generator=generator)
            * torch.randn(100_000, generator=generator).sign()
        ),
    ],
    ids=["gaussian", "laplace"],
)
def test_exact_topk_of_bell_shaped_values_leaves_less_than_the_square_of_the_bound(draw, density):
    u = draw(torch.Generator().manual_seed(3))
    residual = torch.zeros_like(u)
    k = round(density * u.numel())
    ddl.kernels.accumulate_topk(u, residual, k)
    measured = contraction(float(residual.norm()), float(u.norm()), k, u.numel())
    assert measured.left <= measured.bound_topk < measured.bound_random


def test_a_constant_vector_breaks_the_square_and_meets_the_bound_of_random_choice():
    u, residual = torch.ones(1000), torch.zeros(1000)
    ddl.kernels.accumulate_topk(u, residual, 100)
    measured = contraction(float(residual.norm()), float(u.norm()), 100, 1000)
    assert measured.left == pytest.approx(measured.bound_random)
    assert measured.left > measured.bound_topk


def test_kurtosis_tells_bell_shapes_apart():
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(2**18, generator=generator)
    laplace = torch.empty(2**18).exponential_(generator=generator) * gaussian.sign()
    assert shape_of(gaussian).kurtosis == pytest.approx(3, abs=0.1)
    assert shape_of(laplace).kurtosis == pytest.approx(6, abs=0.5)
    assert math.isnan(shape_of(torch.ones(5)).kurtosis)
    assert shape_of(torch.zeros(3)).counts[20] == 3


def test_ages_count_the_steps_since_an_entry_was_applied():
    ages = Ages([2, 3], step=10)
    ages.applied(torch.tensor([0, 4], dtype=torch.int32), step=10)
    ages.applied(torch.tensor([4], dtype=torch.int32), step=11)
    ages.applied(torch.tensor([2], dtype=torch.int32), step=12)
    assert ages.of_layer(0, 12).tolist() == [2, 3]  # the second: never, for as long as the watch
    assert ages.of_layer(1, 12).tolist() == [0, 3, 1]
    ages.applied_all(13)
    assert ages.of_layer(0, 14).tolist() == [1, 1]


def test_ages_of_a_large_layer_are_those_of_a_sample():
    n = 10 * LARGEST_SAMPLE
    ages = Ages([7, n], step=0)
    followed = places(n, LARGEST_SAMPLE)
    everyone = torch.arange(n, dtype=torch.int32)
    ages.applied(7 + everyone[followed[:2]], step=2)
    ages.applied(7 + everyone[~torch.isin(everyone, followed)], step=3)  # those not followed
    assert ages.of_layer(1, 3).tolist() == [1, 1, *[4] * (LARGEST_SAMPLE - 2)]
    assert ages.of_layer(0, 3).tolist() == [4] * 7


@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (128, 128, 3, 3), (96, 96, 5, 5), (3000, 7)])
@pytest.mark.parametrize("largest", [2**14, 2**10])
def test_a_sample_of_a_layer_sees_all_of_its_kernels_alike(shape, largest):
    numel, width = math.prod(shape), shape[-1] * shape[-2] if len(shape) == 4 else shape[-1]
    seen = places(numel, largest)
    assert len(seen) <= largest
    assert (seen.diff() > 0).all() and 0 <= seen[0] and seen[-1] < numel
    shares = torch.bincount(seen % width, minlength=width) / len(seen) * width
    assert (shares - 1).abs().max() < 5 * math.sqrt(width / len(seen))


def test_of_few_entries_all_are_the_sample():
    assert places(5, 5).tolist() == [0, 1, 2, 3, 4]
    assert places(0, 5).tolist() == []


def test_one_column_of_large_weights_shows_in_the_shape_of_a_layer():
    values = torch.randn(256, 256, 3, 3, generator=torch.Generator().manual_seed(0))
    values[..., 1] *= 10
    flat = values.flatten()
    shape = shape_of(flat)
    assert shape.deviation == pytest.approx(float(flat.std()), rel=0.01)
    assert shape.largest > 30


@pytest.mark.parametrize("scale", [1e-35, 1e-22, 1.0, 1e21, 1e37])
def test_shapes_are_those_of_any_size_that_float32_can_hold(scale):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    shape, scaled = shape_of(values), shape_of(values * scale)
    assert scaled.counts == shape.counts
    assert scaled.kurtosis == pytest.approx(shape.kurtosis, rel=1e-5)
    assert scaled.deviation == pytest.approx(scale * shape.deviation, rel=1e-5)
