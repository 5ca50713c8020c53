"""What a sparse collective returns."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ddl.comm import Communicator
from ddl.sparse import Packet, SparseVector
from ddl.wires import PLAIN, WireFormat


class Collected(NamedTuple):
    """The outcome of a sparse collective on one rank.

    The entries that ranks had included, added up, are the total plus what ranks owe.

    Attributes:
        total: the aggregated sum over ranks, the same to the bit on every rank.
        included: bool [count of this rank's vector]: which of its entries `total` contains. An
            entry is contained whole or not at all; what is not is still owed by this rank.
        finite: whether every rank's gradient was finite; the same on every rank.
        owed: what this rank rounded away of the total on its way, to be owed by it as soon as the
            total is applied; also at indices that its own vector does not have.
    """

    total: SparseVector
    included: Tensor
    finite: bool
    owed: tuple[SparseVector, ...] = ()


class Collective(Protocol):
    """Aggregates one sparse vector per rank, for one bucket, step after step.

    Some are plain functions. Those that remember something between steps are objects, so each
    bucket has a collective of its own.
    """

    def __call__(
        self, comm: Communicator, packet: Packet, k: int, wire: WireFormat = PLAIN
    ) -> Collected:
        """Aggregate; every rank calls it with the same `k` and `wire`.

        Args:
            comm: the ranks, any number of them.
            packet: this rank's vector (any count, also 0) and whether its gradient was finite.
            k: entries to keep of the sum, for those collectives that keep a part.
            wire: the format in which vectors travel.
        """


def survivors(alive: Tensor, fate: Tensor) -> Tensor:
    """Which entries of a merge's input are alive, given which of its output are.

    Args:
        alive: bool [count of the output].
        fate: int32 [count of the input], position in the output or -1, as `kernels.merge` says.

    Returns:
        bool [count of the input].
    """
    dropped = alive.new_zeros(1)  # where a position of -1 points to
    return torch.cat([alive, dropped]).take(fate.long())
