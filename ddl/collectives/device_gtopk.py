"""The butterfly of ddl.collectives.gtopk on the device: the same merges, in the same order.

1. *Merge*: two padded vectors are added, the lower rank's first, and cut to the k largest.
2. *Fate*: composed over the merges as soon as they are enqueued, without knowing any count.

What differs is what a host knows. It cannot see how long a vector is, but how long it can be: the
capacity of what any rank holds before any round follows from P, k and the capacity of the picks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddl.collectives.device import (
    DeviceCollected,
    Padded,
    all_finite,
    finite_of,
    label_of,
    message_length,
    pack,
    survivors,
    vector_of,
)
from ddl.comm.nccl import NcclCommunicator
from ddl.kernels import CudaOperations
from ddl.kernels.launch import Picks, Workspace


def butterfly(
    comm: NcclCommunicator,
    operations: CudaOperations,
    picks: Picks,
    k: int,
    workspace: Workspace,
) -> DeviceCollected:
    """Exchange with the rank at distance 1, 2, 4, ... and compute the same merge on both sides.

    See `ddl.collectives.gtopk.butterfly` for what happens when P is no power of two, and
    `DeviceCollective` for arguments.
    """
    rank, P = comm.rank, comm.size
    capacities = _capacities(P, k, picks.indices.numel())
    core = len(capacities[0])
    held, finite = Padded(picks.indices, picks.values), all_finite(picks)
    if rank >= core:
        return _by_partner(comm, rank - core, held, finite, capacities[-1][0])

    labels: list[Tensor] = []
    peers: list[int] = []
    fates: list[Tensor] = []  # of what this rank held, merge by merge
    ward_fate = None

    def receive(peer: int, capacity: int, *, answer: bool) -> Padded:
        """Exchange messages with a peer, or only receive one, and note its header."""
        nonlocal finite
        sent = pack(comm, finite, held) if answer else None
        received = _empty_message(comm, message_length(capacity))
        comm.exchange(sent, peer, received, peer)
        finite = finite & finite_of(received)
        labels.append(label_of(received))
        peers.append(peer)
        return vector_of(received)

    if rank + core < P:
        theirs = receive(rank + core, picks.indices.numel(), answer=False)
        held, my_fate, ward_fate = _merge(operations, held, theirs, k, workspace)
        fates.append(my_fate)
    distance = 1
    for before in capacities[:-1]:
        peer = rank ^ distance
        theirs = receive(peer, before[peer], answer=True)
        if rank < peer:
            held, my_fate, _ = _merge(operations, held, theirs, k, workspace)
        else:
            held, _, my_fate = _merge(operations, theirs, held, k, workspace)
        fates.append(my_fate)
        distance *= 2

    alive = torch.ones_like(held.indices, dtype=torch.bool)
    merges_after_ward = fates[1:] if ward_fate is not None else fates
    for fate in reversed(merges_after_ward):
        alive = survivors(alive, fate)
    if ward_fate is not None:
        bits = _pack_bits(survivors(alive, ward_fate))
        comm.exchange(pack(comm, finite, held, bits), rank + core, None, rank + core)
        alive = survivors(alive, fates[0])
    return DeviceCollected(
        total=held,
        included=alive,
        finite=finite,
        labels=torch.cat(labels) if labels else finite[:0],
        peers=peers,
    )


def _by_partner(
    comm: NcclCommunicator, partner: int, vector: Padded, finite: Tensor, capacity: int
) -> DeviceCollected:
    """The part of a rank beyond the last power of two: hand in a vector, get the result back.

    Args:
        comm: the ranks.
        partner: the rank that takes part in this one's stead.
        vector: this rank's.
        finite: int32 [1].
        capacity: of the result.
    """
    count = vector.indices.numel()
    comm.exchange(pack(comm, finite, vector), partner, None, partner)
    length = message_length(capacity)
    received = _empty_message(comm, length + _words_of_bits(count))
    comm.exchange(None, partner, received, partner)
    return DeviceCollected(
        total=vector_of(received[:length]),
        included=_unpack_bits(received[length:], count),
        finite=finite_of(received),
        labels=label_of(received),
        peers=[partner],
    )


def _capacities(P: int, k: int, capacity: int) -> list[list[int]]:
    """Capacity of what each rank of the core holds: before every round, and after the last.

    Args:
        P: number of ranks; the core is the largest power of two among them.
        k: entries that a merge keeps.
        capacity: of every rank's picks.
    """
    core = 1 << (P.bit_length() - 1)
    held = [min(k, 2 * capacity) if rank + core < P else capacity for rank in range(core)]
    rounds = [held]
    distance = 1
    while distance < core:
        held = [min(k, held[rank] + held[rank ^ distance]) for rank in range(core)]
        rounds.append(held)
        distance *= 2
    return rounds


def _merge(
    operations: CudaOperations, a: Padded, b: Padded, k: int, workspace: Workspace
) -> tuple[Padded, Tensor, Tensor]:
    """The merge of two vectors, lower rank first, and the fate of the entries of each."""
    merged = operations.launch_merge(*a, *b, k, workspace)
    return Padded(merged.indices, merged.values), merged.fate_a, merged.fate_b


def _empty_message(comm: NcclCommunicator, length: int) -> Tensor:
    return torch.empty(length, dtype=torch.int32, device=comm.device)


def _words_of_bits(count: int) -> int:
    return -(-count // 32)


def _pack_bits(mask: Tensor) -> Tensor:
    """int32 [ceil(count / 32)]: a bool [count], a bit each."""
    count = mask.numel()
    padded = torch.zeros(32 * _words_of_bits(count), dtype=torch.uint8, device=mask.device)
    padded[:count] = mask
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    octets = (padded.view(-1, 8) << places).sum(1, dtype=torch.uint8)
    return octets.view(torch.int32)


def _unpack_bits(words: Tensor, count: int) -> Tensor:
    """What `_pack_bits` packed: bool [count]."""
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    bits = words.view(torch.uint8).unsqueeze(1) >> places & 1
    return bits.flatten()[:count].to(torch.bool)
