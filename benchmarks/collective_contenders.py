"""What bench_collectives times: the engine's collectives, its dense all-reduce, and the rivals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from collective_rivals import MPI, published_tree
from torch import Tensor

from ddl.aggregation.aggregator import SparseAggregator, aggregate
from ddl.collectives import Collected, Collective, allgather, dense, gtopk
from ddl.collectives.auto import Auto, Chooser
from ddl.collectives.exact import Exact
from ddl.comm import Communicator
from ddl.compressors import make_compressor
from ddl.links import measure_links
from ddl.sparse import Packet, SparseVector
from ddl.wires import WIRES, WireFormat

# The engine's sparse collectives, and how one is made for a bucket; some remember things.
ENGINE: dict[str, Callable[[Communicator, WireFormat], Collective]] = {
    "auto": lambda comm, wire: Auto(Chooser(measure_links(comm, wire=wire))),
    "exact": lambda comm, wire: Exact(),
    "butterfly": lambda comm, wire: gtopk.butterfly,
    "tree": lambda comm, wire: gtopk.tree,
    "all-gather": lambda comm, wire: allgather.all_gather,
}
# How a gradient is aggregated in training: selection, collective, residual, average.
STEPS = {f"step:{name}": name for name in ENGINE}
MPI_ONLY = ("mpi-dense", "mpi-all-gather")
RIVALS = ("published-tree", *MPI_ONLY)
ALGORITHMS = (*ENGINE, "dense", *RIVALS, *STEPS)
# In an ordinary run.
DEFAULT = (*ENGINE, *RIVALS)


@dataclass
class Contender:
    """One row before it is measured.

    Attributes:
        name: of the algorithm.
        wire: the wire's name; None where there is no choice.
        run: aggregates once; None instead of a result where nothing is cut.
        size: bytes of what a rank brings along.
        count: its entries.
        sent: bytes that a rank sends according to the standard formula, where the engine's own
            count does not see them; else None.
        chosen: after a call, which collective "auto" has taken.
        check: raises SystemExit if sums of whole gradients are wrong.
    """

    name: str
    wire: str | None
    run: Callable[[], Collected | None]
    size: int
    count: int
    sent: float | None = None
    chosen: Callable[[], str | None] = lambda: None
    check: Callable[[], None] = lambda: None

    @property
    def counted(self) -> bool:
        """Whether the engine counts what is sent."""
        return self.sent is None


@dataclass(frozen=True)
class Setting:
    """What the contenders of one table have in common."""

    numel: int
    k: int
    density: float


class Bench:
    """Makes contenders for one rank; dense ones share one buffer."""

    def __init__(self, comm: Communicator, setting: Setting, local: SparseVector) -> None:
        """`local`: this rank's picks."""
        self._comm, self._setting, self._local = comm, setting, local
        self._dense: Tensor | None = None
        self._mpi: MPI | None = None

    def contenders(self, names: list[str], wires: list[str]) -> list[Contender]:
        """All rows, in the order given; those without a choice of wire appear once."""
        made = []
        for name in names:
            if name in ENGINE or name in STEPS:
                made += [self._sparse(name, WIRES[wire]) for wire in wires]
            else:
                made.append(self._other(name))
        return made

    def _sparse(self, name: str, wire: WireFormat) -> Contender:
        local = self._local
        made = ENGINE[STEPS.get(name, name)](self._comm, wire)
        run: Callable[[], Collected | None]
        if name in STEPS:
            run = self._step(made, wire)
        else:
            packet = Packet(local, finite=True)

            def run() -> Collected:
                return made(self._comm, packet, self._setting.k, wire)

        return Contender(name, wire.name, run, 8 * local.count, local.count, chosen=self._why(made))

    def _why(self, collective: Collective) -> Callable[[], str | None]:
        """What "auto" has taken, for its row."""
        if not isinstance(collective, Auto):
            return lambda: None
        setting, chooser = self._setting, collective.chooser
        return lambda: chooser.choose(self._comm, setting.numel, setting.k).sparse

    def _step(self, collective: Collective, wire: WireFormat) -> Callable[[], None]:
        """Gradients are noise; what remains of it, zeros and the residual, costs the same."""
        compressor = replace(
            make_compressor("gtopk", wire=wire.name), make_collective=lambda: collective
        )
        numel, device = self._setting.numel, torch.device("cpu")
        aggregator = SparseAggregator(self._comm, numel, device, compressor, seed=0)
        generator = torch.Generator().manual_seed(self._comm.rank)
        flat = torch.randn(numel, generator=generator)

        def run() -> None:
            aggregate(aggregator, flat, self._setting.density)

        return run

    def _other(self, name: str) -> Contender:
        P, local, numel = self._comm.size, self._local, self._setting.numel
        if name == "published-tree":
            k = self._setting.k
            return Contender(
                name, None, lambda: published_tree(self._comm, local, k), 16 * k, local.count
            )
        if name == "dense":
            return self._whole(name, lambda whole: dense.all_reduce_(self._comm, whole), None)
        self._mpi = self._mpi or MPI()
        mpi = self._mpi
        if name == "mpi-dense":
            return self._whole(name, mpi.all_reduce_, 2 * (P - 1) / P * 4 * numel)
        size = 8 * local.count
        return Contender(
            name, None, lambda: mpi.all_gather(local), size, local.count, (P - 1) * size
        )

    def _whole(
        self, name: str, all_reduce_: Callable[[Tensor], None], sent: float | None
    ) -> Contender:
        """A dense all-reduce; of zeros, which stay what they are however often they are summed."""
        numel, P = self._setting.numel, self._comm.size
        if self._dense is None:
            self._dense = torch.zeros(numel)
        whole = self._dense

        def check() -> None:
            whole.fill_(self._comm.rank + 1)
            all_reduce_(whole)
            if not torch.all(whole == P * (P + 1) // 2):
                raise SystemExit(f"{name} gives wrong sums; its time would mean nothing")
            whole.zero_()

        return Contender(
            name, None, lambda: all_reduce_(whole), 4 * numel, numel, sent, check=check
        )
