"""Sparse vectors and the formats in which they travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ddl import kernels

LARGEST_NUMEL = 2**31 - 1


@dataclass(frozen=True)
class SparseVector:
    """A vector of which only some entries are stored; the others are zero.

    Attributes:
        indices: int32 [count], strictly ascending.
        values: float32 [count], on the same device.
        numel: length of the dense vector, at most 2**31 - 1 so that an index fits int32.
    """

    indices: Tensor
    values: Tensor
    numel: int

    @property
    def count(self) -> int:
        """Number of stored entries."""
        return self.indices.numel()

    def where(self, mask: Tensor) -> SparseVector:
        """The entries for which `mask` (bool [count]) is true."""
        return SparseVector(self.indices[mask], self.values[mask], self.numel)

    def to_dense(self) -> Tensor:
        """float32 [numel]."""
        dense = torch.empty(self.numel, dtype=torch.float32, device=self.values.device)
        kernels.scatter(dense, self.indices, self.values)
        return dense


@dataclass(frozen=True)
class Packet:
    """What travels: a vector, and whether all gradients behind it were finite."""

    vector: SparseVector
    finite: bool


class WireFormat(Protocol):
    """How a packet becomes bytes."""

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

    header_bytes = 8
    entry_bytes = 8

    def encode(self, packet: Packet) -> Tensor:
        """See `WireFormat.encode`."""
        vector = packet.vector
        header = torch.tensor([vector.count, packet.finite], dtype=torch.int32)
        words = torch.cat([header, vector.indices.cpu(), vector.values.cpu().view(torch.int32)])
        return words.view(torch.uint8)

    def decode(self, message: Tensor, numel: int, device: torch.device) -> Packet:
        """See `WireFormat.decode`."""
        length = message.numel()
        if length < self.header_bytes or length % 4:
            raise ValueError(f"a packet has at least 8 bytes in words of 4, got {length}")
        if message.storage_offset() % 4:  # cut out of a frame behind something of odd length
            message = message.clone()
        words = message.view(torch.int32)
        count, finite = words[:2].tolist()
        if length != self.header_bytes + self.entry_bytes * count:
            raise ValueError(
                f"a packet of {count} entries has {self.header_bytes + self.entry_bytes * count} "
                f"bytes, got {length}; are all ranks running the same version and model?"
            )
        indices, values = words[2 : 2 + count], words[2 + count :].view(torch.float32)
        return Packet(SparseVector(indices.to(device), values.to(device), numel), bool(finite))


PLAIN = PlainWire()
