"""Scaling to thousands of workers, and stragglers."""

import math
import time
from itertools import pairwise

import pytest

from ddl.perfmodel import costs, hardware, networks, plans, schedules
from ddl.perfmodel.iteration import IterationProfile, LayerProfile
from ddl.perfmodel.simulation import scaling, stragglers

WORKERS = [2**power for power in range(13)]


def resnet50(device="v100", batch=64):
    network = networks.resnet50()
    return network.profile(hardware.compute_seconds(device, network, batch), batch)


def communicate(P, numel):
    link = hardware.LINKS["10gbe"]
    return costs.butterfly(P, numel / 1000).seconds(link.alpha, link.beta)


def test_4096_workers_take_about_a_second(capsys):
    began = time.process_time()
    curve = scaling(resnet50(), schedules.merged, communicate, WORKERS)
    curve_seconds = time.process_time() - began
    began = time.process_time()
    plan = curve[-1].iteration.buckets
    stragglers(resnet50(), lambda numel: communicate(4096, numel), 4096, 0.05, plan)
    straggle_seconds = time.process_time() - began
    with capsys.disabled():
        print(
            f"\nResNet-50 to P = 4096: curve of 13 sizes, best plan each, {curve_seconds:.2f} s "
            f"of CPU; 20 iterations with stragglers {straggle_seconds:.2f} s"
        )
    assert [point.P for point in curve] == WORKERS
    assert curve_seconds + straggle_seconds < 10  # about 0.6 on an idle core


def test_a_curve_starts_at_one_and_adds_up():
    curve = scaling(resnet50(), schedules.wfbp, communicate, [1, 2, 3, 1000])
    assert curve[0].speedup == curve[0].efficiency == 1
    for point in curve:
        assert point.efficiency == pytest.approx(point.speedup / point.P)
        assert point.throughput == pytest.approx(point.P * 64 / point.iteration.seconds)
    assert all(b.efficiency <= a.efficiency for a, b in pairwise(curve))


def test_without_spread_stragglers_change_nothing():
    profile = resnet50()
    cost = plans.Linear(1e-3, 1e-9)
    plan = plans.by_size([layer.numel for layer in profile.layers], 6_553_600)
    simulated = stragglers(profile, cost, 64, 0.0, plan)
    scheduled = schedules.iterate(profile, cost, plan)
    assert simulated.mean == pytest.approx(simulated.undisturbed)
    assert simulated.undisturbed == pytest.approx(scheduled.seconds)
    assert simulated.exposed == pytest.approx(scheduled.exposed)


def test_the_slowest_of_many_decides_and_more_are_slower():
    profile = IterationProfile((LayerProfile("fc", 10, t_f=1.0, t_b=2.0),))
    means = [stragglers(profile, plans.nothing, P, 0.1, steps=400).mean for P in (1, 16, 256, 4096)]
    assert means == sorted(means)
    # The median of the largest of 4096 normal numbers is about 3.58 standard deviations.
    assert means[-1] == pytest.approx(3 * math.exp(0.358), rel=0.03)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        scaling(resnet50(), schedules.wfbp, communicate, [0])
    with pytest.raises(ValueError, match="spread at least 0, got 4, 20, -1"):
        stragglers(resnet50(), plans.nothing, 4, -1)
