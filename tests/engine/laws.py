"""The guarantees as bodies that every rank runs: `law(comm, case)`.

Each body takes a communicator of any kind and a case that is the same on every rank. The threads
communicator runs them in test_laws.py, mpirun in laws_under_mpirun.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ddl import kernels
from ddl.aggregation.aggregator import DenseAggregator, SparseAggregator, aggregate
from ddl.collectives import Collected, Collective, allgather, gtopk, messages
from ddl.collectives.exact import Exact
from ddl.comm import Communicator
from ddl.compressors import make_compressor
from ddl.density import entries
from ddl.sparse import Packet, SparseVector
from ddl.wires import PLAIN, WIRES, WireFormat

# Name, collective, wire, entries kept of the sum per entry picked.
SPARSE_COMPRESSORS: list[tuple[str, str | None, str | None, float | None]] = [
    ("topk", None, "plain", None),
    ("topk", None, "compact", None),
    ("gtopk", "tree", "plain", None),
    ("gtopk", "tree", "compact", None),
    ("gtopk", "butterfly", "plain", None),
    ("gtopk", "butterfly", "compact-fp16", None),
    ("gtopk", "exact", "plain", None),
    ("gtopk", "exact", "compact", 3.0),
    ("gaussiank", None, "compact-fp16", None),
    ("gaussiank-gtopk", "tree", "compact-fp16", None),
    ("gaussiank-gtopk", "butterfly", "compact", 0.5),
    ("gaussiank-gtopk", "exact", "compact-fp16", None),
    ("randomk", None, None, None),
]
EXACT_SUMS = [kind for kind in SPARSE_COMPRESSORS if kind[2] in (None, "plain")]


def exact_once(comm: Communicator, packet: Packet, k: int, wire: WireFormat = PLAIN) -> Collected:
    """The exact collective without a history."""
    return Exact()(comm, packet, k, wire)


COLLECTIVES: dict[str, Collective] = {
    "all-gather": allgather.all_gather,
    "tree": gtopk.tree,
    "butterfly": gtopk.butterfly,
    "exact": exact_once,
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


def make_aggregator(
    comm: Communicator, case: Case, kind: tuple[str, str | None, str | None, float | None]
) -> Any:
    """An aggregator as the engine makes it."""
    compressor = make_compressor(*kind)
    if compressor.is_dense:
        return DenseAggregator(comm)
    return SparseAggregator(comm, case.numel, torch.device("cpu"), compressor, seed=case.seed)


def picks_of(comm: Communicator, case: Case, step: int = 0, scale: int = 1) -> SparseVector:
    """A rank's vector: some of them have more than k entries, some less or nothing."""
    gradient = case.gradient(comm.rank, step) * scale
    k = entries(case.numel, case.density)
    mine = min(case.numel, (k * ((comm.rank + case.seed) % 4)) // 2 + comm.rank % 2)
    selection = kernels.accumulate_topk(gradient, torch.zeros_like(gradient), mine)
    return SparseVector(selection.indices, selection.values, case.numel)


def every_gradient_is_applied_or_owed(comm: Communicator, case: Case) -> None:
    """Guarantees 1 and 2, for every compressor, over steps that build up residuals."""
    for kind in SPARSE_COMPRESSORS:
        aggregator = make_aggregator(comm, case, kind)
        for step in range(3):
            flat = case.gradient(comm.rank, step)
            accumulated = total_over_ranks(comm, flat + aggregator.residual)
            outcome = aggregate(aggregator, flat, case.density)
            assert outcome.finite
            applied = (flat.double() * comm.size).round()
            owed = total_over_ranks(comm, aggregator.residual)
            assert torch.equal(applied + owed, accumulated), (kind, step)
            assert same_on_every_rank(comm, flat), (kind, step)


def what_is_included_adds_up_to_the_total(comm: Communicator, case: Case) -> None:
    """Whatever a collective says of a rank's entries is true, entry by entry, on every wire.

    Counts differ from rank to rank, and one rank may have nothing.
    """
    vector = picks_of(comm, case)
    packet = Packet(vector, finite=True)
    k = entries(case.numel, case.density)
    for name, collective in COLLECTIVES.items():
        for wire in WIRES.values():
            what = (name, wire.name)
            total, included, finite, owed = collective(comm, packet, k, wire)
            assert finite
            assert total.indices.tolist() == sorted(set(total.indices.tolist())), what
            if name == "exact" or (name != "all-gather" and comm.size > 1):
                assert total.count <= k, what
            applied = vector.where(included).to_dense()
            for lacking in owed:
                assert torch.isin(lacking.indices, total.indices).all(), what
                applied -= lacking.to_dense()
            assert torch.equal(total_over_ranks(comm, applied), total.to_dense().double()), what
            assert same_on_every_rank(comm, total.indices), what
            assert same_on_every_rank(comm, total.values), what


def exact_means_the_largest_of_the_whole_sum(comm: Communicator, case: Case) -> None:
    """The exact collective is the all-gather, cut to k; its history changes nothing.

    Gradients grow and shrink, so that predictions fail both ways; k may change between steps.
    """
    collective = Exact()
    k = entries(case.numel, case.density)
    for step, scale in enumerate((1, 1, 64, 1, 1)):
        vector = picks_of(comm, case, step, scale)
        packet = Packet(vector, finite=True)
        whole = allgather.all_gather(comm, packet, k).total
        for kept in {k, 1, case.numel} if step > 2 else {k}:
            none, nothing = whole.indices[:0], whole.values[:0]
            expected = kernels.merge(whole.indices, whole.values, none, nothing, kept)
            total, included, _, _ = collective(comm, packet, kept)
            assert torch.equal(total.indices, expected.indices), step
            assert torch.equal(total.values, expected.values), step
            assert torch.equal(included, torch.isin(vector.indices, total.indices)), step


def ranks_agree_on_any_floats(comm: Communicator, case: Case) -> None:
    """Guarantee 2 where sums round: the same bits on every rank, also for the dense average."""
    for kind in [*SPARSE_COMPRESSORS, ("none", None, None, None)]:
        flat = case.gradient(comm.rank) * 0.1
        outcome = aggregate(make_aggregator(comm, case, kind), flat, case.density)
        assert outcome.finite
        assert same_on_every_rank(comm, flat), kind


def density_one_is_the_dense_average(comm: Communicator, case: Case) -> None:
    """Guarantee 6: with everything kept, every compressor gives the average of the gradients."""
    gradient = case.gradient(comm.rank)
    average = total_over_ranks(comm, gradient) / comm.size
    for name, collective, wire, _ in EXACT_SUMS:
        flat = gradient.clone()
        aggregator = make_aggregator(comm, case, (name, collective, wire, None))
        aggregate(aggregator, flat, 1.0)
        torch.testing.assert_close(flat.double(), average, rtol=1e-6, atol=0)
        assert not aggregator.residual.any(), name


def one_bad_gradient_skips_the_step_everywhere(comm: Communicator, case: Case) -> None:
    """Guarantee 5: nothing is applied, no residual is poisoned, and what is finite is owed."""
    victim = case.seed % comm.size
    for bad in (float("nan"), float("inf")):
        for kind in SPARSE_COMPRESSORS:
            aggregator = make_aggregator(comm, case, kind)
            aggregate(aggregator, case.gradient(comm.rank), case.density)
            flat = case.gradient(comm.rank, step=1)
            finite_part = flat.clone()
            if comm.rank == victim:
                flat[case.seed % case.numel] = bad
                finite_part[case.seed % case.numel] = 0
            expected = finite_part + aggregator.residual
            outcome = aggregate(aggregator, flat, case.density)
            assert not outcome.finite, kind
            assert torch.isnan(flat).all(), kind
            assert torch.equal(aggregator.residual, expected), kind


def a_skipped_step_is_owed(comm: Communicator, case: Case) -> None:
    """What one bucket would apply in a step that another bucket spoils comes back whole."""
    for kind in SPARSE_COMPRESSORS:
        aggregator = make_aggregator(comm, case, kind)
        gradient = case.gradient(comm.rank)
        flat = gradient.clone()
        aggregator.begin(flat, case.density)
        aggregator.owe(flat)
        assert torch.equal(aggregator.residual, gradient), kind


def a_discarded_gradient_leaves_no_trace(comm: Communicator, case: Case) -> None:
    """Where the step is given up before it is applied, residuals are what they were."""
    for kind in SPARSE_COMPRESSORS:
        aggregator = make_aggregator(comm, case, kind)
        aggregate(aggregator, case.gradient(comm.rank), case.density)
        before = aggregator.residual.clone()
        flat = case.gradient(comm.rank, step=1)
        aggregator.begin(flat, case.density)
        assert torch.equal(flat, case.gradient(comm.rank, step=1)), kind
        aggregator.discard(flat)
        assert torch.equal(aggregator.residual, before), kind


def an_average_that_overflows_costs_one_step(comm: Communicator, case: Case) -> None:
    """Finite gradients whose sum is not are dropped where they overflow, not owed for ever."""
    for name, collective, wire, _ in SPARSE_COMPRESSORS:
        kind = (name, collective, wire, None)
        aggregator = make_aggregator(comm, case, kind)
        flat = torch.full((case.numel,), 3e38)
        outcome = aggregate(aggregator, flat, 1.0)
        assert outcome.finite == (comm.size == 1), kind
        for step in range(2):
            flat = case.gradient(comm.rank, step)
            assert aggregate(aggregator, flat, 1.0).finite, kind
            assert torch.isfinite(flat).all(), kind


LAWS: list[Callable[[Communicator, Case], None]] = [
    every_gradient_is_applied_or_owed,
    what_is_included_adds_up_to_the_total,
    exact_means_the_largest_of_the_whole_sum,
    ranks_agree_on_any_floats,
    density_one_is_the_dense_average,
    one_bad_gradient_skips_the_step_everywhere,
    a_skipped_step_is_owed,
    a_discarded_gradient_leaves_no_trace,
    an_average_that_overflows_costs_one_step,
]
