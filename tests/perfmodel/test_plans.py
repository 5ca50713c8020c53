"""Bucket boundaries: the published rule, the best plan, and what the engine would use."""

import pytest
from brute_force import all_plans, last_average
from profiles import random_profile

from ddl.perfmodel import costs, hardware, networks, plans, schedules


def end(t_b, numels, plan, communicate):
    return last_average(t_b, numels, plan, communicate)


def test_the_published_rule_is_not_always_best_and_how_often(capsys):
    worse, most = 0, 0.0
    for seed in range(1000):
        profile, communicate = random_profile(seed, most_layers=40)
        published = schedules.merged(profile, communicate, startup=communicate.startup)
        best = schedules.merged(profile, communicate)
        work = profile.t_f + profile.t_b
        gain = (work + published.exposed) / (work + best.exposed) - 1
        worse += gain > 1e-9
        most = max(most, gain)
    assert worse > 0
    with capsys.disabled():
        print(
            f"\nthe greedy rule of MG-WFBP against the best plan, 1000 profiles: worse on {worse}, "
            f"an iteration up to {most:.1%} longer"
        )


def test_a_case_where_merging_at_each_step_is_worse_than_waiting_once():
    # Each merge saves a start-up of 1 for a wait of 0.9 and 0.8; the first message could have been
    # done before the second begins.
    t_b, numels = [0.8, 0.9, 0.1], [1, 1, 500]
    communicate = plans.Linear(1.0, 0.001)
    published = plans.greedy(t_b, numels, communicate, a=1.0)
    best = plans.best(t_b, numels, communicate)
    assert published == (range(3),)
    assert best == (range(2, 3), range(0, 2))
    assert end(t_b, numels, published, communicate) == pytest.approx(1.8 + 1.502)
    assert end(t_b, numels, best, communicate) == pytest.approx(1.8 + 1.002)


def test_where_a_collective_changes_its_algorithm_the_published_rule_can_lose_to_no_merging():
    def communicate(numel):
        return 1.0 if numel <= 1000 else 10.0

    t_b, numels = [0.5, 0.5], [600, 600]
    published = plans.greedy(t_b, numels, communicate, a=1.0)
    best = plans.best(t_b, numels, communicate)
    layerwise = plans.layerwise(2)
    assert end(t_b, numels, published, communicate) > end(t_b, numels, layerwise, communicate)
    assert best == layerwise


def test_the_best_plan_is_never_worse_than_any_other_for_costs_of_any_shape():
    for seed in range(200):
        profile, linear = random_profile(seed, most_layers=7)
        t_b = [layer.t_b for layer in profile.layers]
        numels = [layer.numel for layer in profile.layers]

        def jagged(numel, linear=linear, seed=seed):
            return linear(numel) * (1 + (numel * 2654435761 + seed) % 7)

        least = min(end(t_b, numels, plan, jagged) for plan in all_plans(len(numels)))
        best = plans.best(t_b, numels, jagged)
        assert end(t_b, numels, best, jagged) == pytest.approx(least)


def test_linear_costs_give_the_same_plan_by_the_fast_way():
    for seed in range(200):
        profile, linear = random_profile(seed, most_layers=40)
        t_b = [layer.t_b for layer in profile.layers]
        numels = [layer.numel for layer in profile.layers]
        assert plans.best(t_b, numels, linear) == plans.best(t_b, numels, linear.__call__)


def test_a_line_like_a_linear_cost_is_that_cost():
    line = plans.Linear.like(lambda numel: 0.5 + 2e-6 * numel, 1001)
    assert line.startup == pytest.approx(0.5) and line.each == pytest.approx(2e-6)
    assert plans.Linear.like(plans.nothing, 1) == plans.Linear(0.0, 0.0)


def test_free_or_hidden_messages_are_not_split():
    assert plans.best([1.0, 1.0, 1.0], [5, 5, 5], plans.nothing) == plans.single(3)


def test_buckets_for_the_engine_cover_every_layer_once_in_the_order_of_launch():
    plan = plans.plan_buckets([0.8, 0.9, 0.1], [4, 4, 2000], alpha=1.0, beta=0.00025)
    assert plan == (range(2, 3), range(0, 2))
    assert [layer for bucket in plan for layer in reversed(bucket)] == [2, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [1, 2], 0.0, 0.0), "got 1 times and 2 sizes"),
        (([], [], 0.0, 0.0), "at least one layer, got 0 times"),
        (([-1.0], [1], 0.0, 0.0), "at least 0, got a negative one"),
        (([1.0], [1], -1.0, 0.0), "alpha and beta must be at least 0, got -1.0 s"),
    ],
)
def test_buckets_cannot_be_planned_from_nonsense(arguments, message):
    with pytest.raises(ValueError, match=message):
        plans.plan_buckets(*arguments)


@pytest.mark.parametrize("plan", [(range(0, 1),), (range(0, 2), range(1, 3)), (range(1, 3),)])
def test_a_plan_with_gaps_or_overlaps_is_refused(plan):
    with pytest.raises(ValueError, match="plan for 3 layers"):
        plans.check_plan(plan, 3)


def test_plans_by_size_fill_buckets_from_the_end():
    assert plans.by_size([1, 1, 1, 9, 1], limit=3) == (range(4, 5), range(3, 4), range(0, 3))
    assert plans.by_size([1, 2], limit=10) == plans.single(2)
    for seed in range(100):
        profile, _ = random_profile(seed, most_layers=40)
        numels = [layer.numel for layer in profile.layers]
        limit = max(1, profile.numel // 3)
        plan = plans.check_plan(plans.by_size(numels, limit), len(numels))
        for bucket in plan:
            assert len(bucket) == 1 or sum(numels[layer] for layer in bucket) <= limit


def test_for_resnet50_the_best_plan_beats_fixed_buckets_on_slow_and_fast_links(capsys):
    fixed_numel = 26_214_400 // 4
    lines = []
    for name in ("1gbe", "10gbe", "25gbe", "200gib"):
        link = hardware.LINKS[name]
        network = networks.resnet50()
        profile = network.profile(hardware.compute_seconds("v100", network, 64), batch=64)

        def communicate(numel, link=link):
            return costs.dense(16, numel).seconds(link.alpha, link.beta)

        numels = [layer.numel for layer in profile.layers]
        fixed = schedules.iterate(profile, communicate, plans.by_size(numels, fixed_numel))
        best = schedules.merged(profile, communicate)
        wfbp = schedules.wfbp(profile, communicate)
        assert best.seconds <= min(fixed.seconds, wfbp.seconds) * (1 + 1e-9)
        lines.append(
            f"  {name:7}{1000 * wfbp.seconds:9.1f}{1000 * fixed.seconds:9.1f}"
            f"{1000 * best.seconds:9.1f}{len(best.buckets):9}"
        )
    with capsys.disabled():
        print("\nResNet-50, 64 images a V100, P = 16, dense ring, ms an iteration by the model:")
        print("  link       wfbp   25 MiB     best  buckets", *lines, sep="\n")
