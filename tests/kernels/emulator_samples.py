"""Kernels of tests/emulator/samples, run on an emulated device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import emulated
from emulator.emulated import EmulatedDriver
from torch import Tensor

needs_emulator = pytest.mark.skipif(
    emulated.missing() is not None, reason=emulated.missing() or "g++ is there"
)

SAMPLES = Path(emulated.__file__).parent / "samples"
SEEDS = range(12)
ALL = 0xFFFFFFFF


def driver(seed: int = 0, **options: Any) -> EmulatedDriver:
    return EmulatedDriver(seed, source_directory=SAMPLES, **options)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def unsigned(tensor: Tensor) -> list[int]:
    return [value & ALL for value in tensor.tolist()]
