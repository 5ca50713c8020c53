"""The exact collective: the true top-k of the sum, in few bytes and rounds, on any P."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import backward, digests_equal, make_model, train, wrap

import ddl
from ddl import kernels
from ddl.aggregation.aggregator import SparseAggregator, aggregate
from ddl.collectives import allgather, gtopk
from ddl.collectives.exact import Exact
from ddl.collectives.owners import lengthen, owners, shorten
from ddl.comm import SingleCommunicator, threads
from ddl.compressors import make_compressor
from ddl.sparse import Packet, SparseVector
from ddl.wires import COMPACT, PLAIN, WIRES

POWERS_OF_TWO = [2, 4, 8, 16, 32]


def gradient(rank, numel, correlation=0.0, step=0):
    shared = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + 999))
    own = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))
    return correlation * shared + (1 - correlation) * own


def top(flat, k):
    selection = kernels.accumulate_topk(flat, torch.zeros_like(flat), k)
    return SparseVector(selection.indices, selection.values, flat.numel())


def vector_of(indices, values, numel):
    return SparseVector(torch.as_tensor(indices).int(), torch.as_tensor(values).float(), numel)


def bar(P):
    """Entries that a rank may send, in units of k."""
    return 1.1 * (math.log2(P) / 2 + 1)


class Messages:
    """Counts the messages of one rank."""

    def __init__(self, comm):
        self._comm, self.count = comm, 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def sendrecv(self, message, dest, source):
        self.count += 1
        return self._comm.sendrecv(message, dest, source)


# The result.


@pytest.mark.parametrize("P", range(1, 34))
def test_the_true_top_k_is_applied_and_nothing_is_lost(P):
    numel, k = 5000, 50

    def work(comm):
        history = []
        for correlation, wire in ((0.0, "plain"), (0.3, "plain"), (0.5, "plain"), (0.3, "compact")):
            compressor = make_compressor("gtopk", "exact", wire, winners_per_pick=1.0)
            aggregator = SparseAggregator(comm, numel, torch.device("cpu"), compressor, seed=0)
            for step in range(2):
                accumulated = gradient(comm.rank, numel, correlation, step)
                flat = accumulated.clone()
                accumulated += aggregator.residual
                picks = top(accumulated, k).to_dense().double()
                aggregate(aggregator, flat, k / numel)
                after = flat, aggregator.residual.clone()
                history.append((wire, accumulated.double(), picks, *after))
        return history

    for steps in zip(*threads.run(P, work), strict=True):
        wires, accumulated, picks, flats, residuals = zip(*steps, strict=True)
        applied = flats[0].nonzero().flatten()
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        if wires[0] == "plain":
            best = sum(picks).abs().topk(k).indices.sort().values
            assert torch.equal(applied, best)
        assert applied.numel() == k
        owed = sum(residual.double() for residual in residuals)
        lost = (sum(accumulated) - flats[0].double() * P - owed).abs() > 1e-5
        assert int(lost.sum()) == 0


def test_sums_are_those_of_the_all_gather_to_the_bit_where_P_is_a_power_of_two():
    numel, k, P = 20_000, 300, 8

    def work(comm):
        packet = Packet(top(gradient(comm.rank, numel, 0.5), k), True)
        return allgather.all_gather(comm, packet, k).total, Exact()(comm, packet, numel).total

    for whole, exact in threads.run(P, work):
        assert torch.equal(exact.indices, whole.indices)
        assert torch.equal(exact.values, whole.values)


def test_the_result_does_not_depend_on_what_was_predicted():
    numel, k, P = 20_000, 100, 4

    def work(comm):
        with_history, results = Exact(), []
        for step in range(6):
            packet = Packet(top(gradient(comm.rank, numel, 0.3, step) * 3.0**-step, k), True)
            pair = [collect(comm, packet, k).total for collect in (with_history, Exact())]
            results.append([(total.indices.tolist(), total.values.tolist()) for total in pair])
        return results

    for results in threads.run(P, work):
        assert all(with_history == without for with_history, without in results)


def test_indices_may_go_to_the_end_of_int32_and_no_pass_goes_over_them():
    numel = 2**31 - 1  # 8 GB, were it ever dense

    def work(comm):
        indices = [0, comm.rank + 1, 2**30 + 7, numel - 40 + comm.rank, numel - 1]
        packet = Packet(vector_of(indices, [8.0, 1.0, 4.0, 2.0, -16.0], numel), True)
        return [Exact()(comm, packet, 3, wire).total for wire in WIRES.values()]

    for totals in threads.run(5, work):
        for total in totals:
            assert total.indices.tolist() == [0, 2**30 + 7, numel - 1]
            assert total.values.tolist() == [40.0, 20.0, -80.0]


@pytest.mark.parametrize("where", ["spread", "one owner", "one rank"])
def test_ties_go_to_the_lower_index_and_cost_no_more_than_an_all_gather(where):
    P, k, numel = 8, 200, 100_000
    candidates = torch.arange(numel, dtype=torch.int32)
    if where == "one owner":
        candidates = candidates[owners(candidates, P) == 3]

    def work(comm):
        draw = torch.Generator().manual_seed(comm.rank)
        count = 0 if where == "one rank" and comm.rank else k
        indices = candidates[torch.randperm(candidates.numel(), generator=draw)[:count]]
        vector = vector_of(indices.sort().values, torch.full((count,), -0.5), numel)
        counted = Messages(comm)
        total = Exact()(counted, Packet(vector, True), k).total
        return vector, total, comm.bytes_sent, counted.count

    results = threads.run(P, work)
    sums = sum(vector.to_dense() for vector, *_ in results)
    expected = torch.sort(sums.abs(), descending=True, stable=True).indices[:k].sort().values
    for _, total, bytes_sent, rounds in results:
        assert torch.equal(total.indices.long(), expected)
        assert bytes_sent <= 8 * k * (P - 1) * (1.0 if where == "one owner" else 0.7)
        assert rounds <= 4 * math.log2(P)


def test_a_single_rank_keeps_k_too_and_none_if_none_are_wanted():
    packet = Packet(vector_of(range(20), [(-1.5) ** i for i in range(20)], 40), True)
    for k in (0, 1, 7, 30):
        total, included, _, (owed,) = Exact()(SingleCommunicator(), packet, k, COMPACT)
        assert total.indices.tolist() == list(range(max(0, 20 - k), 20))
        assert included.tolist() == [i >= 20 - k for i in range(20)]
        applied = packet.vector.where(included).to_dense()
        assert torch.equal(total.to_dense() + owed.to_dense(), applied)


def test_entries_that_cancel_are_zeros_that_come_last():
    def work(comm):
        sign = 1.0 if comm.rank % 2 else -1.0
        packet = Packet(vector_of([3, 5, 9], [sign * 7.0, 1.0, sign * 6.0], 20), True)
        return [Exact()(comm, packet, k) for k in (1, 2)]

    for one, two in threads.run(4, work):
        assert one.total.indices.tolist() == [5]
        assert one.included.tolist() == [False, True, False]
        assert two.total.indices.tolist() == [3, 5]
        assert two.total.values.tolist() == [0.0, 4.0]
        assert two.included.tolist() == [True, True, False]


# What it costs. k-th magnitudes of independent gradients, as in the bars of the README.


@pytest.fixture(scope="module")
def independent_picks():
    """Picks of 32 ranks in 3 steps: the 3000 largest of 300,000 normal numbers."""
    numel, k = 300_000, 3000
    return [[top(gradient(rank, numel, step=step), k) for rank in range(32)] for step in range(3)]


@pytest.mark.parametrize("k", [300, 1000, 3000])
@pytest.mark.parametrize("P", POWERS_OF_TWO)
def test_a_rank_sends_at_most_a_tenth_more_than_log2_P_halves_plus_one_times_k(
    P, k, independent_picks
):
    def work(comm):
        collect, sent = Exact(), []
        for step in independent_picks:
            before = comm.bytes_sent
            collect(comm, Packet(top(step[comm.rank].to_dense(), k), True), k)
            sent.append((comm.bytes_sent - before) / (8 * k))
        return sent

    for sent in zip(*threads.run(P, work), strict=True):
        assert sum(sent) / P <= bar(P)
        # With few entries chance makes some rank's share larger than its due.
        assert max(sent) <= bar(P) * (1.0 if k >= 1000 else 1.06)


@pytest.mark.parametrize("make", [Exact, lambda: gtopk.butterfly, lambda: allgather.all_gather])
def test_the_compact_wire_takes_at_most_4_3_bytes_for_every_8(make, independent_picks):
    P, k = 8, 300

    def work(comm):
        packet = Packet(top(independent_picks[0][comm.rank].to_dense(), k), True)
        for wire in (PLAIN, COMPACT):
            yield make()(comm, packet, k, wire)

    def count(comm):
        sent = []
        for _ in work(comm):
            sent.append(comm.bytes_sent)
        return sent[0], sent[1] - sent[0]

    results = threads.run(P, count)
    plain, compact = (sum(sent) for sent in zip(*results, strict=True))
    assert compact <= 4.3 / 8 * plain


@pytest.mark.parametrize("P", [4, 16])
def test_mostly_one_gathering_is_enough(P):
    """2 log2 P rounds, on gradients that drift and shrink, with what is owed added to them."""
    numel, k, steps = 20_000, 200, 60
    rounds = int(math.log2(P))
    layers = torch.logspace(-2, 0, 10).repeat_interleave(numel // 10)

    def work(comm):
        collect, counts = Exact(), []
        residual = torch.zeros(numel)
        for step in range(steps):
            flat = gradient(comm.rank, numel, 0.3, step) * layers * 0.99**step
            selection = kernels.accumulate_topk(flat, residual, k)
            vector = SparseVector(selection.indices, selection.values, numel)
            counted = Messages(comm)
            included = collect(counted, Packet(vector, True), k).included
            counts.append(counted.count)
            dropped = vector.where(~included)
            kernels.give_back(residual, dropped.indices, dropped.values)
        return counts

    (counts,) = {tuple(counts) for counts in threads.run(P, work)}
    assert set(counts) <= {2 * rounds, 3 * rounds}
    assert sum(count > 2 * rounds for count in counts[10:]) <= 0.15 * steps


# Who owns which index.


@pytest.mark.parametrize("P", [1, *POWERS_OF_TWO, 1024])
def test_every_rank_owns_one_of_any_P_neighbours(P):
    indices = torch.arange(64 * P, dtype=torch.int32)
    assert owners(indices, P).view(-1, P).sort().values.tolist() == [list(range(P))] * 64


@pytest.mark.parametrize("stride", [3, 64, 100, 4096])
def test_the_weights_of_one_input_are_spread_over_all_ranks(stride):
    column = torch.arange(4000, dtype=torch.int32) * stride + 17
    shares = torch.bincount(owners(column, 32).long(), minlength=32)
    assert shares.max() <= 1.5 * shares.float().mean()


@given(
    numbers=st.sets(st.integers(0, 2**31 - 1), max_size=50),
    bits=st.integers(0, 5),
    more=st.integers(0, 5),
)
def test_shortened_indices_ascend_and_are_found_again(numbers, bits, more):
    P = 1 << min(bits + more, 10)
    indices = torch.tensor(sorted(numbers), dtype=torch.int32)
    low = owners(indices, P) & ((1 << bits) - 1)
    for owner in range(1 << bits):
        share = indices[low == owner]
        for form in (share, share.numpy()):
            short = shorten(form, bits)
            assert (short[1:] > short[:-1]).all()
            assert (lengthen(short, bits, owner, P) == form).all()


# In the optimizer.


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("collective", ["exact", "butterfly", "tree"])
@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_ranks_end_with_the_same_bits_with_every_collective_and_wire(P, collective, wire):
    options = {"collective": collective, "wire": wire, "bucket_bytes": 200}
    models = threads.run(P, lambda comm: train(comm, **options))
    assert digests_equal(models)


def test_a_single_rank_has_nothing_to_round():
    models = []
    for wire in WIRES:
        model = make_model()
        optimizer = wrap(model, density=1.0, wire=wire, comm=SingleCommunicator())
        backward(model, 0, 0)
        optimizer.step()
        models.append(model)
    assert digests_equal(models)


def winners(comm, collective="exact", **options):
    """How many entries of the average one step applies, of 1000."""
    model = torch.nn.Linear(100, 10, bias=False)
    optimizer = wrap(model, collective=collective, **options)
    draw = torch.Generator().manual_seed(comm.rank)
    inputs, weights = torch.randn(100, generator=draw), torch.randn(10, generator=draw)
    (model(inputs) * weights).sum().backward()
    optimizer.synchronize()
    return int((model.weight.grad != 0).sum()), optimizer.metrics.density_actual


def test_the_global_density_says_how_much_of_the_sum_is_applied():
    options = {"density": 0.02, "global_density": 0.05}
    assert threads.run(4, lambda comm: winners(comm, **options)) == [(50, 0.02)] * 4


def test_twice_as_much_as_picked_is_kept_of_exact_sums_by_default():
    def kept(**options):
        return lambda comm: winners(comm, density=0.02, **options)[0]

    assert threads.run(4, kept(collective="exact")) == [40] * 4
    assert threads.run(4, kept(collective="butterfly")) == [20] * 4
    assert threads.run(7, kept(collective=None)) == [20] * 7  # a butterfly
    assert threads.run(8, kept(collective=None)) == [40] * 8  # exact
    assert threads.run(4, kept(collective="exact", global_density=0.02)) == [20] * 4


def test_the_global_density_grows_with_the_density_of_a_warm_up():
    warmup = ddl.DensityWarmup((0.1,))
    options = {"density": 0.02, "global_density": 0.05, "density_warmup": warmup}
    assert threads.run(4, lambda comm: winners(comm, **options)) == [(250, 0.1)] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wire": "zip"}, "wire must be one of plain, compact, compact-fp16, got 'zip'"),
        (
            {"compressor": "randomk", "wire": "plain"},
            "'randomk' has no choice of wire, got 'plain'",
        ),
        ({"compressor": "none", "wire": "compact"}, "'none' has no choice of wire"),
        ({"compressor": "topk", "global_density": 0.1}, "'topk' has no choice of global_density"),
        ({"global_density": 0}, "global_density must lie in (0, 1], got 0"),
        ({"global_density": "all"}, "global_density must be a number in (0, 1], got 'all'"),
        ({"compressor": "topk", "collective": "exact"}, "'topk' has no choice of collective"),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused(options, message):
    with pytest.raises(ValueError) as caught:
        wrap(make_model(), comm=SingleCommunicator(), **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("wire", ("plain", "compact"), "wire: rank 1 has compact, expected plain as on rank 0"),
        ("collective", ("exact", "tree"), "collective: rank 1 has tree, expected exact"),
        ("global_density", (0.1, 0.2), "global_density / density: rank 1 has 2.0, expected 1.0"),
    ],
)
def test_ranks_that_choose_differently_are_told(option, values, message):
    with pytest.raises(ddl.DisagreementError, match=message):
        threads.run(2, lambda comm: wrap(make_model(), **{option: values[comm.rank]}))


@pytest.mark.parametrize("P", [4, 7, 8, 9])
def test_where_none_is_chosen_the_number_of_ranks_decides(P):
    expected = make_compressor("gtopk", "exact" if P >= 8 else "butterfly")

    def after(kind):
        def work(comm):
            aggregator = SparseAggregator(comm, 500, torch.device("cpu"), kind, seed=0)
            flat = torch.randn(500, generator=torch.Generator().manual_seed(comm.rank))
            aggregate(aggregator, flat, 0.05)
            return flat

        return threads.run(P, work)[0]

    assert torch.equal(after(make_compressor("gtopk")), after(expected))
