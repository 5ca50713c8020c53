"""What a step comes to, where the truth is known; and which candidate is advised."""

from dataclasses import replace

import pytest
from situations import LINKS, situation

from ddl.advise import candidates
from ddl.advise.advice import advise
from ddl.advise.candidates import find
from ddl.advise.computation import usable_per_rank
from ddl.advise.measured import imagined
from ddl.advise.predictions import predict
from ddl.advise.report import hiding_line
from ddl.links import Line, Links
from ddl.perfmodel.contention import Sharing


def only(toy):
    (candidate,) = toy.aggregations
    return predict(toy, candidate)


def test_a_dense_step_in_numbers():
    # 4 ranks send 6 x 1 ms and 1.5 x 4 bytes an entry at 10 ns: 186 ms and 66 ms. The first bucket
    # has 200 ms of backward pass to hide in, the second has none.
    p = only(situation("none"))
    assert p.communication == pytest.approx(0.186 + 0.066, rel=1e-3)
    assert p.exposed == pytest.approx(0.066, rel=1e-3)
    assert p.compute == pytest.approx(0.01 + 0.1 + 0.3)
    assert p.seconds == pytest.approx(0.41 + 0.066 + 0.02, rel=1e-3)
    assert p.images_per_second == pytest.approx(4 * 32 / p.seconds)
    assert p.efficiency == pytest.approx(0.43 / p.seconds)
    assert p.bytes_sent == pytest.approx(1.5 * 16e6)
    assert p.hiding_density is None


def test_a_sparse_step_in_numbers():
    # The all-gather takes 2 x 1 ms and 3 x 8 bytes for each of 1 % of the entries.
    p = only(situation("topk"))
    assert p.selection == pytest.approx(0.004)
    assert p.communication == pytest.approx(2 * 0.002 + 3 * 8 * 40_000 * 1e-8, rel=1e-3)
    assert p.exposed == pytest.approx(0.001 + 0.002 + 3 * 8 * 10_000 * 1e-8, rel=1e-2)
    assert p.update == pytest.approx(0.02 + 0.002)
    assert p.seconds == pytest.approx(p.compute + p.exposed + p.update)


def test_what_the_threads_take_from_each_other_is_exposed():
    apart, shared = (only(situation("none", sharing=s)) for s in (None, Sharing(0.5, 0.5)))
    assert apart.exposed < 0.5 * shared.exposed
    assert shared.exposed == pytest.approx(shared.communication)


def test_at_the_hiding_density_communication_and_selection_take_as_long_as_the_backward_pass():
    toy = situation("topk", "gtopk:butterfly", density=0.01)
    for candidate in toy.aggregations:
        found = predict(toy, candidate).hiding_density
        there = situation(candidate.label, density=found)
        p = only(there)
        assert p.selection + p.communication == pytest.approx(0.3, rel=0.02)


def test_no_density_hides_where_rounds_alone_take_longer_than_the_backward_pass():
    assert only(situation("topk", links=Links(Line(1.0, 0.0)))).hiding_density is None
    assert only(situation("topk", links=Links(Line(1e-6, 1e-12)))).hiding_density == 1.0


@pytest.mark.parametrize("label", ["none", "topk", "gtopk:exact", "gtopk:butterfly", "randomk"])
def test_other_numbers_of_workers_are_predicted_as_if_measured_there(label):
    here, there = situation(label, P=4), situation(label, P=32)
    (candidate,) = here.aggregations
    moved, measured = predict(here, candidate, P=32), only(there)
    assert moved.seconds == pytest.approx(measured.seconds, rel=0.01)
    assert moved.bytes_sent == pytest.approx(measured.bytes_sent, rel=0.01)


def test_a_worker_alone_is_put_among_others_on_another_network():
    alone = situation("none", "topk", P=1)
    there = [find(label, 8) for label in ("none", "topk")]
    moved = imagined(alone, 8, LINKS, there)
    expected = situation("none", "topk", P=8)
    for candidate in there:
        assert predict(moved, candidate).seconds == pytest.approx(
            predict(expected, candidate).seconds, rel=0.01
        )


def advised(toy):
    return advise([predict(toy, candidate) for candidate in toy.aggregations])


def test_a_slow_network_calls_for_a_compressor_and_a_fast_one_for_none():
    labels = candidates.DEFAULT
    slow = advised(situation(*labels, P=16, links=Links(Line(1e-4, 1e-8))))
    assert not slow.best.candidate.is_dense
    assert slow.sentence.startswith("Take ") and "times as fast" in slow.sentence
    fast = advised(situation(*labels, P=16, links=Links(Line(1e-6, 1e-11))))
    assert fast.best.candidate.is_dense
    assert fast.sentence.startswith("Stay dense")


def test_of_near_ties_the_one_that_leaves_least_to_later_steps_is_advised():
    toy = situation("topk", "gtopk:butterfly", P=2, links=Links(Line(1e-4, 1e-9)))
    assert advised(toy).best.candidate.compressor == "topk"


def test_real_steps_decide_where_all_candidates_have_them():
    toy = situation("none", "topk", "gtopk:butterfly", P=2, links=Links(Line(1e-4, 1e-7)))
    predictions = [predict(toy, candidate) for candidate in toy.aggregations]
    dense, topk, gtopk = toy.aggregations
    measured = {dense: (0.9, 0.01), topk: (0.203, 0.01), gtopk: (0.193, 0.01)}
    advice = advise(predictions, measured)
    assert advice.best.candidate is gtopk and advice.by_prediction.candidate is topk
    assert "193 ms instead of 900 ms dense, 4.66 times" in advice.sentence
    assert advice.sentence.endswith("by measurement; predictions alone would have said topk.")
    near = advise(predictions, {**measured, topk: (0.198, 0.01)})
    assert near.best.candidate is topk  # 2.6 % slower: alike
    assert "predictions alone" not in near.sentence
    del measured[dense]
    assert advise(predictions, measured).best.candidate is topk


def test_ranks_on_one_machine_share_its_cores_whatever_their_network():
    two = ("a", [0, 1], 2)
    assert usable_per_rank([two], 0) == 2
    assert usable_per_rank([two] * 4, 3) == 0.5
    assert usable_per_rank([two, two, ("b", [0, 1], 2)], 2) == 2
    assert usable_per_rank([("a", [0], 1), ("a", [1], 1)], 0) == 1
    assert usable_per_rank([("a", range(16), 4)] * 2, 1) == 4


def test_a_single_bucket_is_said_to_hide_nothing():
    toy = situation("none", "topk", links=Links(Line(1e-4, 1e-7)))
    predictions = [predict(toy, candidate) for candidate in toy.aggregations]
    advice = advise(predictions)
    assert "just hides" in hiding_line(toy, predictions, advice)
    whole = replace(toy, plan=((0, len(toy.profile.layers)),))
    assert "a single bucket is complete only when" in hiding_line(whole, predictions, advice)


def test_random_k_is_advised_only_where_nothing_else_is_compared():
    labels = ("none", "randomk")
    assert advised(situation(*labels, links=Links(Line(1e-3, 1e-7)))).best.candidate.is_dense
    assert advised(situation("randomk")).best.candidate.compressor == "randomk"


def test_a_single_worker_is_told_that_it_sends_nothing():
    toy = situation("none", "topk", P=1)
    toy = replace(toy, profile=replace(toy.profile, t_u=0.0))
    assert advised(toy).sentence == "Stay dense: a single worker sends nothing."


@pytest.mark.parametrize(
    ("label", "P", "collective"),
    [
        ("none", 4, "all-reduce"),
        ("topk", 4, "all-gather"),
        ("gtopk", 4, "butterfly"),
        ("gtopk", 8, "exact"),
        ("gaussiank-gtopk:tree", 8, "tree"),
        ("randomk", 4, "all-reduce"),
    ],
)
def test_a_label_names_a_compressor_and_a_collective(label, P, collective):
    assert find(label, P).collective == collective


@pytest.mark.parametrize("label", ["best", "topk:exact", "gtopk:auto", "gtopk:ring", "none:tree"])
def test_a_label_of_nothing_is_refused(label):
    with pytest.raises(ValueError):
        find(label, 4)
