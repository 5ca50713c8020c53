"""A worker whose two threads share cores."""

import pytest
from profiles import random_profile

from ddl.perfmodel import plans, schedules
from ddl.perfmodel.contention import Sharing, shared
from ddl.perfmodel.iteration import IterationProfile, LayerProfile
from ddl.perfmodel.plans import Linear

SELECT = Linear(0.002, 2e-5)


def two_layers(**more):
    return IterationProfile(
        (LayerProfile("first", 100, 1.0, 2.0), LayerProfile("last", 300, 0.0, 1.0)), **more
    )


@pytest.mark.parametrize("seed", range(40))
def test_threads_that_take_nothing_from_each_other_are_the_queue_of_the_sparse_schedule(seed):
    profile, communicate = random_profile(seed, 8)
    plan = plans.by_size([layer.numel for layer in profile.layers], 2000)
    queue = schedules.sparse(profile, communicate, SELECT, plan=plan)
    both = shared(profile, plan, communicate, SELECT)
    # One reads during the iteration before, the other at its begin.
    read = profile.t_io + profile.t_h2d
    assert both.exposed == pytest.approx(queue.exposed, abs=1e-9)
    assert both.seconds == pytest.approx(
        read + profile.t_f + profile.t_b + queue.exposed + profile.t_u
    )
    assert (both.t_c, both.t_s) == pytest.approx((queue.t_c, queue.t_s))


@pytest.mark.parametrize("seed", range(20))
def test_threads_that_share_one_core_take_as_long_as_one_after_the_other(seed):
    profile, communicate = random_profile(seed, 8)
    plan = plans.layerwise(len(profile.layers))
    both = shared(profile, plan, communicate, SELECT, Sharing(0.5, 0.5))
    assert both.exposed == pytest.approx(both.t_c + both.t_s)


def test_a_worked_example():
    # The last layer's message of 1 s starts at 2 s; half as fast each, 1 s of messages takes until
    # 4 s, and of 2 s of backward pass 1 s is left. The first layer's message follows.
    profile = two_layers(t_io=0.5, t_u=0.25)
    both = shared(
        profile,
        plans.layerwise(2),
        Linear(1.0, 0.0),
        sharing=Sharing(0.5, 0.5),
        apply=lambda n: 0.1,
    )
    times = {span.task.name: (span.start, span.end) for span in both.spans}
    assert times == {
        "read": (0.0, 0.5),
        "forward": (0.5, 1.5),
        "backward bucket 0": (1.5, 2.5),
        "communicate bucket 0": (2.5, 4.5),
        "backward bucket 1": (2.5, 5.5),
        "communicate bucket 1": (5.5, 6.5),
        "apply bucket 0": (6.5, pytest.approx(6.6)),
        "apply bucket 1": (pytest.approx(6.6), pytest.approx(6.7)),
        "update": (pytest.approx(6.7), pytest.approx(6.95)),
    }
    assert (both.seconds, both.exposed) == pytest.approx((6.95, 2.0))


@pytest.mark.parametrize("true", [Sharing(0.5, 0.5), Sharing(0.9, 0.3), Sharing(1.0, 1.0)])
@pytest.mark.parametrize("work", [0.2, 1.0, 5.0])
def test_shares_are_found_from_when_the_two_threads_end(true, work):
    compute = 1.0
    # A bucket that is ready at once, beside a backward pass of 1 s.
    layers = (LayerProfile("long", 0, 0.0, compute), LayerProfile("ready", 1, 0.0, 0.0))
    profile = IterationProfile(layers)
    both = shared(profile, plans.layerwise(2), lambda numel: work * numel, sharing=true)
    ended = {span.task.name: span.end for span in both.spans}
    found = Sharing.observed(
        compute, work, ended["backward bucket 1"], ended["communicate bucket 0"]
    )
    assert (found.compute, found.worker) == pytest.approx((true.compute, true.worker))


def test_shares_outside_what_is_possible_are_cut():
    assert Sharing.observed(1.0, 1.0, 0.5, 0.5) == Sharing(1.0, 1.0)
    both = Sharing.observed(1.0, 1.0, 10.0, 20.0)  # as 0.1 and 0.05: something else ran, too
    assert (both.compute, both.worker) == pytest.approx((0.6, 0.3))


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_must_be_a_part_of_the_whole(share):
    with pytest.raises(ValueError, match=r"must lie in \(0, 1\]"):
        Sharing(share, 1.0)
    with pytest.raises(ValueError, match="above 0 s"):
        Sharing.observed(1.0, 0.0, 1.0, 1.0)
