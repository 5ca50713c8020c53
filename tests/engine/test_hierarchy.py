"""Aggregation in two levels: the guarantees, on nodes that are simulated by threads."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import Case, cases, same_on_every_rank, total_over_ranks

from ddl.aggregation.aggregator import SparseAggregator, aggregate
from ddl.aggregation.hierarchy import HierarchicalAggregator
from ddl.collectives.auto import Auto, Chooser
from ddl.comm import threads
from ddl.compressors import Compressor, make_compressor
from ddl.errors import CommunicationError, DDLError
from ddl.links import Line, Links
from ddl.nodes import Place, Teams, group_by_node, two_levels
from ddl.selectors import TopK

CPU = torch.device("cpu")
# Ranks on each node; the nodes' ranks one after the other, or dealt out in turn.
LAYOUTS = [(2, 2), (2, 2, 2), (3, 3), (4, 4, 4, 4), (3, 1), (1, 2, 3), (3, 2)]
SLOW, FAST = Links(Line(1e-4, 1e-6)), Links(Line(1e-4, 1e-13))


def auto(links):
    """As make_compressor("gtopk", "auto") with given links."""
    chooser = Chooser(links)
    return Compressor("gtopk", lambda seed: TopK(), lambda: Auto(chooser), "auto")


COMPRESSORS = {
    "topk": lambda: make_compressor("topk"),
    "tree": lambda: make_compressor("gtopk", "tree"),
    "butterfly": lambda: make_compressor("gtopk", "butterfly"),
    "exact": lambda: make_compressor("gtopk", "exact"),
    "exact, compact, more winners": lambda: make_compressor("gtopk", "exact", "compact", 1.5),
    "butterfly, compact": lambda: make_compressor("gtopk", "butterfly", "compact"),
    "gaussiank": lambda: make_compressor("gaussiank"),
    "randomk": lambda: make_compressor("randomk"),
    "auto on slow links": lambda: auto(SLOW),
    "auto on fast links": lambda: auto(FAST),
}


def node_of_rank(layout, dealt=False):
    if dealt:  # a round for each number within a node
        turns = range(max(layout))
        return tuple(node for turn in turns for node, size in enumerate(layout) if turn < size)
    return tuple(node for node, size in enumerate(layout) for _ in range(size))


def on_nodes(layout, work, dealt=False):
    """Call work(teams) on every rank."""
    nodes = node_of_rank(layout, dealt)
    return threads.run(len(nodes), lambda comm: work(Teams(comm, nodes)))


def make(teams, numel, compressor, seed=0):
    return HierarchicalAggregator(teams, numel, CPU, compressor, seed)


def owed(aggregator, numel):
    """float32 [numel]: what this rank owes."""
    whole = torch.zeros(numel)
    if aggregator.residual is not None:
        whole[aggregator.first :][: aggregator.residual.numel()] = aggregator.residual
    return whole


def every_gradient_is_applied_or_owed(teams, case, names):
    comm = teams.job
    for name in names:
        aggregator = make(teams, case.numel, COMPRESSORS[name](), case.seed)
        for step in range(3):
            flat = case.gradient(comm.rank, step)
            accumulated = total_over_ranks(comm, flat + owed(aggregator, case.numel))
            outcome = aggregate(aggregator, flat, case.density)
            assert outcome.finite
            applied = (flat.double() * comm.size).round()
            still_owed = total_over_ranks(comm, owed(aggregator, case.numel))
            assert torch.equal(applied + still_owed, accumulated), (name, step)
            assert same_on_every_rank(comm, flat), (name, step)


@settings(max_examples=25)
@given(case=cases, layout=st.sampled_from(LAYOUTS[:3] + LAYOUTS[4:]), dealt=st.booleans())
def test_every_gradient_is_applied_or_owed(case, layout, dealt):
    on_nodes(
        layout, lambda teams: every_gradient_is_applied_or_owed(teams, case, COMPRESSORS), dealt
    )


def test_every_gradient_is_applied_or_owed_on_four_nodes_of_four():
    case = Case(numel=1000, density=0.02, correlation=0.5, spread=1000, seed=11)
    on_nodes(
        (4, 4, 4, 4), lambda teams: every_gradient_is_applied_or_owed(teams, case, COMPRESSORS)
    )


@settings(max_examples=20)
@given(case=cases, layout=st.sampled_from(LAYOUTS[:3] + LAYOUTS[4:]))
def test_ranks_agree_where_sums_round(case, layout):
    def work(teams):
        for name, make_one in COMPRESSORS.items():
            flat = case.gradient(teams.job.rank) * 0.1
            aggregate(make(teams, case.numel, make_one(), case.seed), flat, case.density)
            assert same_on_every_rank(teams.job, flat), name

    on_nodes(layout, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=10)
@given(case=cases, layout=st.sampled_from(LAYOUTS[:3] + LAYOUTS[4:]))
def test_density_one_is_the_dense_average(dtype, case, layout):
    def work(teams):
        comm = teams.job
        for name, make_one in COMPRESSORS.items():
            flat = case.gradient(comm.rank).to(dtype)
            average = total_over_ranks(comm, flat.float()) / comm.size
            aggregator = make(teams, case.numel, make_one(), case.seed)
            if "compact" in name:  # which rounds
                continue
            aggregate(aggregator, flat, 1.0)
            torch.testing.assert_close(flat, average.to(dtype), rtol=1e-6, atol=0, msg=name)
            assert not owed(aggregator, case.numel).any(), name

    on_nodes(layout, work)


@settings(max_examples=15)
@given(case=cases, layout=st.sampled_from(LAYOUTS[:3] + LAYOUTS[4:]))
def test_one_bad_gradient_skips_the_step_everywhere_and_all_that_is_finite_is_owed(case, layout):
    def work(teams):
        comm = teams.job
        victim, place = case.seed % comm.size, case.seed % case.numel
        for bad, (name, make_one) in itertools.product((float("nan"), -float("inf")), CHOSEN):
            aggregator = make(teams, case.numel, make_one(), case.seed)
            aggregate(aggregator, case.gradient(comm.rank), case.density)
            flat = case.gradient(comm.rank, step=1)
            finite_part = flat.clone()
            if comm.rank == victim:
                flat[place] = bad
                finite_part[place] = 0
            expected = total_over_ranks(comm, finite_part + owed(aggregator, case.numel))
            assert not aggregate(aggregator, flat, case.density).finite, name
            assert torch.isnan(flat).all(), name
            still_owed = total_over_ranks(comm, owed(aggregator, case.numel))
            assert torch.equal(still_owed, expected), name

    on_nodes(layout, work)


CHOSEN = [(name, COMPRESSORS[name]) for name in ("butterfly", "topk", "auto on fast links")]


@settings(max_examples=15)
@given(case=cases, layout=st.sampled_from(LAYOUTS[:3] + LAYOUTS[4:]), spoiled=st.booleans())
def test_a_discarded_gradient_leaves_no_trace(case, layout, spoiled):
    def work(teams):
        comm = teams.job
        for name, make_one in CHOSEN:
            aggregator = make(teams, case.numel, make_one(), case.seed)
            aggregate(aggregator, case.gradient(comm.rank), case.density)
            before = owed(aggregator, case.numel)
            flat = case.gradient(comm.rank, step=1)
            if spoiled and comm.rank == 1:
                flat[case.seed % case.numel] = float("inf")
            given_up = flat.clone()
            aggregator.begin(flat, case.density)
            assert torch.equal(flat, given_up), name
            aggregator.discard(flat)
            assert torch.equal(owed(aggregator, case.numel), before), name

    on_nodes(layout, work)


@settings(max_examples=15)
@given(case=cases, layout=st.sampled_from(LAYOUTS[:3] + LAYOUTS[4:]))
def test_a_skipped_step_is_owed(case, layout):
    def work(teams):
        comm = teams.job
        for name, make_one in CHOSEN:
            aggregator = make(teams, case.numel, make_one(), case.seed)
            flat = case.gradient(comm.rank)
            expected = total_over_ranks(comm, flat)
            aggregator.begin(flat, case.density)
            aggregator.owe(flat)
            still_owed = total_over_ranks(comm, owed(aggregator, case.numel))
            assert torch.equal(still_owed, expected), name

    on_nodes(layout, work)


@pytest.mark.parametrize("name", ["butterfly", "topk", "auto on fast links"])
@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 3e38), (torch.float16, 60_000)])
def test_an_average_that_overflows_costs_one_step(name, dtype, large):
    def work(teams):
        aggregator = make(teams, 10, COMPRESSORS[name]())
        finite = []
        for gradient in (large, large, 1.0, 1.0):
            flat = torch.full((10,), gradient, dtype=dtype)
            # A sparse first step owes 2 of 5 entries, so the second overflows in half precision.
            finite.append(aggregate(aggregator, flat, 0.6).finite)
            assert not finite[-1] or torch.isfinite(flat).all()
        return finite

    for finite in on_nodes((2, 2), work):
        assert not all(finite[:2]) or name == "auto on fast links"
        assert all(finite[2:])


def test_a_node_owes_once_in_shares_as_equal_as_can_be():
    def work(teams):
        aggregator = make(teams, 1001, COMPRESSORS["butterfly"]())
        residual = aggregator.residual
        return aggregator.first, None if residual is None else residual.numel()

    assert on_nodes((3, 3), work) == [(0, 333), (333, 334), (667, 334)] * 2
    assert on_nodes((3, 2), work) == [(0, 500), (500, 501), (0, None), (0, 500), (500, 501)]


def test_entries_cross_between_nodes_once_per_node():
    """Flat, each of the 8 ranks would send a butterfly's worth of the whole bucket's entries."""
    numel, density = 40_000, 0.01
    k, shard_k = 400, 100

    def work(teams):
        flat = torch.randn(numel, generator=torch.Generator().manual_seed(teams.job.rank))
        aggregator = make(teams, numel, COMPRESSORS["butterfly"]())
        outcome = aggregate(aggregator, flat, density)
        return teams.across.bytes_sent, teams.within.bytes_sent, outcome

    for across, within, outcome in on_nodes((4, 4), work):
        assert across == 8 + 8 * shard_k
        dense, sparse = 3 * 4 * numel // 4, 3 * 8 * shard_k
        assert dense + sparse <= within <= dense + sparse + 3 * (12 + 8 + 8)
        assert outcome.bytes_sent == across + within
        assert outcome.picked == k


def test_the_sum_within_a_node_is_not_rounded_to_half_precision():
    """4 x 40,000 would overflow fp16 on the way to an average of 40,000."""

    def work(teams):
        flat = torch.full((6,), 40_000.0, dtype=torch.float16)
        outcome = aggregate(make(teams, 6, COMPRESSORS["butterfly"]()), flat, 1.0)
        return outcome.finite, flat

    for finite, flat in on_nodes((4, 4), work):
        assert finite
        assert torch.equal(flat, torch.full((6,), 40_000.0, dtype=torch.float16))


def test_ranks_out_of_step_are_told_so():
    def work(teams):
        teams.job.label = 7 if teams.job.rank == 2 else 5
        aggregate(make(teams, 10, COMPRESSORS["butterfly"]()), torch.ones(10), 0.5)

    with pytest.raises(CommunicationError, match="out of step"):
        on_nodes((2, 2), work)


def test_a_cancelled_wait_ends_at_every_level():
    def work(teams):
        if teams.job.rank == 3:
            return
        teams.cancel()
        with pytest.raises(CommunicationError):
            aggregate(make(teams, 10, COMPRESSORS["butterfly"]()), torch.ones(10), 0.5)

    on_nodes((2, 2), work)


def test_a_second_half_without_a_first_is_refused():
    def work(teams):
        aggregator = make(teams, 10, COMPRESSORS["butterfly"]())
        for second_half in (aggregator.apply, aggregator.owe, aggregator.discard):
            with pytest.raises(DDLError, match="nothing has begun"):
                second_half(torch.ones(10))

    on_nodes((2, 2), work)


def test_it_converges_as_one_rank_per_node_would():
    """The nodes' sums are exact, so 2 nodes of 2 equal 2 ranks with twice the batch."""
    numel, steps = 64, 30

    def target(rank):
        return torch.randn(numel, generator=torch.Generator().manual_seed(rank))

    def work(teams):
        x = torch.zeros(numel)
        aggregator = make(teams, numel, COMPRESSORS["topk"]())
        for _ in range(steps):
            flat = x - target(teams.job.rank)
            aggregate(aggregator, flat, 1 / 16)
            x -= 0.05 * flat
        return x

    results = on_nodes((2, 2), work)
    mean = sum(target(rank) for rank in range(4)) / 4
    assert (results[0] - mean).norm() < 0.6 * mean.norm()
    assert all(torch.equal(results[0], other) for other in results)


# Who shares a node, and whether it matters.


def places(layout, dealt=False, hosts=True):
    nodes = node_of_rank(layout, dealt)
    return [
        Place(nodes[:rank].count(node), layout[node], f"host{node}" if hosts else "same")
        for rank, node in enumerate(nodes)
    ]


@pytest.mark.parametrize("hosts", [True, False])
@pytest.mark.parametrize("layout", [*LAYOUTS, (1,), (5,), (1, 1, 1)])
def test_nodes_filled_one_after_the_other_are_told_even_without_host_names(layout, hosts):
    assert group_by_node(places(layout, hosts=hosts)) == node_of_rank(layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_dealt_out_in_turn_are_told_by_host_names(layout):
    assert group_by_node(places(layout, dealt=True)) == node_of_rank(layout, dealt=True)


def test_places_that_do_not_fit_together_are_not_guessed():
    assert group_by_node(places((2, 2), dealt=True, hosts=False)) is None
    assert group_by_node([Place(0, 2, "a"), Place(0, 1, "b")]) is None
    assert group_by_node([Place(0, 2, "a"), Place(1, 3, "a")]) is None


def links_with(ratio):
    return lambda: Links(Line(1e-4, ratio * 1e-9), within=Line(1e-5, 1e-9))


def never_asked():
    raise AssertionError("measured in vain")


@pytest.mark.parametrize(
    ("wanted", "layout", "ratio", "expected"),
    [
        (None, (2, 2), 5, True),
        (None, (2, 2), 3, False),
        (None, (4, 4, 4, 4), 40, True),
        (None, (3, 2), 40, True),
        (None, (3, 1), None, False),  # one rank would do the work of a node
        (None, (4,), None, False),
        (None, (1, 1, 1), None, False),
        (True, (2, 2), None, True),
        (True, (3, 1), None, True),
        (True, (4,), None, False),  # there is one level only
        (True, (1, 1, 1), None, False),
        (False, (2, 2), None, False),
    ],
)
def test_two_levels_where_links_differ_or_where_asked_for(wanted, layout, ratio, expected):
    links = never_asked if ratio is None else links_with(ratio)
    assert two_levels(wanted, node_of_rank(layout), links) is expected


def test_unknown_nodes_are_one_level_unless_two_are_asked_for():
    assert two_levels(None, None, never_asked) is False
    with pytest.raises(ValueError, match="host names and local ranks that do not fit together"):
        two_levels(True, None, never_asked)


def test_a_dense_compressor_is_refused():
    def work(teams):
        with pytest.raises(ValueError, match="a hierarchy needs a selector"):
            make(teams, 10, make_compressor("none"))

    on_nodes((2, 2), work)


def test_flat_and_hierarchical_give_the_same_average_at_density_one():
    def work(teams):
        gradient = torch.randn(500, generator=torch.Generator().manual_seed(teams.job.rank))
        flat, again = gradient.clone(), gradient.clone()
        compressor = make_compressor("topk")
        aggregate(SparseAggregator(teams.job, 500, CPU, compressor, 0), flat, 1.0)
        aggregate(make(teams, 500, compressor), again, 1.0)
        return flat, again

    for flat, again in on_nodes((2, 2), work):
        torch.testing.assert_close(flat, again, rtol=1e-6, atol=1e-6)
