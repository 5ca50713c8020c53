"""A selection on a CUDA device: one pass over memory and a few small launches.

1. Predict the key of the k-th largest magnitude: the caller's threshold, or a sample (4 launches).
2. `accumulate_*`: one pass; what reaches the prediction is moved to the candidates.
3. `settle`, six phases: the exact k among the candidates; the others return to the residual. Where
   the prediction failed the same phases read the residual instead. The device decides.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ddl.kernels.keys import INFINITE
from ddl.kernels.launch import THREADS, Argument, Launcher, Workspace

SLACK = 1024  # room beyond 2k candidates, so that a tiny k does not fail all the time
SAMPLE = 1 << 17  # entries
SAMPLE_MARGIN = 4.0  # standard deviations by which a sampled rank is lowered: too low is cheaper

TILE = 4096  # kTile in selection.cuh
GROUP = 4  # kGroup in settle.cuh
_MISALIGNED = GROUP - 1  # entries at most between a 16-byte boundary and a vector
SEARCH_BYTES = 3 * 2048 * 4 + 3 * 8  # Search in settle.cuh
STATE_BYTES = 2 * SEARCH_BYTES + 8 + 2 * 4 + 2 * 6 * 4 + 4 + 4  # State in selection.cuh, padded
TILE_WORDS = 3  # Tile in selection.cuh
PHASES = 6  # of settle

SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class SelectionPass:
    """One pass over memory, and the scratch memory that its launches share.

    Attributes:
        capacity: candidates there is room for.
        blocks: of every launch that takes its share of the tiles.
        tile_count: tiles of the vector.
        state, tiles, passed, indices, values, poisoned: see selection.cuh.
    """

    def __init__(
        self,
        launcher: Launcher,
        flat: Tensor,
        residual: Tensor,
        scale: float,
        wanted: int,
        workspace: Workspace,
    ) -> None:
        """Take the scratch memory and zero the state; see `CudaOperations.launch_topk`.

        Args:
            launcher: of the device.
            flat: float32, bfloat16 or float16 [numel].
            residual: float32 [numel].
            scale: factor of flat.
            wanted: candidates that settle the selection; 0 selects nothing.
            workspace: of the same device.
        """
        self._launcher = launcher
        self._flat, self._residual = flat, residual
        self._scale = np.float32(scale)
        self._workspace = workspace
        self._numel = numel = flat.numel()
        self._wanted = wanted
        self.capacity = min(numel, 2 * wanted + SLACK) if wanted else 0
        self.tile_count = -(-(numel + _MISALIGNED) // TILE)
        self.blocks = min(launcher.most_blocks, self.tile_count)
        self.state = workspace.take("state", STATE_BYTES // 8, torch.int64).zero_()
        self.tiles = workspace.take("tiles", TILE_WORDS * self.tile_count)
        self.passed = workspace.take("passed of blocks", self.blocks)
        self.indices = workspace.take("candidate indices", self.capacity)
        self.values = workspace.take("candidate values", self.capacity, torch.float32)
        self.poisoned = workspace.take("poisoned", self.tile_count * TILE // GROUP, torch.uint8)

    def predict(self) -> int:
        """Return a key that somewhat more than `wanted` entries reach, 0 if the device knows it."""
        numel, wanted = self._numel, self._wanted
        if wanted == 0:
            return INFINITE
        if numel <= 2 * wanted + SLACK:
            return 1  # all of them fit
        size = min(numel, SAMPLE)
        rank = wanted
        if size < numel:
            expected = wanted / numel * size
            rank = math.ceil(expected + SAMPLE_MARGIN * math.sqrt(expected)) + 1
        if rank > size:
            return 1
        keys = self._workspace.take("sampled keys", size)
        launch = self._launcher
        launch(
            "accumulate.cu",
            f"sample_{SUFFIXES[self._flat.dtype]}",
            size,
            self._flat,
            self._residual,
            np.int64(numel),
            self._scale,
            keys,
            np.uint32(size),
            self.state,
        )
        for phase in (1, 2, 3):
            launch(
                "select.cu",
                "narrow",
                size if phase < 3 else 1,
                np.int32(phase),
                keys,
                np.int64(size),
                np.uint32(rank),
                self.state,
                each=THREADS * GROUP,
            )
        return 0

    def accumulate(self, least: int, quantile: float | None) -> None:
        """Run the pass; with a quantile, find the thresholds of Gaussian-k too."""
        suffix = SUFFIXES[self._flat.dtype]
        moments = None
        if quantile is not None:
            moments = self._workspace.take("moments", 2 * self.tile_count, torch.float64)
        arguments: Sequence[Argument] = (
            self._flat,
            self._residual,
            np.int64(self._numel),
            self._scale,
            np.uint32(least),
            self.state,
            self.tiles,
            np.int64(self.tile_count),
            self.passed,
            self.indices,
            self.values,
            np.uint32(self.capacity),
            self.poisoned,
            moments,
        )
        kernel = "accumulate" if moments is None else "accumulate_with_moments"
        self._launcher.driver.launch("accumulate.cu", f"{kernel}_{suffix}", self.blocks, arguments)
        if moments is not None and quantile is not None:
            of_blocks = self._workspace.take("moments of blocks", 2 * self.blocks, torch.float64)
            self._launcher(
                "moments.cu",
                "finish_moments",
                self.tile_count,
                moments,
                np.int64(self.tile_count),
                of_blocks,
                np.int64(self._numel),
                np.float64(quantile),
                self.state,
            )

    def settle(self, k: int, least: int, indices: Tensor, values: Tensor, report: Tensor) -> None:
        """Find the selection among the candidates, or where that failed in the residual.

        Args:
            k: entries asked for.
            least: the key given to `accumulate`.
            indices: int32 [wanted], output.
            values: float32 [wanted], output.
            report: int32 [REPORT_SIZE], output.
        """
        kept = self._workspace.take("kept of blocks", self.blocks, torch.int64)
        sorted_indices = self._workspace.take("sorted indices", self.capacity)
        sorted_values = self._workspace.take("sorted values", self.capacity, torch.float32)
        for phase in range(PHASES):
            arguments: Sequence[Argument] = (
                np.int32(phase),
                self._residual,
                np.int64(self._numel),
                np.uint32(k),
                np.uint32(self._wanted),
                np.uint32(least),
                self.state,
                self.tiles,
                np.int64(self.tile_count),
                self.passed,
                self.indices,
                self.values,
                np.uint32(self.capacity),
                sorted_indices,
                sorted_values,
                self.poisoned,
                kept,
                indices,
                values,
                np.int64(self._wanted),
                report,
            )
            # The blocks of the pass: each settles what it has collected.
            self._launcher.driver.launch("select.cu", "settle", self.blocks, arguments)
