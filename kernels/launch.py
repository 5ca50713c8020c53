"""What the CUDA launch wrappers need from a device: kernels to start, memory to work in.

A driver starts kernels. The real one (ddl.kernels.nvrtc) compiles the sources with NVRTC and starts
them through CuPy; an emulated one can take its place, so that the wrappers themselves are tested
where there is no GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

THREADS = 256  # per block, of every kernel; kThreads in common.cuh
PADDING = 2**31 - 1  # the index of an entry that is none; kPadding in common.cuh

# A tensor stands for its address, None for a null pointer; a scalar must have exactly the type of
# the kernel's parameter.
Argument = Tensor | np.generic | None


class Driver(Protocol):
    """Starts the kernels of csrc on one device.

    Attributes:
        multiprocessors: how many the device has; a multiple of it fills the device.
    """

    @property
    def multiprocessors(self) -> int:
        """See the class."""

    def launch(self, source: str, kernel: str, blocks: int, arguments: Sequence[Argument]) -> None:
        """Start a kernel on torch's current stream of its tensors' device; never waits.

        Args:
            source: file in csrc, such as "merge.cu"; compiled when first used.
            kernel: an `extern "C" __global__` function in it.
            blocks: number of blocks, at least 1, of THREADS threads each.
            arguments: one for each of the kernel's parameters.

        Raises:
            RuntimeError: the source does not compile (with the compiler's log).
        """


BLOCKS_PER_MULTIPROCESSOR = 4  # resident at once: __launch_bounds__ in accumulate.cu


class Launcher:
    """Starts kernels with as many blocks as there is work for and the device can hold at once.

    Attributes:
        driver: of the device.
        most_blocks: that the device can hold.
    """

    def __init__(self, driver: Driver) -> None:
        """Use the device of `driver`."""
        self.driver = driver
        self.most_blocks = driver.multiprocessors * BLOCKS_PER_MULTIPROCESSOR

    def __call__(
        self, source: str, kernel: str, work: int, *arguments: Argument, each: int = THREADS
    ) -> None:
        """Start a kernel for so many items of work, of which a block takes `each` at a time."""
        blocks = min(self.most_blocks, max(1, -(-work // each)))
        self.driver.launch(source, kernel, blocks, arguments)


class Workspace:
    """Scratch memory on one device, reused from call to call.

    Its owner uses it on one stream at a time. Contents are undefined at the start of a call.
    """

    def __init__(self, device: torch.device) -> None:
        """Hold nothing yet."""
        self.device = device
        self._tensors: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """A tensor [numel] of undefined content, the same memory again for the same name."""
        held = self._tensors.get(name)
        if held is None or held.numel() < numel or held.dtype != dtype:
            held = torch.empty(numel, dtype=dtype, device=self.device)
            self._tensors[name] = held
        return held[:numel]


# Places in a report: int32 [REPORT_SIZE] on the device.
COUNT = 0  # entries selected or kept
NONFINITE = 1  # accumulated values that are not finite
THRESHOLD = 2  # bits of the smallest magnitude selected, 0 if nothing was
PASSED = 3  # entries that passed the predicted threshold
REPAIRED = 4  # 1 if the prediction was of no use, so that the residual was read again
REPORT_SIZE = 5


class Picks(NamedTuple):
    """A selection that stays on the device.

    Attributes:
        indices: int32 [capacity], ascending, PADDING behind the last.
        values: float32 [capacity], 0 behind the last.
        report: int32 [REPORT_SIZE], see the constants above.
    """

    indices: Tensor
    values: Tensor
    report: Tensor


class MergedOnDevice(NamedTuple):
    """A merge that stays on the device.

    Attributes:
        indices: int32 [capacity], ascending, PADDING behind the last.
        values: float32 [capacity], 0 behind the last.
        fate_a: int32 [length of a], position of each entry of a in the output, -1 where dropped;
            -1 for padding.
        fate_b: int32 [length of b], likewise for b.
        report: int32 [REPORT_SIZE], of which COUNT is set.
    """

    indices: Tensor
    values: Tensor
    fate_a: Tensor
    fate_b: Tensor
    report: Tensor
