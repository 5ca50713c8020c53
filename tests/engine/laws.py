"""The guarantees as bodies that every rank runs: `law(comm, case)`.

Each body takes a communicator of any kind and a case that is the same on every rank. The threads
communicator runs them in test_laws.py, mpirun in laws_under_mpirun.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from ddl import kernels
from ddl.aggregator import DenseAggregator, SparseAggregator, aggregate
from ddl.collectives import allgather, gtopk, messages
from ddl.comm import Communicator
from ddl.compressors import make_compressor
from ddl.density import entries
from ddl.sparse import Packet, SparseVector

SPARSE_COMPRESSORS = [
    ("topk", None),
    ("gtopk", "tree"),
    ("gtopk", "butterfly"),
    ("gaussiank", None),
    ("gaussiank-gtopk", "tree"),
    ("gaussiank-gtopk", "butterfly"),
    ("randomk", None),
]
COLLECTIVES = {
    "all-gather": allgather.all_gather,
    "tree": gtopk.tree,
    "butterfly": gtopk.butterfly,
}


@dataclass(frozen=True)
class Case:
    """Gradients of all ranks: correlation * shared + (1 - correlation) * own, whole numbers."""

    numel: int
    density: float
    correlation: float
    spread: int
    """Numbers range over [-spread, spread]: a small one makes ties, zeros and cancellations."""
    seed: int

    def gradient(self, rank: int, step: int = 0) -> Tensor:
        """float32 [numel], whole numbers, small enough for exact sums."""
        shared = self._draw(f"shared {step}")
        own = self._draw(f"{rank} {step}")
        return (self.correlation * shared + (1 - self.correlation) * own).round()

    def _draw(self, what: str) -> Tensor:
        generator = torch.Generator().manual_seed(hash_of(f"{self.seed} {what}"))
        numbers = torch.randint(-self.spread, self.spread + 1, (self.numel,), generator=generator)
        return numbers.float()


def hash_of(text: str) -> int:
    """A number that is the same in every process, unlike hash()."""
    return functools.reduce(lambda number, byte: (number * 31 + byte) % 2**31, text.encode(), 7)


cases = st.builds(
    Case,
    numel=st.integers(1, 400),
    density=st.floats(0.001, 1.0),
    correlation=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    spread=st.sampled_from([1, 3, 100, 10_000]),
    seed=st.integers(0, 2**20),
)


def total_over_ranks(comm: Communicator, tensor: Tensor) -> Tensor:
    """float64 sum over ranks, the plain way."""
    parts = messages.gather_objects(comm, tensor.double().tolist())
    return torch.tensor(parts, dtype=torch.float64).sum(0)


def same_on_every_rank(comm: Communicator, tensor: Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    bits = messages.bytes_of(tensor).numpy().tobytes()
    return all(other == bits for other in messages.gather_objects(comm, bits))


def every_gradient_is_applied_or_owed(comm: Communicator, case: Case) -> None:
    """Guarantees 1 and 2, for every compressor, over steps that build up residuals."""
    for name, collective in SPARSE_COMPRESSORS:
        compressor = make_compressor(name, collective)
        device = torch.device("cpu")
        aggregator = SparseAggregator(comm, case.numel, device, compressor, seed=case.seed)
        for step in range(3):
            flat = case.gradient(comm.rank, step)
            accumulated = total_over_ranks(comm, flat + aggregator.residual)
            outcome = aggregate(aggregator, flat, case.density)
            assert outcome.finite
            applied = (flat.double() * comm.size).round()
            owed = total_over_ranks(comm, aggregator.residual)
            assert torch.equal(applied + owed, accumulated), (name, collective, step)
            assert same_on_every_rank(comm, flat), (name, collective, step)


def what_is_included_adds_up_to_the_total(comm: Communicator, case: Case) -> None:
    """Whatever a collective says of a rank's entries is true, entry by entry.

    Counts differ from rank to rank, and one rank may have nothing.
    """
    gradient = case.gradient(comm.rank)
    k = entries(case.numel, case.density)
    mine = min(case.numel, (k * (comm.rank % 3)) // 2 + comm.rank % 2)
    selection = kernels.accumulate_topk(gradient, torch.zeros_like(gradient), mine)
    vector = SparseVector(selection.indices, selection.values, case.numel)
    packet = Packet(vector, finite=True)
    for name, collective in COLLECTIVES.items():
        total, included, finite = collective(comm, packet, k)
        assert finite
        assert total.indices.tolist() == sorted(set(total.indices.tolist()))
        if name != "all-gather" and comm.size > 1:
            assert total.count <= k
        contributed = total_over_ranks(comm, vector.where(included).to_dense())
        assert torch.equal(contributed, total.to_dense().double()), name
        assert same_on_every_rank(comm, total.indices), name
        assert same_on_every_rank(comm, total.values), name


def ranks_agree_on_any_floats(comm: Communicator, case: Case) -> None:
    """Guarantee 2 where sums round: the same bits on every rank, also for the dense average."""
    for name, collective in [*SPARSE_COMPRESSORS, ("none", None)]:
        compressor = make_compressor(name, collective)
        flat = case.gradient(comm.rank) * 0.1
        if compressor.is_dense:
            outcome = aggregate(DenseAggregator(comm), flat, case.density)
        else:
            aggregator = SparseAggregator(
                comm, case.numel, torch.device("cpu"), compressor, seed=case.seed
            )
            outcome = aggregate(aggregator, flat, case.density)
        assert outcome.finite
        assert same_on_every_rank(comm, flat), name


def density_one_is_the_dense_average(comm: Communicator, case: Case) -> None:
    """Guarantee 6: with everything kept, every compressor gives the average of the gradients."""
    gradient = case.gradient(comm.rank)
    average = total_over_ranks(comm, gradient) / comm.size
    for name, collective in SPARSE_COMPRESSORS:
        flat = gradient.clone()
        aggregator = SparseAggregator(
            comm, case.numel, torch.device("cpu"), make_compressor(name, collective), case.seed
        )
        aggregate(aggregator, flat, 1.0)
        torch.testing.assert_close(flat.double(), average, rtol=1e-6, atol=0)
        assert not aggregator.residual.any(), name


def one_bad_gradient_skips_the_step_everywhere(comm: Communicator, case: Case) -> None:
    """Guarantee 5: nothing is applied, no residual is poisoned, and what is finite is owed."""
    victim = case.seed % comm.size
    for bad in (float("nan"), float("inf")):
        for name, collective in SPARSE_COMPRESSORS:
            aggregator = SparseAggregator(
                comm, case.numel, torch.device("cpu"), make_compressor(name, collective), case.seed
            )
            aggregate(aggregator, case.gradient(comm.rank), case.density)
            flat = case.gradient(comm.rank, step=1)
            finite_part = flat.clone()
            if comm.rank == victim:
                flat[case.seed % case.numel] = bad
                finite_part[case.seed % case.numel] = 0
            expected = finite_part + aggregator.residual
            outcome = aggregate(aggregator, flat, case.density)
            assert not outcome.finite, name
            assert torch.isnan(flat).all(), name
            assert torch.equal(aggregator.residual, expected), name


def a_skipped_step_is_owed(comm: Communicator, case: Case) -> None:
    """What one bucket would apply in a step that another bucket spoils comes back whole."""
    for name, collective in SPARSE_COMPRESSORS:
        aggregator = SparseAggregator(
            comm, case.numel, torch.device("cpu"), make_compressor(name, collective), case.seed
        )
        gradient = case.gradient(comm.rank)
        flat = gradient.clone()
        aggregator.begin(flat, case.density)
        aggregator.owe(flat)
        assert torch.equal(aggregator.residual, gradient), name


def a_discarded_gradient_leaves_no_trace(comm: Communicator, case: Case) -> None:
    """Where the step is given up before it is applied, residuals are what they were."""
    for name, collective in SPARSE_COMPRESSORS:
        aggregator = SparseAggregator(
            comm, case.numel, torch.device("cpu"), make_compressor(name, collective), case.seed
        )
        aggregate(aggregator, case.gradient(comm.rank), case.density)
        before = aggregator.residual.clone()
        flat = case.gradient(comm.rank, step=1)
        aggregator.begin(flat, case.density)
        assert torch.equal(flat, case.gradient(comm.rank, step=1)), name
        aggregator.discard(flat)
        assert torch.equal(aggregator.residual, before), name


def an_average_that_overflows_costs_one_step(comm: Communicator, case: Case) -> None:
    """Finite gradients whose sum is not are dropped where they overflow, not owed for ever."""
    for name, collective in SPARSE_COMPRESSORS:
        aggregator = SparseAggregator(
            comm, case.numel, torch.device("cpu"), make_compressor(name, collective), case.seed
        )
        flat = torch.full((case.numel,), 3e38)
        outcome = aggregate(aggregator, flat, 1.0)
        assert outcome.finite == (comm.size == 1), name
        for step in range(2):
            flat = case.gradient(comm.rank, step)
            assert aggregate(aggregator, flat, 1.0).finite, name
            assert torch.isfinite(flat).all(), name


LAWS: list[Callable[[Communicator, Case], None]] = [
    every_gradient_is_applied_or_owed,
    what_is_included_adds_up_to_the_total,
    ranks_agree_on_any_floats,
    density_one_is_the_dense_average,
    one_bad_gradient_skips_the_step_everywhere,
    a_skipped_step_is_owed,
    a_discarded_gradient_leaves_no_trace,
    an_average_that_overflows_costs_one_step,
]
