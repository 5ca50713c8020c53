"""Fits find what was put in, and say how sure they are."""

import math
import random

import pytest

from ddl.perfmodel import costs
from ddl.perfmodel.fits import (
    Cluster,
    Sample,
    fit_cluster,
    fit_collectives,
    fit_link,
    leave_one_out,
    relative_errors,
)
from ddl.perfmodel.regression import linear, positive, student_t

SIZES = [4 * 4**power for power in range(12)]
ALPHA, BETA, GAMMA = 5e-5, 1e-9, 4e-9


def noisy(seconds, draw, spread=0.05):
    return [value * math.exp(spread * draw.gauss(0, 1)) for value in seconds]


def test_a_link_is_found_exactly_where_nothing_disturbs():
    fit = fit_link(SIZES, [ALPHA + BETA * size for size in SIZES])
    assert fit["alpha"] == pytest.approx(ALPHA) and fit["beta"] == pytest.approx(BETA)
    assert fit.error < 1e-12 and fit.freedom == len(SIZES) - 2


def test_the_interval_holds_the_truth_about_as_often_as_it_says(capsys):
    draw = random.Random(1)
    held = {"alpha": 0, "beta": 0}
    for _ in range(400):
        fit = fit_link(SIZES, noisy([ALPHA + BETA * size for size in SIZES], draw))
        for name, truth in (("alpha", ALPHA), ("beta", BETA)):
            estimate = fit.parameters[name]
            held[name] += estimate.low <= truth <= estimate.high
    with capsys.disabled():
        print("\n95 % intervals of a link that held the truth:", held, "of 400")
    assert all(0.91 * 400 < count < 0.99 * 400 for count in held.values())


def test_collectives_tell_latency_bandwidth_and_host_work_apart():
    calls = [
        cost
        for P in (2, 3, 4, 8)
        for k in (10, 1000, 100_000)
        for cost in (
            costs.dense_ring(P, 100 * k),
            costs.all_gather(P, k),
            costs.butterfly(P, k),
            costs.tree(P, k),
        )
    ]
    seconds = noisy([cost.seconds(ALPHA, BETA, GAMMA) for cost in calls], random.Random(2), 0.03)
    fit = fit_collectives(calls, seconds)
    for name, truth in (("alpha", ALPHA), ("beta", BETA), ("gamma", GAMMA)):
        assert fit[name] == pytest.approx(truth, rel=0.1), name
        assert fit.parameters[name].low <= truth <= fit.parameters[name].high, name
    bare = fit_collectives(calls, [cost.seconds(ALPHA, BETA) for cost in calls], host=())
    assert set(bare.parameters) == {"alpha", "beta"}


def test_no_parameter_is_below_zero():
    # A straight line through these would have a negative latency.
    fit = fit_link([100, 1000, 10_000], [1e-7, 1.2e-6, 1.3e-5])
    assert fit["alpha"] == 0 and fit.parameters["alpha"].low == 0
    assert fit["beta"] > 0


def cluster_samples(cluster, draw=None, spread=0.0):
    samples = []
    for P in (2, 4, 8, 16, 32, 64):
        for numel in (10**5, 10**6, 10**7):
            for method, cost in (
                ("dense", costs.dense_ring(P, numel)),
                ("gtopk", costs.butterfly(P, numel // 1000)),
            ):
                alone = 2e-8 * numel
                true = Sample(method, P, numel, cost, alone, 1.0, label=str(numel))
                seconds = cluster.predict(true)
                if draw:
                    (seconds,) = noisy([seconds], draw, spread)
                samples.append(Sample(method, P, numel, cost, alone, seconds, str(numel)))
    return samples


CLUSTER = Cluster(2e-4, 9e-9, {"dense": 1e-8, "gtopk": 6e-8}, free=10.0, growth=1.7)


@pytest.mark.parametrize("known", [{}, {"alpha": 2e-4, "beta": 9e-9}])
def test_a_cluster_with_host_work_and_contention_is_found(known):
    found, fit = fit_cluster(cluster_samples(CLUSTER), **known)
    assert fit.error < 1e-5
    assert found.free == pytest.approx(10.0, rel=1e-3)
    assert found.growth == pytest.approx(1.7, rel=1e-3)
    assert found.alpha == pytest.approx(2e-4, rel=1e-2)
    assert found.beta == pytest.approx(9e-9, rel=1e-3)
    for method, host in CLUSTER.host.items():
        assert found.host[method] == pytest.approx(host, rel=1e-2)


def test_a_noisy_cluster_is_found_within_its_intervals():
    found, fit = fit_cluster(cluster_samples(CLUSTER, random.Random(3), 0.05), 2e-4, 9e-9)
    truths = {"free": 10.0, "growth": 1.7, "host dense": 1e-8, "host gtopk": 6e-8}
    inside = [
        fit.parameters[name].low <= truth <= fit.parameters[name].high
        for name, truth in truths.items()
    ]
    assert sum(inside) >= 3
    assert 0.03 < fit.error < 0.07
    assert found.contention(4) == 1.0


def test_host_work_that_is_not_there_is_zero_with_an_upper_bound():
    cluster = Cluster(2e-4, 9e-9, {"dense": 0.0, "gtopk": 6e-8}, free=10.0, growth=1.7)
    _, fit = fit_cluster(cluster_samples(cluster, random.Random(4), 0.02), 2e-4, 9e-9)
    dense = fit.parameters["host dense"]
    assert dense.low == 0 or dense.value < 1e-9
    assert dense.high < 6e-9


def test_what_is_left_out_does_not_help_to_predict_itself():
    samples = cluster_samples(CLUSTER)
    spoilt = [
        Sample(s.method, s.P, s.numel, s.cost, s.alone, 9 * s.seconds if n == 5 else s.seconds)
        for n, s in enumerate(samples)
    ]
    predicted = leave_one_out(spoilt, lambda rest: fit_cluster(rest, 2e-4, 9e-9)[0])
    assert predicted[5] == pytest.approx(samples[5].seconds, rel=1e-3)
    by_network = leave_one_out(
        samples, lambda rest: fit_cluster(rest, 2e-4, 9e-9)[0], lambda sample: sample.label
    )
    assert max(relative_errors(by_network, [s.seconds for s in samples])) < 1e-2


def test_student_t_is_that_of_the_tables():
    table = {(0.95, 1): 12.706, (0.95, 2): 4.3027, (0.95, 10): 2.2281, (0.99, 5): 4.0321}
    for (confidence, freedom), value in table.items():
        assert student_t(confidence, freedom) == pytest.approx(value, rel=1e-4)
    assert student_t(0.95, 100_000) == pytest.approx(1.95998, rel=1e-4)


def test_an_exact_fit_of_as_many_parameters_as_measurements_claims_no_certainty():
    fit = fit_link([10, 1000], [1e-3, 2e-3])
    assert fit.freedom == 0
    assert fit.parameters["alpha"].low == 0 and fit.parameters["alpha"].high == math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_link([10], [1.0]), "2 parameters need at least as many measurements, got 1"),
        (lambda: fit_link([10, 20], [1.0, 0.0]), "measured seconds must be above 0"),
        (lambda: fit_link([10, 10], [1.0, 1.0]), "cannot tell alpha, beta apart"),
        (lambda: fit_link([10, 20], [1.0, 1.0], confidence=95), "must lie in"),
        (lambda: linear({"a": [0.0, 0.0]}, [1.0, 1.0]), "a term is 0 in every measurement"),
        (lambda: linear({"a": [1.0]}, [1.0, 1.0]), "expected 2 values of each term"),
        (lambda: positive(["a"], lambda v: v, [1.0], [0.0]), "1 values above 0 to start from"),
        (lambda: fit_collectives([costs.Cost(1)], [1.0], host=("x",)), "host terms are"),
        (lambda: relative_errors([1.0], []), "1 predictions for 0 measurements"),
        (lambda: fit_cluster(cluster_samples(CLUSTER)[:12]), r"at least 3 .* got \[2, 4\]"),
    ],
)
def test_what_cannot_be_fitted_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
