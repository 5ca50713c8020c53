"""Links are the same on all ranks, the choice follows from them, and no choice loses anything."""

import logging
import threading

import pytest
import torch
from clocked import Clocked
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import Case, cases, same_on_every_rank, total_over_ranks

from ddl import links
from ddl.aggregation.aggregator import SparseAggregator, aggregate
from ddl.aggregation.dense_where_faster import DenseWhereFaster
from ddl.aggregation.hierarchy import make_aggregator
from ddl.collectives.auto import BEST_FIRST, NEAR, Auto, Chooser
from ddl.comm import SingleCommunicator, threads
from ddl.compressors import Compressor, make_compressor
from ddl.density import entries
from ddl.errors import DDLError, DeadlineError
from ddl.links import Line, Links, fit, measure_links
from ddl.perfmodel import costs
from ddl.selectors import TopK
from ddl.sparse import Packet, SparseVector
from ddl.wires import COMPACT

CPU = torch.device("cpu")
HOST = Line(100e-6, 6e-9)
GIGABIT = Links(Line(50e-6, 8.5e-9), host=HOST)
TEN_GIGABIT = Links(Line(30e-6, 0.85e-9), host=HOST)
BETWEEN_SITES = Links(Line(10e-3, 100e-9), host=HOST)
FAST = Links(Line(5e-6, 4e-11), host=HOST)


# Measuring.


@pytest.mark.parametrize("P", [1, 2, 3, 5, 16])
def test_all_ranks_learn_the_same_links(P):
    measured = threads.run(P, measure_links)
    assert len(set(measured)) == 1
    assert measured[0].within is None
    if P > 1:
        assert measured[0].between.seconds(2**20) > 0
        assert measured[0].host.seconds(2**15) > 0


@pytest.mark.parametrize(
    "nodes", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 2, 2, 2), (3, 3, 3), (0, 1, 2)]
)
def test_links_within_and_between_nodes_are_told_apart(monkeypatch, nodes):
    """On a virtual clock, where computing takes no time."""

    def seconds(rank, other, size):
        return 2e-6 + 1e-10 * size if nodes[rank] == nodes[other] else 5e-5 + 9e-9 * size

    clocks = threading.local()
    monkeypatch.setattr(links.time, "perf_counter", lambda: clocks.mine.now)
    monkeypatch.setattr(links, "_handling_seconds", lambda count, wire: 1e-4 + 5e-9 * count)

    def work(comm):
        clocked = Clocked(comm, seconds)
        clocks.mine = clocked.clock
        return measure_links(clocked, nodes)

    for found in threads.run(len(nodes), work):
        if len(set(nodes)) == 1:
            assert found.within is None
            assert found.between.beta == pytest.approx(1e-10, rel=0.01)
            continue
        assert found.between.alpha == pytest.approx(5e-5, rel=0.01)
        assert found.between.beta == pytest.approx(9e-9, rel=0.01)
        if len(set(nodes)) == len(nodes):
            assert found.within is None
            assert found.ratio == 1
        else:
            assert found.within.alpha == pytest.approx(2e-6, rel=0.01)
            assert found.ratio == pytest.approx(90, rel=0.01)
        assert found.host.alpha == pytest.approx(1e-4)


@pytest.mark.parametrize("rate", [1e-9, 1e-7, 1e-5])
def test_slow_links_take_no_longer_to_measure_than_they_must(monkeypatch, rate):
    """From 1 GB/s down to 100 kB/s, where only messages of 64 KiB fit into the time."""
    clocks = threading.local()
    monkeypatch.setattr(links.time, "perf_counter", lambda: clocks.mine.now)

    def work(comm):
        clocked = Clocked(comm, lambda rank, other, size: 1e-4 + rate * size)
        clocks.mine = clocked.clock
        monkeypatch.setattr(links, "_handling_seconds", lambda count, wire: 1e-4 + 5e-9 * count)
        return measure_links(clocked), clocked.clock.now

    for found, took in threads.run(4, work):
        assert found.between.beta == pytest.approx(rate, rel=0.01)
        assert took < 0.4 + 20 * rate * 2**16


def test_a_rank_that_does_not_take_part_ends_the_measurement():
    def work(comm):
        if comm.rank:
            measure_links(comm)

    with pytest.raises(DeadlineError):
        threads.run(3, work, timeout=0.2)


def test_one_rank_has_nothing_to_measure():
    assert measure_links(SingleCommunicator()).between == Line(0.0, 0.0)


@given(alpha=st.floats(1e-7, 1e-2), beta=st.floats(1e-12, 1e-6))
def test_a_line_is_found_again(alpha, beta):
    line = fit({size: alpha + beta * size for size in (64, 2**16, 2**20)})
    assert line.seconds(64) == pytest.approx(alpha + 64 * beta, rel=1e-6)
    assert line.seconds(2**20) == pytest.approx(alpha + 2**20 * beta, rel=1e-6)


@given(st.lists(st.floats(1e-7, 1.0), min_size=1, max_size=3))
def test_a_fit_of_anything_is_never_negative(times):
    line = fit(dict(zip((64, 2**16, 2**20), times, strict=False)))
    assert line.alpha >= 0
    assert line.beta >= 0
    assert line.alpha + line.beta > 0


def test_links_can_be_given_as_text():
    assert Links.parse("50e-6,9e-9") == Links(Line(50e-6, 9e-9))
    assert Links.parse("5e-5, 9e-9, 2e-6, 1e-10").ratio == pytest.approx(90)
    for wrong in ("", "1", "1,2,3", "fast,slow", "1,-1", "1,inf", "1,nan"):
        with pytest.raises(ValueError, match="links must be alpha,beta"):
            Links.parse(wrong)


# Choosing.


class Ranks:
    """As many ranks as wanted, for decisions, which send nothing."""

    def __init__(self, size, rank=0):
        self.size, self.rank = size, rank


@pytest.mark.parametrize(
    ("links", "P", "density", "expected"),
    [
        (GIGABIT, 2, 0.001, "all-gather"),  # as fast as the butterfly, and nothing is cut
        (GIGABIT, 4, 0.001, "butterfly"),
        (GIGABIT, 8, 0.001, "exact"),
        (GIGABIT, 64, 0.001, "exact"),
        (TEN_GIGABIT, 16, 0.001, "butterfly"),  # host work decides
        (GIGABIT, 16, 0.00001, "butterfly"),  # latency and host work decide
        (GIGABIT, 4, 0.5, "dense"),
        (GIGABIT, 16, 0.25, "dense"),
        (BETWEEN_SITES, 4, 0.01, "exact"),
        (BETWEEN_SITES, 16, 0.001, "exact"),
        (FAST, 8, 0.05, "dense"),
    ],
)
def test_the_network_decides(links, P, density, expected):
    numel = 25_557_032
    choice = Chooser(links).choose(Ranks(P), numel, entries(numel, density))
    assert choice.name == expected, choice.seconds


def test_without_host_work_the_network_alone_decides():
    network = Links(Line(0.0, 9e-9))
    assert Chooser(network).choose(Ranks(4), 10**7, 10_000).sparse == "exact"
    assert Chooser(network).choose(Ranks(8), 10**7, 10_000).sparse == "exact"
    latency = Links(Line(1e-3, 1e-12))
    assert Chooser(latency).choose(Ranks(8), 10**7, 10_000).sparse == "all-gather"


def test_a_single_rank_sparsifies_as_with_any_collective():
    assert not Chooser(Links(Line(0.0, 0.0))).choose(Ranks(1), 10**6, 1000).dense


@settings(max_examples=200)
@given(
    P=st.integers(2, 200),
    numel=st.integers(1, 10**8),
    density=st.floats(1e-5, 1.0),
    alpha=st.floats(0, 1e-2),
    beta=st.floats(0, 1e-6),
    gamma=st.floats(0, 1e-8),
)
def test_no_candidate_is_clearly_faster_than_the_chosen(P, numel, density, alpha, beta, gamma):
    chooser = Chooser(Links(Line(alpha, beta), host=Line(1e3 * gamma, gamma)))
    choice = chooser.choose(Ranks(P), numel, entries(numel, density))
    assert set(choice.seconds) == set(BEST_FIRST)
    sparse = {name: seconds for name, seconds in choice.seconds.items() if name != "dense"}
    assert choice.seconds[choice.name] <= NEAR * min(choice.seconds.values())
    assert sparse[choice.sparse] <= NEAR * min(sparse.values())


def test_compact_entries_are_predicted_by_their_own_bytes():
    network = Links(Line(0.0, 1e-8))
    plain = Chooser(network).choose(Ranks(8), 10**7, 10_000)
    compact = Chooser(network).choose(Ranks(8), 10**7, 10_000, COMPACT)
    assert compact.seconds["exact"] == pytest.approx(plain.seconds["exact"] / 2)
    assert compact.seconds["dense"] == plain.seconds["dense"]


def test_a_decision_is_made_and_logged_once_with_its_reason(caplog):
    caplog.set_level(logging.INFO, logger="ddl")
    chooser = Chooser(BETWEEN_SITES)
    for _ in range(3):
        chooser.choose(Ranks(16), 10**7, 100_000)
    assert len(caplog.records) == 1
    text = caplog.records[0].getMessage()
    assert text.startswith("exact for 100000 of 10000000 entries on 16 ranks: predicted exact ")
    for name in BEST_FIRST:
        assert f"{name} " in text
    assert "1e+04 us a round, 10 MB/s" in text
    chooser.choose(Ranks(16), 10**7, 20_000)
    assert len(caplog.records) == 2


def test_only_rank_0_speaks(caplog):
    caplog.set_level(logging.INFO, logger="ddl")
    Chooser(GIGABIT).choose(Ranks(16, rank=3), 10**7, 10_000)
    assert not caplog.records


def test_links_are_measured_with_the_first_decision_where_nobody_gave_them():
    def work(comm):
        auto = Auto(Chooser())
        packet = Packet(
            SparseVector(torch.arange(3, dtype=torch.int32), torch.ones(3), 10), finite=True
        )
        total = auto(comm, packet, 3).total
        return auto.chooser.links, total.values.tolist()

    for found, values in threads.run(3, work):
        assert found.between.seconds(64) > 0
        assert values == [3.0] * 3


@pytest.mark.parametrize("name", costs.SPARSE)
def test_the_chosen_collective_is_the_one_that_runs(monkeypatch, name):
    """Each of them in turn made the cheapest; results are the same as without `auto`."""
    free = {other: (lambda *args: costs.Cost(rounds=1)) for other in costs.SPARSE}
    monkeypatch.setattr(costs, "SPARSE", {**free, name: lambda *args: costs.Cost()})
    numel, k = 500, 20

    def work(comm):
        values = torch.randn(k, generator=torch.Generator().manual_seed(comm.rank))
        indices = torch.arange(k, dtype=torch.int32) * (comm.rank + 1)
        packet = Packet(SparseVector(indices, values, numel), finite=True)
        auto = Auto(Chooser(GIGABIT))
        chosen = auto(comm, packet, k)
        alone = Auto(Chooser(GIGABIT)).collectives[name](comm, packet, k)
        return chosen, alone

    for chosen, alone in threads.run(5, work):
        assert torch.equal(chosen.total.indices, alone.total.indices)
        assert torch.equal(chosen.total.values, alone.total.values)
        assert torch.equal(chosen.included, alone.included)


# Sparse and dense steps of the same bucket.


def switching(comm, numel, choose, seed=0):
    """Dense where `choose(numel, density)` says so."""
    compressor = make_compressor("gtopk", "butterfly")
    return DenseWhereFaster(comm, SparseAggregator(comm, numel, CPU, compressor, seed), choose)


def alternating():
    """Sparse, dense, sparse, dense..."""
    steps = iter(range(10**6))
    return lambda numel, density: next(steps) % 2 == 1


@settings(max_examples=30)
@given(P=st.integers(1, 7), case=cases)
def test_every_gradient_is_applied_or_owed_through_dense_and_sparse_steps(P, case):
    def work(comm):
        aggregator = switching(comm, case.numel, alternating())
        for step in range(5):
            flat = case.gradient(comm.rank, step)
            accumulated = total_over_ranks(comm, flat + aggregator.residual)
            assert aggregate(aggregator, flat, case.density).finite
            applied = (flat.double() * comm.size).round()
            owed = total_over_ranks(comm, aggregator.residual)
            assert torch.equal(applied + owed, accumulated), step
            assert same_on_every_rank(comm, flat), step
            if step % 2:
                assert not aggregator.residual.any()

    threads.run(P, work)


@settings(max_examples=20)
@given(P=st.integers(1, 5), case=cases, bad=st.sampled_from([float("nan"), float("-inf")]))
def test_a_bad_gradient_skips_a_dense_step_and_what_is_finite_is_owed(P, case, bad):
    def work(comm):
        aggregator = switching(comm, case.numel, alternating())
        aggregate(aggregator, case.gradient(comm.rank), case.density)
        flat = case.gradient(comm.rank, step=1)
        finite_part = flat.clone()
        if comm.rank == case.seed % P:
            flat[case.seed % case.numel] = bad
            finite_part[case.seed % case.numel] = 0
        expected = finite_part + aggregator.residual
        assert not aggregate(aggregator, flat, case.density).finite
        assert torch.isnan(flat).all()
        assert torch.equal(aggregator.residual, expected)

    threads.run(P, work)


@settings(max_examples=20)
@given(P=st.integers(1, 5), case=cases)
def test_a_dense_step_can_be_owed_or_discarded(P, case):
    def work(comm):
        aggregator = switching(comm, case.numel, alternating())
        for _ in range(2):
            aggregate(aggregator, case.gradient(comm.rank), case.density)
            before = aggregator.residual.clone()
            flat = case.gradient(comm.rank, step=1)
            aggregator.begin(flat, case.density)
            assert torch.equal(flat, case.gradient(comm.rank, step=1))
            aggregator.discard(flat)
            assert torch.equal(aggregator.residual, before)

        aggregate(aggregator, flat, case.density)
        expected = aggregator.residual + case.gradient(comm.rank, step=2)
        flat = case.gradient(comm.rank, step=2)
        aggregator.begin(flat, case.density)
        aggregator.owe(flat)
        assert torch.equal(aggregator.residual, expected)

    threads.run(P, work)


@pytest.mark.parametrize(
    ("dtype", "large", "already_owed"), [(torch.float32, 3e38, 0.0), (torch.float16, 6e4, 6e4)]
)
def test_an_average_that_overflows_costs_a_dense_step_and_is_dropped(dtype, large, already_owed):
    def work(comm):
        aggregator = switching(comm, 4, lambda numel, density: True)
        aggregator.residual[1:] = already_owed
        flat = torch.tensor([1.0, large, large, large], dtype=dtype)
        assert not aggregate(aggregator, flat, 0.5).finite
        flat = torch.ones(4, dtype=dtype)
        assert aggregate(aggregator, flat, 0.5).finite
        return flat.tolist()

    assert threads.run(2, work) == [[2.0, 1.0, 1.0, 1.0]] * 2


def test_a_second_half_without_a_first_is_refused():
    aggregator = switching(SingleCommunicator(), 4, lambda numel, density: True)
    with pytest.raises(DDLError, match="nothing has begun"):
        aggregator.apply(torch.ones(4))


def test_auto_trains_through_a_warm_up_that_begins_dense():
    """Densities from 0.5 down on a gigabit network: dense first, sparse later, nothing lost."""
    case = Case(numel=20_000, density=0.01, correlation=0.3, spread=100, seed=5)

    def work(comm):
        chooser = Chooser(Links(Line(1e-7, 1e-8)))
        compressor = Compressor("gtopk", lambda seed: TopK(), lambda: Auto(chooser), "auto")
        aggregator = make_aggregator(comm, None, case.numel, CPU, compressor, seed=0)
        for step, density in enumerate((0.5, 0.25, 0.01, 0.01)):
            flat = case.gradient(comm.rank, step)
            accumulated = total_over_ranks(comm, flat + aggregator.residual)
            aggregate(aggregator, flat, density)
            owed = total_over_ranks(comm, aggregator.residual)
            assert torch.equal((flat.double() * comm.size).round() + owed, accumulated)
            assert same_on_every_rank(comm, flat)
        return [choice.name for choice in chooser._choices.values()]

    names = threads.run(4, work)
    assert names == [["dense", "exact", "exact"]] * 4
