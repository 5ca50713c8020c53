"""Schedules against their closed forms and against a brute-force event simulation."""

from itertools import pairwise

import pytest
from brute_force import all_plans, last_average
from profiles import random_profile, random_selection

from ddl.perfmodel import plans, schedules
from ddl.perfmodel.dag import Task, critical_path, run
from ddl.perfmodel.frameworks import CAFFE_MPI, CNTK, FRAMEWORKS, implied_exposed
from ddl.perfmodel.iteration import IterationProfile, LayerProfile
from ddl.perfmodel.published import FRAMEWORK_EFFICIENCY

PROFILES = 1000


def columns(profile):
    return [layer.t_b for layer in profile.layers], [layer.numel for layer in profile.layers]


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def recursion_of_the_papers(t_b, t_c):
    """t_c_no of WFBP by its recursion, over layers 1..L at places 0..L-1."""
    L = len(t_b)
    tau_b = [0.0] * L
    for place in reversed(range(L - 1)):
        tau_b[place] = tau_b[place + 1] + t_b[place + 1]
    tau_c = tau_b[-1] + t_b[-1]
    for place in reversed(range(L - 1)):
        tau_c = max(tau_c + t_c[place + 1], tau_b[place] + t_b[place])
    return tau_c + t_c[0] - (tau_b[0] + t_b[0])


def test_exposed_time_equals_the_event_simulation_on_1000_random_profiles(capsys):
    largest = 0.0
    for seed in range(PROFILES):
        profile, communicate = random_profile(seed, most_layers=40)
        t_b, numels = columns(profile)
        select = random_selection(seed)
        results = [
            (schedules.naive(profile, communicate), {"overlap": False}),
            (schedules.io_overlap(profile, communicate), {"overlap": False}),
            (schedules.wfbp(profile, communicate), {}),
            (schedules.merged(profile, communicate), {}),
            (schedules.merged(profile, communicate, startup=communicate.startup), {}),
        ]
        plan = results[-1][0].buckets
        for where in plans.PLACES:
            result = schedules.sparse(profile, communicate, select, where, plan)
            results.append((result, {"select": select, "where": where}))
        for result, options in results:
            end = last_average(t_b, numels, result.buckets, communicate, **options)
            assert result.exposed == close(end - profile.t_b), (seed, result.schedule, options)
            largest = max(largest, abs(result.exposed - end + profile.t_b) / max(1.0, end))
    with capsys.disabled():
        print(
            f"\nexposed time against the event simulation, {PROFILES} profiles, 8 schedules each: "
            f"largest difference {largest:.1e} of the pass"
        )


def test_exposed_time_is_the_recursion_of_the_papers():
    for seed in range(PROFILES):
        profile, communicate = random_profile(seed, most_layers=40)
        t_b, numels = columns(profile)
        t_c = [communicate(numel) for numel in numels]
        assert schedules.wfbp(profile, communicate).exposed == close(
            max(0.0, recursion_of_the_papers(t_b, t_c))
        )


def test_merged_is_never_slower_than_wfbp_nor_wfbp_than_naive(capsys):
    faster = {"merged": 0, "wfbp": 0}
    for seed in range(PROFILES):
        profile, communicate = random_profile(seed, most_layers=40)
        naive = schedules.naive(profile, communicate)
        overlapped = schedules.io_overlap(profile, communicate)
        wfbp = schedules.wfbp(profile, communicate)
        published = schedules.merged(profile, communicate, startup=communicate.startup)
        merged = schedules.merged(profile, communicate)
        slack = 1e-9 * naive.seconds
        chain = [merged, published, wfbp, overlapped, naive]
        for quick, slow in pairwise(chain):
            assert quick.seconds <= slow.seconds + slack, (seed, quick.schedule)
            assert quick.exposed <= slow.exposed + slack, (seed, quick.schedule)
        faster["merged"] += merged.exposed < wfbp.exposed - slack
        faster["wfbp"] += wfbp.exposed < naive.exposed - slack
    with capsys.disabled():
        print(
            f"\nmerged <= wfbp <= naive on {PROFILES} profiles; strictly faster on "
            f"{faster['merged']} and {faster['wfbp']}"
        )


def test_times_add_up_as_in_the_closed_forms():
    for seed in range(200):
        profile, communicate = random_profile(seed, most_layers=12)
        t_c = sum(communicate(layer.numel) for layer in profile.layers)
        read = profile.t_io + profile.t_h2d
        work = profile.t_f + profile.t_b + profile.t_u
        naive = schedules.naive(profile, communicate)
        assert naive.seconds == close(read + work + t_c)
        assert naive.t_c == close(t_c) and naive.exposed == close(t_c)
        overlapped = schedules.io_overlap(profile, communicate)
        assert overlapped.seconds == close(max(read, work + t_c))
        wfbp = schedules.wfbp(profile, communicate)
        assert wfbp.seconds == close(max(read, work + wfbp.exposed))
        alone = schedules.naive(profile, plans.nothing)
        assert alone.seconds == close(profile.alone())


def test_overlapped_input_settles_at_the_slower_of_reading_and_working():
    for seed in range(100):
        profile, communicate = random_profile(seed, most_layers=12)
        iteration = schedules.wfbp(profile, communicate)
        read = profile.t_io + profile.t_h2d
        work = profile.t_f + profile.t_b + iteration.exposed + profile.t_u
        ready, began, ended = 0.0, 0.0, []  # of the samples; of and after each iteration
        for _ in range(1000):
            ready = max(ready, began) + read  # one batch ahead: when the last one was taken
            began = max(ready, ended[-1] if ended else 0.0)
            ended.append(began + work)
        assert (ended[-1] - ended[-501]) / 500 == pytest.approx(iteration.seconds, rel=1e-2)


def test_readers_of_one_node_share_its_disk():
    layers = (LayerProfile("fc", 10, t_f=1.0, t_b=2.0),)
    profile = IterationProfile(layers, t_io=2.0, t_h2d=0.5, readers=4)
    assert schedules.naive(profile, plans.nothing).seconds == 8 + 0.5 + 3
    assert schedules.io_overlap(profile, plans.nothing).seconds == 8.5


def test_the_best_plan_is_the_best_of_all_wherever_selection_runs():
    for seed in range(150):
        profile, communicate = random_profile(seed, most_layers=7)
        t_b, numels = columns(profile)
        select = random_selection(seed)
        every = list(all_plans(len(numels)))
        dense = schedules.merged(profile, communicate)
        least = min(last_average(t_b, numels, plan, communicate) for plan in every)
        assert dense.exposed == close(least - profile.t_b), seed
        for where in plans.PLACES:
            result = schedules.sparse(profile, communicate, select, where)
            least = min(
                last_average(t_b, numels, plan, communicate, select, where) for plan in every
            )
            assert result.exposed == close(least - profile.t_b), (seed, where)


def test_selection_on_the_computing_device_delays_the_layers_below():
    layers = (LayerProfile("one", 1, t_b=1.0), LayerProfile("two", 1, t_b=1.0))
    profile = IterationProfile(layers)
    plan = plans.layerwise(2)
    by_place = {
        where: schedules.sparse(profile, lambda n: 0.25, lambda n: 0.5, where, plan)
        for where in plans.PLACES
    }
    # compute: 1 + .5 | 1 + .5 | .25; thread and worker: the first is done when the second is ready.
    assert by_place["compute"].exposed == pytest.approx(1.25)
    assert by_place["thread"].exposed == pytest.approx(0.75)
    assert by_place["worker"].exposed == pytest.approx(0.75)
    assert {result.t_s for result in by_place.values()} == {1.0}


def test_frameworks_differ_by_what_they_overlap():
    for seed in range(100):
        profile, communicate = random_profile(seed, most_layers=12)
        caffe, cntk = (f.iterate(profile, communicate).seconds for f in (CAFFE_MPI, CNTK))
        assert caffe == close(schedules.wfbp(profile, communicate).seconds)
        assert cntk == close(schedules.io_overlap(profile, communicate).seconds)
    assert {name for name, _ in FRAMEWORK_EFFICIENCY} <= {f.name for f in FRAMEWORKS}


def test_an_efficiency_implies_what_was_exposed():
    assert implied_exposed(0.2, 0.5) == pytest.approx(0.2)
    assert implied_exposed(0.2, 1.0) == 0
    with pytest.raises(ValueError, match=r"efficiency must lie in \(0, 1\]"):
        implied_exposed(0.2, 55)


def test_the_timeline_keeps_resources_to_one_task_at_a_time():
    profile, communicate = random_profile(3, most_layers=40)
    spans = schedules.merged(profile, communicate).spans
    for resource in {span.task.resource for span in spans}:
        mine = [span for span in spans if span.task.resource == resource]
        for before, after in pairwise(mine):
            assert before.end <= after.start


def test_the_critical_path_is_one_chain_without_gaps():
    for seed in range(100):
        profile, communicate = random_profile(seed, most_layers=12)
        spans = schedules.wfbp(profile, communicate).spans
        path = critical_path(spans)
        assert path[-1].end == max(span.end for span in spans)
        assert path[0].start == 0
        for before, after in pairwise(path):
            assert before.end == after.start
    assert critical_path([]) == ()


def test_a_graph_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="waits for place 1, expected one that comes before"):
        run([Task("a", "compute", 1.0, after=(1,)), Task("b", "compute", 1.0)])
    with pytest.raises(ValueError, match=r"lasts -1\.0 s, expected at least 0"):
        run([Task("a", "compute", -1.0)])


def test_a_schedule_refuses_plans_and_places_that_do_not_exist():
    profile, communicate = random_profile(1, most_layers=12)
    with pytest.raises(ValueError, match="must end at layer"):
        schedules.naive(profile, communicate, plan=(range(len(profile.layers) + 1),))
    with pytest.raises(ValueError, match="where must be one of worker, thread, compute, got 'gpu'"):
        schedules.sparse(profile, communicate, communicate, where="gpu")
