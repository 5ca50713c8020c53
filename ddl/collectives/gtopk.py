"""gTopKAllReduce: the sum of P sparse vectors, of which k entries are kept, in O(k log P) bytes.

Merging two index-sorted vectors and keeping the k largest magnitudes is the step of both forms
(Shi et al., arXiv 1901.04359, Algorithm 2); they differ in who merges with whom, and in how a rank
learns the fate of what it sent:

1. *Merge*: vectors are added pairwise, the lower rank's first so that every merger computes the
   same bits, and cut to the k largest magnitudes.
2. *Fate*: an entry that any merge on its way dropped is not in the result, even where its index
   survives through other ranks' entries. Each merge says where each of its inputs went; composed
   over the merges, that tells each rank which of its own entries the result contains.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ddl import kernels
from ddl.collectives import messages
from ddl.collectives.collected import Collected, survivors
from ddl.collectives.owners import owners
from ddl.collectives.rounding import Rounded, round_off
from ddl.comm import Communicator, frames
from ddl.sparse import Packet, SparseVector
from ddl.wires import PLAIN, WireFormat


def tree(comm: Communicator, packet: Packet, k: int, wire: WireFormat = PLAIN) -> Collected:
    """Merge up a binomial tree to rank 0, then send the result down the same tree.

    For any P: 2 ceil(log2 P) rounds, and at most 2 k entries a round on the longest path. The way
    down carries one bit an entry besides: which of the child's entries survived above it. See
    `Collective` for arguments.
    """
    rank, P = comm.rank, comm.size
    held = packet
    # Distance of a child, fate of what I held, of what it sent.
    children: list[tuple[int, Tensor, Tensor]] = []
    parent = None
    distance = 1
    while distance < P:
        if rank & distance:
            parent = rank - distance
            break
        child = rank + distance
        if child < P:
            theirs = _receive(comm, child, packet, wire)
            held, my_fate, their_fate = _merge(held, theirs, k)
            children.append((distance, my_fate, their_fate))
        distance *= 2

    # What this rank sends up it rounds; rank 0 rounds what it sends down.
    sent = round_off(held.vector, wire)
    if parent is None:
        total = Packet(sent.vector, held.finite)
        alive = torch.ones_like(held.vector.indices, dtype=torch.bool)
    else:
        comm.send(wire.encode(Packet(sent.vector, held.finite)), parent)
        result = messages.take_turn(comm, parent, distance)
        total, alive = _decode_result(result, held, wire)
    owed = sent.owed(alive)
    for below, my_fate, their_fate in reversed(children):
        result = _encode_result(total, survivors(alive, their_fate), wire)
        messages.send_in_turn(comm, result, rank + below, below)
        alive = survivors(alive, my_fate)
    return Collected(total.vector, alive, total.finite, owed)


def butterfly(comm: Communicator, packet: Packet, k: int, wire: WireFormat = PLAIN) -> Collected:
    """Exchange with the rank at distance 1, 2, 4, ... and compute the same merge on both sides.

    log2 P rounds of k entries when P is a power of two. Otherwise, with P = 2^m + e, the e last
    ranks first hand their vectors to the e first, and get the result and the fate of their entries
    back at the end. See `Collective` for arguments.

    The ranks that hold the same vector round it alike, and share out what is owed by index.
    """
    rank, P = comm.rank, comm.size
    core = 1 << (P.bit_length() - 1)
    if rank >= core:
        sent = round_off(packet.vector, wire)
        comm.send(wire.encode(Packet(sent.vector, packet.finite)), rank - core)
        total, alive = _decode_result(comm.recv(rank - core), packet, wire)
        return Collected(total.vector, alive, total.finite, sent.owed(alive))

    held = packet
    ward_fates = None  # of what this rank held, and of what its ward sent
    if rank + core < P:
        theirs = _receive(comm, rank + core, packet, wire)
        held, *ward_fates = _merge(held, theirs, k)
    rounds: list[tuple[Rounded, Tensor]] = []  # what this rank sent, and its fate in the merge
    distance = 1
    while distance < core:
        peer = rank ^ distance
        sent = round_off(held.vector, wire)
        mine = Packet(sent.vector, held.finite)
        theirs = _decode(comm.sendrecv(wire.encode(mine), peer, peer), packet, wire)
        if rank < peer:
            held, fate, _ = _merge(mine, theirs, k)
        else:
            held, _, fate = _merge(theirs, mine, k)
        rounds.append((sent, fate))
        distance *= 2

    alive = torch.ones_like(held.vector.indices, dtype=torch.bool)
    owed: tuple[SparseVector, ...] = ()
    if core < P:  # those that get the result sent must not get another one
        final = round_off(held.vector, wire)
        held = Packet(final.vector, held.finite)
        owed += _owed(final, alive, rank, core)
    for sent, fate in reversed(rounds):
        distance //= 2
        alive = survivors(alive, fate)
        owed += _owed(sent, alive, rank, distance)
    if ward_fates is not None:
        my_fate, ward_fate = ward_fates
        comm.send(_encode_result(held, survivors(alive, ward_fate), wire), rank + core)
        alive = survivors(alive, my_fate)
    return Collected(held.vector, alive, held.finite, owed)


def _owed(sent: Rounded, alive: Tensor, rank: int, holders: int) -> tuple[SparseVector, ...]:
    """This rank's share of what was rounded off a vector that several ranks hold.

    Args:
        sent: the vector.
        alive: bool [count], which of its entries are in the result.
        rank: this rank; the holders are those that differ from it in the low bits only.
        holders: how many they are, a power of two.
    """
    if sent.lost is None:
        return ()
    return sent.owed(alive & (owners(sent.vector.indices, holders) == rank % holders))


def _merge(a: Packet, b: Packet, k: int) -> tuple[Packet, Tensor, Tensor]:
    """The merge of two packets, lower rank first, and the fate of the entries of each."""
    merged = kernels.merge(a.vector.indices, a.vector.values, b.vector.indices, b.vector.values, k)
    vector = SparseVector(merged.indices, merged.values, a.vector.numel)
    return Packet(vector, a.finite and b.finite), merged.fate_a, merged.fate_b


def _decode(message: Tensor, like: Packet, wire: WireFormat) -> Packet:
    return wire.decode(message, like.vector.numel, like.vector.values.device)


def _receive(comm: Communicator, source: int, like: Packet, wire: WireFormat) -> Packet:
    return _decode(comm.recv(source), like, wire)


def _encode_result(total: Packet, alive: Tensor, wire: WireFormat) -> Tensor:
    """The result, and which of the entries that its receiver sent are in it, a bit each."""
    return frames.join([wire.encode(total), _pack_bits(alive)])


def _decode_result(message: Tensor, sent: Packet, wire: WireFormat) -> tuple[Packet, Tensor]:
    """The result, and bool [count of `sent`]: which entries of `sent` are in it."""
    total, bits = frames.split(message, 2)
    alive = _unpack_bits(bits, sent.vector.count).to(sent.vector.values.device)
    return _decode(total, sent, wire), alive


def _pack_bits(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.cpu().numpy()))


def _unpack_bits(bits: Tensor, count: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=count).view(bool))
