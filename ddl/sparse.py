"""Sparse vectors, and what of them travels between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
        if mask.device.type == "cpu":  # torch's own is several times slower
            places = torch.from_numpy(np.flatnonzero(mask.numpy()))
        else:
            places = mask.nonzero().flatten()
        return SparseVector(
            self.indices.index_select(0, places), self.values.index_select(0, places), self.numel
        )

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
