"""The sum of sparse vectors that have the same indices on every rank: a dense one, of k values."""

from __future__ import annotations

import torch

from ddl.collectives import dense
from ddl.collectives.collected import Collected
from ddl.comm import Communicator
from ddl.sparse import Packet, SparseVector
from ddl.wires import PLAIN, WireFormat


def all_reduce(comm: Communicator, packet: Packet, k: int, wire: WireFormat = PLAIN) -> Collected:
    """The sum of all ranks' vectors, whole; `k` and `wire` are not used. See `Collective`.

    Indices need not travel: a rank sends 2 (P-1)/P (k + 1) values of 4 bytes.
    """
    local = packet.vector
    # One value more: how many ranks saw a gradient that was not finite.
    values = torch.cat([local.values, local.values.new_tensor([0.0 if packet.finite else 1.0])])
    dense.all_reduce_(comm, values)
    return Collected(
        total=SparseVector(local.indices, values[:-1], local.numel),
        included=torch.ones_like(local.indices, dtype=torch.bool),
        finite=values[-1].item() == 0.0,
    )
