"""Wire formats: how sparse vectors become bytes, and what the bytes leave out.

A format that rounds says beforehand what will arrive (`rounded`). Whoever sends owes the rest, so
that no format loses anything. That is exact, because the rest is a float32: rounding x to the
nearest number of fewer significant bits leaves a multiple of x's last place that is no larger than
x or half the coarser step, whichever is less, and so has no more significant bits than x. Where x
lies beyond the largest such number, that number arrives and the same holds for what it lacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ddl.sparse import Packet, SparseVector

HEADER_BYTES = 8


class WireFormat(Protocol):
    """How a packet becomes bytes.

    Attributes:
        name: what the user calls it.
        exact: values arrive bit by bit.
    """

    @property
    def name(self) -> str:
        """See the class."""

    @property
    def exact(self) -> bool:
        """See the class."""

    def rounded(self, vector: SparseVector) -> SparseVector:
        """What arrives of a vector: the same indices, values that `encode` keeps bit by bit.

        So does it in any part of the result. Values that are not finite stay as they are, and
        finite ones stay finite.
        """

    def encode(self, packet: Packet) -> Tensor:
        """uint8 message on the CPU."""

    def decode(self, message: Tensor, numel: int, device: torch.device) -> Packet:
        """The packet of a message; `numel` is known to both sides.

        Raises:
            ValueError: the message is not of this format.
        """


class PlainWire:
    """8 bytes an entry: a header of two int32 (count, finite), int32 indices, float32 values.

    Exact: indices to 2**31 - 1, values bit by bit.
    """

    name = "plain"
    exact = True
    header_bytes = HEADER_BYTES
    entry_bytes = 8

    def rounded(self, vector: SparseVector) -> SparseVector:
        """See `WireFormat.rounded`."""
        return vector

    def encode(self, packet: Packet) -> Tensor:
        """See `WireFormat.encode`."""
        vector = packet.vector
        header = torch.tensor([vector.count, packet.finite], dtype=torch.int32)
        words = torch.cat([header, vector.indices.cpu(), vector.values.cpu().view(torch.int32)])
        return words.view(torch.uint8)

    def decode(self, message: Tensor, numel: int, device: torch.device) -> Packet:
        """See `WireFormat.decode`."""
        message = _aligned(message, unit=4)
        words = message.view(torch.int32)
        count, finite = words[:2].tolist()
        _check_length(message, count, self.header_bytes + self.entry_bytes * count)
        indices, values = words[2 : 2 + count], words[2 + count :].view(torch.float32)
        return Packet(SparseVector(indices.to(device), values.to(device), numel), bool(finite))


class Halves(Protocol):
    """How values become 16 bits each."""

    def write(self, values: Tensor) -> tuple[Tensor, int]:
        """float32 [count] on the CPU as int16 [count] bits, and an exponent they share."""

    def read(self, bits: Tensor, exponent: int) -> Tensor:
        """float32 [count] from what `write` returned."""


class BFloat16:
    """8 significant bits and float32's range: an error of at most 2**-8 of a value."""

    LARGEST = torch.finfo(torch.bfloat16).max

    def write(self, values: Tensor) -> tuple[Tensor, int]:
        """See `Halves.write`."""
        return _saturated(values, self.LARGEST).to(torch.bfloat16).view(torch.int16), 0

    def read(self, bits: Tensor, exponent: int) -> Tensor:
        """See `Halves.read`."""
        return bits.view(torch.bfloat16).float()


class ScaledFloat16:
    """11 significant bits: an error of at most 2**-11 of a value.

    fp16 alone has neither the range of gradients nor that of their sums. So each message is scaled
    by a power of two that brings its largest magnitude to [2**14, 2**15), where nothing overflows.
    Values of less than 2**-29 times the largest lose bits, below 2**-40 all of them.
    """

    LARGEST = (2.0 - 2.0**-10) * 2.0**127  # float32's, in 11 bits
    LARGEST_EXPONENT = 126  # 2**-126 is the smallest normal float32

    def write(self, values: Tensor) -> tuple[Tensor, int]:
        """See `Halves.write`."""
        values = _saturated(values, self.LARGEST)
        largest = float(values.abs().max()) if values.numel() else 0.0
        if not math.isfinite(largest):
            largest = float(torch.where(torch.isfinite(values), values.abs(), 0.0).max())
        fraction, binade = math.frexp(largest)
        # What rounds up to a power of two has that one's scale, so that rounding twice changes
        # nothing.
        binade += round(fraction * 2048) == 2048
        exponent = min(15 - binade, self.LARGEST_EXPONENT)
        return (values * 2.0**exponent).to(torch.float16).view(torch.int16), exponent

    def read(self, bits: Tensor, exponent: int) -> Tensor:
        """See `Halves.read`."""
        return bits.view(torch.float16).float() * 2.0**-exponent


class CompactWire:
    """4 bytes an entry: the gap to the index before in 16 bits, and the value in 16.

    A gap of 65,535 or more is written as 65,535 and follows at the end as int32, so an entry costs
    8 bytes at most: with uniform indices at density 0.001 one gap in 10**28 does, at density
    0.0001 one in 700, at 0.00001 half of them.

    The message: a header (int32 count, int16 finite, int16 exponent), uint16 gaps, 16-bit values,
    int32 long gaps. The first gap is the first index.
    """

    exact = False
    header_bytes = HEADER_BYTES
    entry_bytes = 4
    ESCAPE = 65535

    def __init__(self, name: str, halves: Halves) -> None:
        """`name`: what the user calls it; `halves`: how values are written."""
        self.name = name
        self._halves = halves

    def rounded(self, vector: SparseVector) -> SparseVector:
        """See `WireFormat.rounded`."""
        values = self._halves.read(*self._halves.write(vector.values.cpu()))
        return SparseVector(vector.indices, values.to(vector.values.device), vector.numel)

    def encode(self, packet: Packet) -> Tensor:
        """See `WireFormat.encode`."""
        indices = packet.vector.indices.cpu().numpy()
        bits, exponent = self._halves.write(packet.vector.values.cpu())
        count = indices.size
        gaps = np.diff(indices, prepend=np.zeros(1, np.int32))
        long = gaps[gaps >= self.ESCAPE]
        end = self.header_bytes + self.entry_bytes * count
        message = np.empty(end + 4 * long.size, np.uint8)
        message[:4].view(np.int32)[0] = count
        message[4:8].view(np.int16)[:] = packet.finite, exponent
        halves = message[8:end].view(np.uint16)
        np.minimum(gaps, self.ESCAPE, out=halves[:count], casting="unsafe")
        halves[count:] = bits.numpy().view(np.uint16)
        message[end:].view(np.int32)[:] = long
        return torch.from_numpy(message)

    def decode(self, message: Tensor, numel: int, device: torch.device) -> Packet:
        """See `WireFormat.decode`."""
        data = _aligned(message, unit=4).numpy()
        count = int(data[:4].view(np.int32)[0])
        finite, exponent = data[4:8].view(np.int16).tolist()
        end = self.header_bytes + self.entry_bytes * count
        halves = data[8:end].view(np.uint16)
        escaped = np.flatnonzero(halves[:count] == self.ESCAPE)
        _check_length(message, count, end + 4 * escaped.size)
        gaps = halves[:count].astype(np.int32)
        gaps[escaped] = data[end:].view(np.int32)
        indices = torch.empty(count, dtype=torch.int32)
        np.cumsum(gaps, out=indices.numpy())
        values = self._halves.read(torch.from_numpy(halves[count:].view(np.int16)), exponent)
        return Packet(SparseVector(indices.to(device), values.to(device), numel), bool(finite))


def _saturated(values: Tensor, largest: float) -> Tensor:
    """Finite values kept within [-largest, largest]; the others as they are."""
    if values.numel() == 0 or float(values.abs().max()) <= largest:  # false for NaN
        return values
    return torch.where(torch.isfinite(values), values.clamp(-largest, largest), values)


def _aligned(message: Tensor, unit: int) -> Tensor:
    """The message at an address that is a multiple of `unit`.

    Raises:
        ValueError: it is too short for a header, or has a part of a unit at its end.
    """
    length = message.numel()
    if length < HEADER_BYTES or length % unit:
        raise ValueError(f"a packet has at least 8 bytes in words of {unit} bytes, got {length}")
    # One cut out of a frame lies where what came before it ended.
    return message.clone() if message.storage_offset() % unit else message


def _check_length(message: Tensor, count: int, expected: int) -> None:
    if count < 0 or message.numel() != expected:
        raise ValueError(
            f"a packet of {count} entries has {expected} bytes, got {message.numel()}; are all "
            "ranks running the same version, model and wire?"
        )


PLAIN = PlainWire()
COMPACT = CompactWire("compact", BFloat16())
COMPACT_FP16 = CompactWire("compact-fp16", ScaledFloat16())

WIRES: Mapping[str, WireFormat] = MappingProxyType(
    {wire.name: wire for wire in (PLAIN, COMPACT, COMPACT_FP16)}
)


def find_wire(name: str) -> WireFormat:
    """Look a wire format up.

    Raises:
        ValueError: unknown name.
    """
    if name not in WIRES:
        raise ValueError(f"wire must be one of {', '.join(WIRES)}, got {name!r}")
    return WIRES[name]
