"""The guarantees at P = 1..9 and 16, on threads; at P = 2, 3, 4 under mpirun."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import ROOT
from laws import LAWS, Case, cases

from ddl import kernels
from ddl.aggregation.aggregator import SparseAggregator, aggregate
from ddl.comm import SingleCommunicator, threads
from ddl.compressors import make_compressor
from ddl.selectors import GaussianK, Prediction, TopK
from ddl.wires import WIRES


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@settings(max_examples=25)
@given(P=st.integers(1, 9), case=cases)
def test_law_holds_on_threads(law, P, case):
    threads.run(P, lambda comm: law(comm, case))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law_holds_on_16_ranks(law):
    case = Case(numel=1000, density=0.02, correlation=0.5, spread=1000, seed=11)
    threads.run(16, lambda comm: law(comm, case))


@pytest.mark.mpi
@pytest.mark.parametrize("P", [2, 3, 4])
def test_laws_hold_under_mpirun(mpirun, P):
    done = mpirun(P, [str(ROOT / "tests" / "engine" / "laws_under_mpirun.py")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(LAWS)} laws hold on {P} ranks"


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("collective", ["tree", "butterfly", "exact"])
def test_nothing_is_lost_among_16_ranks_with_half_shared_gradients(collective, wire):
    """The setting in which the published residual rule loses 60 % of the coordinates."""
    n, k, P, correlation = 1_000_000, 1000, 16, 0.5

    def work(comm):
        shared = torch.randn(n, generator=torch.Generator().manual_seed(1))
        own = torch.randn(n, generator=torch.Generator().manual_seed(2 + comm.rank))
        flat = correlation * shared + (1 - correlation) * own
        gradient = flat.clone()
        compressor = make_compressor("gtopk", collective, wire, winners_per_pick=1.0)
        aggregator = SparseAggregator(comm, n, torch.device("cpu"), compressor, seed=0)
        aggregate(aggregator, flat, k / n)
        return gradient, flat, aggregator.residual

    results = threads.run(P, work)
    accumulated = sum(gradient.double() for gradient, _, _ in results)
    owed = sum(residual.double() for _, _, residual in results)
    applied = results[0][1].double() * P
    assert int((results[0][1] != 0).sum()) == k
    lost = (accumulated - applied - owed).abs() > 1e-5
    assert int(lost.sum()) == 0


def test_a_half_precision_average_that_overflows_is_skipped_then_forgotten():
    compressor = make_compressor("topk")
    aggregator = SparseAggregator(SingleCommunicator(), 2, torch.device("cpu"), compressor, seed=0)
    finite = []
    for gradient in ([60_000.0, 65_000.0], [60_000.0, 65_000.0], [1.0, 1.0], [1.0, 1.0]):
        flat = torch.tensor(gradient, dtype=torch.float16)
        finite.append(aggregate(aggregator, flat, 0.5).finite)
    # 60,000 is owed for the first entry; another 60,000 on top cannot be represented.
    assert finite == [True, False, True, True]


def drifting_steps(generator, steps, numel=20_000):
    """Gradients with layers of different scales that shrink, drift and jump."""
    layers = torch.logspace(-3, 0, 8).repeat_interleave(numel // 8)
    direction = torch.randn(numel, generator=generator)
    for step in range(steps):
        jump = 100.0 if step == steps // 2 else 1.0
        noise = torch.randn(numel, generator=generator)
        yield (direction + noise) * layers * 0.98**step * jump


def test_topk_stays_exact_while_its_prediction_goes_stale():
    selector, k = TopK(), 200
    residual = torch.zeros(20_000)
    for flat in drifting_steps(torch.Generator().manual_seed(0), 60):
        accumulated = flat + residual
        packet = selector.select(flat, residual, k, scale=1.0)
        order = torch.argsort(accumulated.abs(), descending=True, stable=True)[:k]
        expected = torch.sort(order).values
        assert torch.equal(packet.vector.indices.long(), expected)
        assert torch.equal(packet.vector.values, accumulated[expected])


@pytest.mark.parametrize("k", [20, 200, 2000])
def test_prediction_rarely_costs_a_second_pass(k):
    residual = torch.zeros(20_000)
    prediction, repairs = Prediction(), 0
    for flat in drifting_steps(torch.Generator().manual_seed(3), 200):
        selection = kernels.accumulate_topk(flat, residual, k, threshold=prediction.threshold(k))
        prediction.learn(k, selection)
        repairs += selection.repaired
    assert repairs <= 4


@given(seed=st.integers(0, 1000), tail=st.sampled_from([1.0, 3.0, 30.0]))
@settings(max_examples=20)
def test_gaussiank_counts_stay_bounded(seed, tail):
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(5000, generator=generator)
    flat = normal * normal.abs() ** tail  # ever heavier tails
    k = 50
    packet = GaussianK().select(flat, torch.zeros(5000), k, scale=1.0)
    assert 2 * k / 3 <= packet.vector.count <= 4 * k / 3
