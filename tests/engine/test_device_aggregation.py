"""Aggregation that never leaves the device: the same laws, and the bits of the way by the host.

Devices are the CPU, NCCL is a stand-in (fake_nccl.py), and kernels are the CUDA sources on an
emulated device or, where many examples count, the reference (reference_operations.py).
"""

import laws
import pytest
import torch
from device_jobs import (
    COMPRESSORS,
    CPU,
    as_collective,
    emulated,
    gradients,
    make_operations,
    on_device,
    run,
)
from fake_nccl import FakeNccl
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import LAWS, Case, cases
from reference_operations import ReferenceOperations

import ddl
from ddl.aggregation.aggregator import DenseAggregator, SparseAggregator, aggregate
from ddl.aggregation.device_aggregator import DeviceAggregator, DeviceDenseAggregator
from ddl.collectives import allgather, device, device_gtopk, gtopk
from ddl.comm import threads
from ddl.compressors import make_compressor
from ddl.errors import CommunicationError, DeadlineError
from ddl.sparse import Packet, SparseVector
from ddl.wires import PLAIN

SIZES = [1, 2, 3, 4, 5, 8]


# The laws of every aggregator and collective.


# Name, collective, wire, entries kept of the sum per entry picked: what has a form for devices.
KINDS = [
    ("topk", None, None, None),
    ("gtopk", "butterfly", None, None),
    ("gtopk", "butterfly", None, 3.0),
    ("gaussiank", None, None, None),
    ("gaussiank-gtopk", "butterfly", None, 0.5),
    ("randomk", None, None, None),
]
OF_DEVICES = [law for law in LAWS if law is not laws.exact_means_the_largest_of_the_whole_sum]


@pytest.fixture
def laws_on_device(monkeypatch):
    """What the laws make, they make on the device."""

    def make_aggregator(comm, case, kind):
        return on_device(comm, case.numel, make_compressor(*kind), case.seed)

    collectives = {
        "all-gather": as_collective(device.all_gather),
        "butterfly": as_collective(device_gtopk.butterfly),
    }
    monkeypatch.setattr(laws, "SPARSE_COMPRESSORS", KINDS)
    monkeypatch.setattr(laws, "EXACT_SUMS", KINDS)
    monkeypatch.setattr(laws, "make_aggregator", make_aggregator)
    monkeypatch.setattr(laws, "COLLECTIVES", collectives)
    monkeypatch.setattr(laws, "WIRES", {"plain": PLAIN})


@pytest.mark.usefixtures("laws_on_device")
@pytest.mark.parametrize("law", OF_DEVICES, ids=lambda law: law.__name__)
@pytest.mark.parametrize("P", SIZES)
def test_law_holds_on_the_device(law, P):
    @settings(max_examples=4)
    @given(case=cases)
    def holds(case):
        run(P, lambda comm: law(comm, case))

    holds()


# The same bits as through the host.


def history(aggregator, comm, numel, density, dtype, steps=6):
    """All that steps leave behind."""
    seen = []
    for step in range(steps):
        flat = gradients(comm.rank, step, numel, comm.size).to(dtype)
        outcome = aggregator.begin(flat, density)
        if step == 3:
            aggregator.discard(flat)
        elif outcome.finite and step != 1:
            aggregator.apply(flat)
        else:
            aggregator.owe(flat)
        seen.append((flat.float(), aggregator.residual.clone(), outcome.finite, outcome.picked))
    return seen


def assert_same_histories(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        for step, (a, b) in enumerate(zip(mine, other, strict=True)):
            for name, x, y in zip(("flat", "residual"), a[:2], b[:2], strict=True):
                assert torch.equal(x.view(torch.int32), y.view(torch.int32)), (step, name)
            assert a[2:] == b[2:], step


@pytest.mark.parametrize("kernels_by", ["reference", "emulator"])
@pytest.mark.parametrize("compressor", COMPRESSORS[1:])
@pytest.mark.parametrize("P", SIZES)
def test_every_bit_is_that_of_the_way_by_the_host(P, compressor, kernels_by):
    numel, density = 700, 0.03
    # The default, which by the host is another from 8 ranks on, is the butterfly here.
    kind = make_compressor(compressor, "butterfly" if "gtopk" in compressor else None)
    operations = make_operations(kernels_by)

    def by_host(comm):
        aggregator = SparseAggregator(comm, numel, CPU, kind, seed=5)
        return history(aggregator, comm, numel, density, torch.float32)

    def by_device(comm):
        aggregator = on_device(comm, numel, kind, seed=5, operations=operations)
        return history(aggregator, comm, numel, density, torch.float32)

    assert_same_histories(run(P, by_device), threads.run(P, by_host))


@pytest.mark.parametrize(
    ("compressor", "winners_per_pick", "density"),
    [
        ("gtopk", 3.0, 0.03),
        ("gaussiank-gtopk", 0.5, 0.1),
        ("gtopk", 40.0, 0.03),  # all of them
        ("gaussiank", None, 1.0),
        ("gtopk", None, 1.0),
    ],
)
def test_every_bit_is_that_of_the_way_by_the_host_however_many_win(
    compressor, winners_per_pick, density
):
    kind = make_compressor(compressor, winners_per_pick=winners_per_pick)

    def by_host(comm):
        aggregator = SparseAggregator(comm, 200, CPU, kind, seed=5)
        return history(aggregator, comm, 200, density, torch.float32)

    def by_device(comm):
        return history(on_device(comm, 200, kind, 5), comm, 200, density, torch.float32)

    assert_same_histories(run(5, by_device), threads.run(5, by_host))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_bit_is_that_of_the_way_by_the_host_in_half_precision(dtype):
    kind = make_compressor("gtopk")

    def by_host(comm):
        aggregator = SparseAggregator(comm, 300, CPU, kind, seed=5)
        return history(aggregator, comm, 300, 0.05, dtype)

    def by_device(comm):
        return history(on_device(comm, 300, kind, 5, emulated()), comm, 300, 0.05, dtype)

    assert_same_histories(run(3, by_device), threads.run(3, by_host))


@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=9),
    k=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_the_butterfly_gives_the_hosts_bits_whatever_the_counts(counts, k, seed):
    """Ranks may have found any number of entries, also none, below or above k."""
    numel = 60

    def packet_of(rank):
        generator = torch.Generator().manual_seed(seed + rank)
        indices = torch.randperm(numel, generator=generator)[: counts[rank]].sort().values
        values = torch.randint(-3, 4, (counts[rank],), generator=generator).float()
        return Packet(SparseVector(indices.int(), values, numel), finite=(seed + rank) % 7 > 0)

    def told(collected):
        total, included, finite = collected[:3]
        return total.indices.tolist(), total.values.tolist(), included.tolist(), finite

    def by_device(comm):
        picks_of = as_collective(device_gtopk.butterfly)
        return told(picks_of(comm, packet_of(comm.rank), k))

    # The capacity of the device's vectors has to hold the longest of them.
    if max(counts) <= min(numel, 2 * k + 1):
        P = len(counts)
        by_host = threads.run(P, lambda comm: told(gtopk.butterfly(comm, packet_of(comm.rank), k)))
        assert run(P, by_device) == by_host


@pytest.mark.parametrize("P", SIZES)
def test_the_all_gather_gives_the_hosts_bits(P):
    def packet_of(rank):
        values = torch.randn(12, generator=torch.Generator().manual_seed(rank))
        indices = torch.arange(12, dtype=torch.int32) * (rank + 1)
        return Packet(SparseVector(indices, values, 200), finite=True)

    def told(collected):
        return collected[0].indices.tolist(), collected[0].values.tolist()

    by_host = threads.run(P, lambda comm: told(allgather.all_gather(comm, packet_of(comm.rank), 9)))
    collective = as_collective(device.all_gather)
    assert run(P, lambda comm: told(collective(comm, packet_of(comm.rank), 9))) == by_host


# Dense buckets.


@pytest.mark.parametrize("P", SIZES)
def test_dense_buckets_become_their_average_on_the_device(P):
    def work(comm):
        flat = torch.arange(100.0) + comm.rank
        outcome = aggregate(DeviceDenseAggregator(comm), flat, 1.0)
        bad = torch.full((3,), float("inf")) if comm.rank == P - 1 else torch.zeros(3)
        spoilt = aggregate(DeviceDenseAggregator(comm), bad, 1.0)
        return flat, outcome.finite, outcome.picked, spoilt.finite

    for flat, finite, picked, spoilt in run(P, work):
        torch.testing.assert_close(flat, torch.arange(100.0) + (P - 1) / 2)
        assert (finite, picked, spoilt) == (True, 100, False)


def test_half_precision_sums_do_not_overflow_where_their_average_does_not():
    def work(comm):
        flat = torch.full((4,), 60_000.0, dtype=torch.float16)
        return aggregate(DeviceDenseAggregator(comm), flat, 1.0).finite, flat.tolist()

    assert run(2, work) == [(True, [60_000.0] * 4)] * 2


def test_a_half_precision_average_that_overflows_is_skipped_then_forgotten():
    def work(comm):
        aggregator = on_device(comm, 2, make_compressor("topk"))
        finite = []
        for gradient in ([60_000.0, 65_000.0], [60_000.0, 65_000.0], [1.0, 1.0], [1.0, 1.0]):
            flat = torch.tensor(gradient, dtype=torch.float16)
            finite.append(aggregate(aggregator, flat, 0.5).finite)
        return finite

    assert run(1, work) == [[True, False, True, True]]


# What the host sees.


def test_each_step_predicts_the_threshold_of_the_next():
    given = []

    class Recording(ReferenceOperations):
        def launch_topk(self, flat, residual, k, scale, threshold, workspace):
            given.append(threshold)
            return super().launch_topk(flat, residual, k, scale, threshold, workspace)

    def work(comm):
        aggregator = on_device(comm, 100, make_compressor("gtopk"), operations=Recording())
        for _ in range(2):
            aggregate(aggregator, torch.arange(100.0), 0.1)
        aggregate(aggregator, torch.arange(100.0), 0.2)

    run(1, work)
    first, second, other_k = given
    assert first == other_k == 0.0  # nothing is known yet
    assert second == pytest.approx(90 * 0.95)


@pytest.mark.parametrize(
    ("compressor", "P", "expected"),
    [
        ("gtopk", 8, 3 * (8 * 20 + 8)),
        ("topk", 4, 3 * (8 * 20 + 8)),
        ("gaussiank", 4, 3 * (8 * 27 + 8)),  # room for the most it may select, 4/3 k + 1
        ("randomk", 4, 2 * 3 * (4 * 20 + 8 * 4) // 4),
        ("none", 4, 2 * 3 * (4 * 1000 + 8 * 4) // 4),
    ],
)
def test_bytes_are_those_of_the_table_with_vectors_at_their_capacity(compressor, P, expected):
    kind = make_compressor(compressor)

    def work(comm):
        comm.connect()
        aggregator = on_device(comm, 1000, kind)
        return aggregate(aggregator, gradients(comm.rank, 0, 1000, P), 0.02).bytes_sent

    assert run(P, work) == [expected] * P


def test_outcomes_tell_when_the_device_was_at_what():
    def work(comm):
        outcome = aggregate(on_device(comm, 500, make_compressor("gtopk")), torch.randn(500), 0.1)
        return 0 <= outcome.select_seconds < 10 and 0 <= outcome.ended - outcome.started < 10

    assert run(2, work) == [True, True]


# Faults.


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_ranks_that_are_out_of_step_are_told(compressor):
    def work(comm):
        comm.connect()
        comm.label = 7 if comm.rank == 1 else 5
        aggregator = on_device(comm, 50, make_compressor(compressor))
        aggregate(aggregator, torch.randn(50), 0.1)

    with pytest.raises(CommunicationError, match=r"rank . is at message group .*out of step"):
        run(3, work)


def test_a_rank_that_stays_away_ends_the_step_at_its_deadline():
    def work(comm):
        comm.connect()
        aggregator = on_device(comm, 50, make_compressor("gtopk"))
        if comm.rank:
            aggregate(aggregator, torch.randn(50), 0.1)

    with pytest.raises(DeadlineError, match=r"rank . of 4 waits for the gradients of the other"):
        run(4, work, FakeNccl(patience=0.05), timeout=0.3)


def test_a_second_half_without_a_first_is_refused():
    def work(comm):
        on_device(comm, 5, make_compressor("gtopk")).apply(torch.zeros(5))

    with pytest.raises(ddl.DDLError, match="expected one begin"):
        run(1, work)


def test_a_compressor_without_a_form_for_devices_is_refused():
    def work(comm):
        on_device(comm, 5, make_compressor("gtopk", "tree"))

    with pytest.raises(ValueError, match="'tree' and wire 'plain' has no form that stays"):
        run(1, work)


def test_device_aggregators_are_aggregators():
    """Their outcome does not depend on which of the two makes it."""

    def work(comm):
        dense = [DeviceDenseAggregator(comm), DenseAggregator(comm)]
        sparse = [
            on_device(comm, 40, make_compressor("topk")),
            SparseAggregator(comm, 40, CPU, make_compressor("topk"), seed=0),
        ]
        assert isinstance(sparse[0], DeviceAggregator)
        flats = [torch.arange(40.0) for _ in range(4)]
        pairs = zip([*dense, *sparse], flats, strict=True)
        outcomes = [aggregate(aggregator, flat, 0.2) for aggregator, flat in pairs]
        assert torch.equal(flats[0], flats[1]) and torch.equal(flats[2], flats[3])
        return [(outcome.finite, outcome.picked) for outcome in outcomes]

    assert run(2, work) == [[(True, 40), (True, 40), (True, 8), (True, 8)]] * 2


def test_a_case_is_the_same_on_both_ways():
    """The laws' cases have entries that cancel, tie and are zero."""
    case = Case(numel=50, density=0.2, correlation=0.5, spread=1, seed=3)

    def by_host(comm):
        aggregator = SparseAggregator(comm, 50, CPU, make_compressor("gtopk"), seed=0)
        flat = case.gradient(comm.rank)
        aggregate(aggregator, flat, case.density)
        return flat.tolist(), aggregator.residual.tolist()

    def by_device(comm):
        aggregator = on_device(comm, 50, make_compressor("gtopk"), operations=emulated())
        flat = case.gradient(comm.rank)
        aggregate(aggregator, flat, case.density)
        return flat.tolist(), aggregator.residual.tolist()

    assert run(5, by_device) == threads.run(5, by_host)
