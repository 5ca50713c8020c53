"""A device, and the CUDA operations on it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddl.kernels import CudaOperations
from ddl.kernels.launch import Workspace


@dataclass(frozen=True)
class Place:
    """A device, and the CUDA operations on it.

    Attributes:
        device: the GPU, or the CPU for the emulator.
        operations: what is tested.
        longest: entries of the longest vectors that are quick enough there.
    """

    device: torch.device
    operations: CudaOperations
    longest: int

    def workspace(self) -> Workspace:
        return Workspace(self.device)

    def put(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Copy all tensors to the device."""
        return {
            name: value.to(self.device, copy=True) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
