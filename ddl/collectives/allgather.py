"""Sparse all-gather: every entry of every rank, added up. O(kP) bytes, nothing dropped."""

from __future__ import annotations

import torch

from ddl import kernels
from ddl.collectives import messages
from ddl.collectives.collected import Collected
from ddl.collectives.rounding import round_off
from ddl.comm import Communicator
from ddl.sparse import Packet, SparseVector
from ddl.wires import PLAIN, WireFormat


def all_gather(comm: Communicator, packet: Packet, k: int, wire: WireFormat = PLAIN) -> Collected:
    """The sum of all ranks' vectors, whole; `k` is not used. See `Collective`.

    A rank sends (P-1) k entries in ceil(log2 P) rounds; then each adds up the P vectors in the
    same order, pairwise, in O(k P log P) work.
    """
    local = packet.vector
    device = local.values.device
    sent = round_off(local, wire)
    message = wire.encode(Packet(sent.vector, packet.finite))
    gathered = messages.all_gather(comm, message)
    packets = [wire.decode(message, local.numel, device) for message in gathered]
    vectors = [received.vector for received in packets]
    while len(vectors) > 1:
        pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
        vectors = [_add(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    included = torch.ones(local.count, dtype=torch.bool, device=device)
    return Collected(
        total=vectors[0],
        included=included,
        finite=all(received.finite for received in packets),
        owed=sent.owed(included),
    )


def _add(a: SparseVector, b: SparseVector) -> SparseVector:
    merged = kernels.merge(a.indices, a.values, b.indices, b.values)
    return SparseVector(merged.indices, merged.values, a.numel)
