"""gTopKAllReduce, exactly: the k largest entries of the sum over all ranks, and nothing else cut.

Summing first and cutting last also moves less than cutting at every merge: log2(P)/2 k entries to
add up and (P-1)/P k to pass the result around, where the butterfly sends log2(P) k.

1. *Fold.* With P = 2^m + e ranks the e last hand their vectors to the e first.
2. *Reduce-scatter.* In round i = 0..m-1 rank r sends its partner r ^ 2^i the entries that are the
   partner's, by bit i of their owner's number (owners.py), and adds what it gets. Then every
   index is summed in full at its owner. The lower rank's value comes first in every sum.
3. *Gather.* Each rank offers the entries of its share that are likely to be among the k largest.
   In m rounds, the partners in reverse order, the offers are merged and cut to k. Along with them
   goes the best entry that was *not* offered. If it does not beat the worst of the k, they are the
   result. If it does, every rank offers all that do, and that gathering is the last: the k-th
   largest of a part of the entries is never above the k-th largest of all.
4. *Unfold.* The e last get the result from their partners.

What a rank offers at first decides speed only. It is at least its fair share, k/P, so that there is
a k-th largest to compare with; where some rank has less than that, a gathering of what is missing
comes in between. Beyond that it is what exceeds a prediction of the k-th magnitude, but not much
more than the fair share, so that a bad prediction costs little. Mostly one gathering is enough.

Work is O(k) on each rank in each round where shares are equal, which owners.py sees to.

Entries rank by magnitude, then by index, the lower first, as in `ddl.kernels.merge`: all zeros
are ordinary entries of magnitude 0, and sums that are not finite are the largest. An index in the
result was summed in full, so a rank's entry is included where its index is in the result. With a
wire that rounds, what is ranked are the rounded sums.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

from ddl import kernels
from ddl.collectives.collected import Collected
from ddl.collectives.owners import lengthen, owners, shorten
from ddl.collectives.rounding import Rounded, round_off
from ddl.comm import Communicator
from ddl.sparse import Packet, SparseVector
from ddl.wires import PLAIN, WireFormat

HOST = torch.device("cpu")
NOTHING = -1  # ranks below every entry
EVERYTHING = 2**63 - 1  # ranks above every entry
MAGNITUDE = 0x7FFFFFFF  # a float32 without its sign, which as an integer orders magnitudes
INFINITE = 0x7F800000


class Prediction:
    """Which entries to offer, from the k-th magnitude of the step before.

    The threshold is that magnitude times a factor, which falls after a step that took a second
    gathering and slowly rises after the others, so that about one step in 20 takes two.
    """

    STEP_DOWN, STEP_UP = 0.01, 0.0005
    FIRST_FACTOR, LOWEST_FACTOR = 0.99, 0.5

    def __init__(self) -> None:
        """Nothing known yet."""
        self._k = -1
        self._kth = 0.0
        self._factor = self.FIRST_FACTOR

    def threshold(self, k: int) -> float | None:
        """The magnitude from which on to offer entries, None if there is no basis for one."""
        return self._kth * self._factor if k == self._k else None

    def learn(self, k: int, kth: float, gatherings: int) -> None:
        """Take in a result: its k-th magnitude (0 if there were fewer entries), and its cost."""
        if k == self._k:
            step = self.STEP_UP if gatherings == 1 else -self.STEP_DOWN
            self._factor = min(1.0, max(self.LOWEST_FACTOR, self._factor + step))
        if math.isfinite(kth):
            self._k, self._kth = k, kth


class Exact:
    """The exact collective of one bucket; see `Collective`. Its state makes it faster only."""

    def __init__(self) -> None:
        """Nothing predicted yet."""
        self._prediction = Prediction()

    def __call__(
        self, comm: Communicator, packet: Packet, k: int, wire: WireFormat = PLAIN
    ) -> Collected:
        """See `Collective`. The vectors are kept on the host from first to last."""
        local = packet.vector
        device = local.values.device
        mine = SparseVector(local.indices.cpu(), local.values.cpu(), local.numel)
        journey = _Journey(comm, wire, local.numel)
        total, finite = journey.go(Packet(mine, packet.finite), k, self._prediction)
        result = _Members(total)
        on_device = SparseVector(total.indices.to(device), total.values.to(device), total.numel)
        return Collected(
            total=on_device,
            included=result.among(mine).to(device),
            finite=finite,
            owed=tuple(
                SparseVector(owed.indices.to(device), owed.values.to(device), owed.numel)
                for sent in journey.sent
                for owed in sent.owed(result.among(sent.vector))
            ),
        )


class _Journey:
    """One aggregation on one rank."""

    def __init__(self, comm: Communicator, wire: WireFormat, numel: int) -> None:
        self._comm = comm
        self._rank = comm.rank
        self._wire = wire
        self._numel = numel
        self._rounds = comm.size.bit_length() - 1
        self._core = 1 << self._rounds
        self.sent: list[Rounded] = []  # all that this rank has rounded

    def go(self, packet: Packet, k: int, prediction: Prediction) -> tuple[SparseVector, bool]:
        """Return the k largest of the sum, and whether every rank's gradient was finite."""
        comm, partner = self._comm, self._rank ^ self._core
        if partner < self._core:  # this rank is one of the e last
            comm.send(self._encode(self._rounded(packet.vector), packet.finite), partner)
            total = self._decode(comm.recv(partner))
            return total.vector, total.finite
        if partner < comm.size:
            packet = _add(packet, self._decode(comm.recv(partner)))
        share = self._reduce_scatter(packet)
        total = Packet(self._gather(share.vector, k, prediction), share.finite)
        if partner < comm.size:
            comm.send(self._encode(total.vector, total.finite), partner)
        return total.vector, total.finite

    def _reduce_scatter(self, packet: Packet) -> Packet:
        """2. The sum over all ranks of the entries that this rank owns."""
        held = packet
        for bit in range(self._rounds):
            peer = self._rank ^ (1 << bit)
            owner = owners(held.vector.indices.numpy(), self._core)
            stays = torch.from_numpy((owner ^ self._rank) & (1 << bit) == 0)
            leaving = self._rounded(held.vector.where(~stays))
            message = self._encode(leaving, held.finite, bit + 1)
            theirs = self._decode(self._comm.sendrecv(message, peer, peer), bit + 1, self._rank)
            staying = Packet(held.vector.where(stays), held.finite)
            held = _add(staying, theirs) if self._rank < peer else _add(theirs, staying)
        return held

    def _gather(self, share: SparseVector, k: int, prediction: Prediction) -> SparseVector:
        """3. The k largest entries of all shares."""
        left = self._rounded(share)
        total = _nothing_of(left)
        worst, best_left = _worst(total, k), EVERYTHING
        gatherings = 0
        while best_left > worst:
            if gatherings == 0:
                offered = _largest(left, self._first_offer(left, k, prediction))
            elif total.count < k:
                offered = _largest(left, k - total.count)
            else:
                offered = torch.from_numpy(_standing(left) > worst)
            offer, left = left.where(offered), left.where(~offered)
            gathered, best_left = self._merge_offers(offer, _best(left), k)
            total = _merge(total, gathered, k) if total.count else gathered
            worst = _worst(total, k)
            gatherings += 1
        if gatherings:
            prediction.learn(k, _magnitude(worst), gatherings)
        return total

    def _first_offer(self, share: SparseVector, k: int, prediction: Prediction) -> int:
        """How many entries to offer at first."""
        fair = -(-k // self._core)
        threshold = prediction.threshold(k)
        if threshold is None:  # mostly enough where shares are large, never much too much
            likely = fair + int(min(2 * math.sqrt(fair), fair / 8))
        else:
            likely = int((share.values.abs() >= threshold).sum())
        return min(k, max(fair, likely), fair + int(4 * math.sqrt(fair)) + 4)

    def _merge_offers(self, offer: SparseVector, best: int, k: int) -> tuple[SparseVector, int]:
        """The k largest of all ranks' offers, and the best standing of what none has offered."""
        for bit in reversed(range(self._rounds)):
            peer = self._rank ^ (1 << bit)
            note = torch.tensor([best], dtype=torch.int64).view(torch.uint8)
            message = torch.cat([note, self._encode(offer, True, bit + 1)])
            reply = self._comm.sendrecv(message, peer, peer)
            best = max(best, int(reply[:8].clone().view(torch.int64)))
            theirs = self._decode(reply[8:], bit + 1, peer)
            offer = _merge(offer, theirs.vector, k)
        return offer, best

    def _rounded(self, vector: SparseVector) -> SparseVector:
        """What arrives of a vector; what it lacks is remembered."""
        rounded = round_off(vector, self._wire)
        if rounded.lost is not None:
            self.sent.append(rounded)
        return rounded.vector

    def _encode(self, vector: SparseVector, finite: bool, bits: int = 0) -> Tensor:
        """A message of entries of whose owner `bits` bits are known."""
        indices = torch.from_numpy(shorten(vector.indices.numpy(), bits))
        short = SparseVector(indices, vector.values, vector.numel)
        return self._wire.encode(Packet(short, finite))

    def _decode(self, message: Tensor, bits: int = 0, owner: int = 0) -> Packet:
        """The packet of a message, whose entries' owners have the low `bits` bits of `owner`."""
        packet = self._wire.decode(message, self._numel, HOST)
        short = packet.vector
        indices = torch.empty_like(short.indices)
        indices.numpy()[:] = lengthen(short.indices.numpy(), bits, owner, self._core)
        return Packet(SparseVector(indices, short.values, self._numel), packet.finite)


def _add(a: Packet, b: Packet) -> Packet:
    """The sum of two packets, the lower rank's first."""
    return Packet(_merge(a.vector, b.vector, None), a.finite and b.finite)


def _merge(a: SparseVector, b: SparseVector, k: int | None) -> SparseVector:
    merged = kernels.merge(a.indices, a.values, b.indices, b.values, k)
    return SparseVector(merged.indices, merged.values, a.numel)


class _Members:
    """The indices of a vector, to ask of others whether they are among them; O(count) on average.

    A table of low bits leaves few to be searched for.
    """

    def __init__(self, vector: SparseVector) -> None:
        self._indices = vector.indices.numpy()
        self._low_bits = (1 << (8 * vector.count).bit_length()) - 1
        self._table = np.zeros(self._low_bits + 1, np.bool_)
        self._table[self._indices & self._low_bits] = True

    def among(self, vector: SparseVector) -> Tensor:
        """Which of a vector's indices are members: bool [count]."""
        indices = vector.indices.numpy()
        found = self._table[indices & self._low_bits]
        places = np.flatnonzero(found)
        likely = indices[places]
        first_not_less = np.searchsorted(self._indices, likely)
        found[places] = self._indices.take(first_not_less, mode="clip") == likely
        return torch.from_numpy(found)


def _largest(vector: SparseVector, count: int) -> Tensor:
    """The `count` entries of the best standing: bool [count of `vector`]."""
    if count >= vector.count:
        return torch.ones(vector.count, dtype=torch.bool)
    nothing = _nothing_of(vector)
    merged = kernels.merge(vector.indices, vector.values, nothing.indices, nothing.values, count)
    return merged.fate_a >= 0


def _nothing_of(vector: SparseVector) -> SparseVector:
    return SparseVector(vector.indices[:0], vector.values[:0], vector.numel)


def _standing(vector: SparseVector) -> np.ndarray:
    """The standing of entries, by magnitude and then by index, the lower better: int64 [count]."""
    magnitudes = np.minimum(vector.values.numpy().view(np.int32) & MAGNITUDE, INFINITE)
    return (magnitudes.astype(np.int64) << 31) + (MAGNITUDE - vector.indices.numpy())


def _best(vector: SparseVector) -> int:
    return int(_standing(vector).max(initial=NOTHING))


def _worst(total: SparseVector, k: int) -> int:
    """The standing that an entry must exceed to be among the k largest."""
    if total.count < k:
        return NOTHING
    return int(_standing(total).min(initial=EVERYTHING))


def _magnitude(standing: int) -> float:
    """The magnitude of an entry of that standing; 0 if it is `NOTHING`."""
    return struct.unpack("=f", struct.pack("=i", standing >> 31))[0] if standing > 0 else 0.0
