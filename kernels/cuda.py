"""The operations on a CUDA device: launch wrappers around the kernels of csrc.

Nothing in a `launch_*` function waits for the device or reads from it, so each can be captured in a
CUDA graph. Selections and merges read the report at their end, to hand out tensors of that length.
"""

import numpy as np
import torch
from torch import Tensor

from ddl.kernels import reference
from ddl.kernels.cuda_selection import GROUP, SEARCH_BYTES, SUFFIXES, SelectionPass
from ddl.kernels.keys import INFINITE, key_of, magnitude_of
from ddl.kernels.launch import (
    COUNT,
    NONFINITE,
    PASSED,
    REPAIRED,
    REPORT_SIZE,
    THREADS,
    THRESHOLD,
    Driver,
    Launcher,
    MergedOnDevice,
    Picks,
    Workspace,
)
from ddl.kernels.results import Merged, Selection


class CudaOperations:
    """The operations of ddl.kernels on one device."""

    def __init__(self, driver: Driver) -> None:
        """Use the device of `driver`."""
        self._launcher = Launcher(driver)

    # Without synchronisation.

    def launch_topk(
        self,
        flat: Tensor,
        residual: Tensor,
        k: int,
        scale: float,
        threshold: float,
        workspace: Workspace,
    ) -> Picks:
        """`ddl.kernels.accumulate_topk` that stays on the device.

        Args:
            flat: float32, bfloat16 or float16 [numel].
            residual: float32 [numel], changed in place.
            k: entries wanted, 0 <= k <= numel; the capacity of the result.
            scale: factor of flat.
            threshold: prediction of the k-th magnitude, 0 for none.
            workspace: of the same device, used on one stream at a time.
        """
        return self._select(flat, residual, k, k, scale, threshold, None, workspace)

    def launch_gaussiank(
        self, flat: Tensor, residual: Tensor, k: int, scale: float, workspace: Workspace
    ) -> Picks:
        """`ddl.kernels.accumulate_gaussiank` that stays on the device.

        The candidates of an exact selection of 4k/3 + 1 entries decide every evaluation of the
        rule: a threshold that leaves more of them than 4k/3 is too low, whatever the exact count.
        That number is the capacity of the result. See `launch_topk` for the arguments.
        """
        numel = flat.numel()
        wanted = min(numel, 4 * k // 3 + 1) if k else 0
        quantile = reference.gaussian_quantile(k, numel) if k else None
        return self._select(flat, residual, k, wanted, scale, 0.0, quantile, workspace)

    def _select(
        self,
        flat: Tensor,
        residual: Tensor,
        k: int,
        wanted: int,
        scale: float,
        threshold: float,
        quantile: float | None,
        workspace: Workspace,
    ) -> Picks:
        pass_ = SelectionPass(self._launcher, flat, residual, scale, wanted, workspace)
        least = key_of(threshold) if threshold > 0 and wanted else pass_.predict()
        pass_.accumulate(least, quantile)
        indices, values = _vector(wanted, flat.device)
        report = torch.empty(REPORT_SIZE, dtype=torch.int32, device=flat.device)
        pass_.settle(k, least, indices, values, report)
        return Picks(indices, values, report)

    def launch_at(
        self,
        flat: Tensor,
        residual: Tensor,
        indices: Tensor,
        scale: float,
        workspace: Workspace,
    ) -> Picks:
        """`ddl.kernels.accumulate_at` that stays on the device; its report has no threshold.

        Args:
            flat: see `launch_topk`, as `residual`, `scale` and `workspace`.
            residual: see there.
            indices: int32 [count], strictly ascending, in [0, numel).
            scale: see there.
            workspace: see there.
        """
        pass_ = SelectionPass(self._launcher, flat, residual, scale, 0, workspace)
        pass_.accumulate(INFINITE, None)
        values = torch.empty(indices.numel(), dtype=torch.float32, device=flat.device)
        report = torch.zeros(REPORT_SIZE, dtype=torch.int32, device=flat.device)
        self._launcher(
            "accumulate.cu",
            "take",
            indices.numel(),
            residual,
            indices,
            values,
            np.int64(indices.numel()),
            pass_.state,
            pass_.tiles,
            pass_.poisoned,
            report,
        )
        return Picks(indices.clone(), values, report)

    def launch_merge(
        self,
        a_indices: Tensor,
        a_values: Tensor,
        b_indices: Tensor,
        b_values: Tensor,
        k: int,
        workspace: Workspace,
    ) -> MergedOnDevice:
        """`ddl.kernels.merge` that stays on the device.

        Args:
            a_indices: int32 [length of a], ascending, padded or not.
            a_values: float32 [length of a].
            b_indices: int32 [length of b], ascending, padded or not.
            b_values: float32 [length of b].
            k: entries kept at most.
            workspace: of the same device, used on one stream at a time.

        Returns:
            The sum, of capacity min(k, length of a + length of b).
        """
        a_count, b_count = a_indices.numel(), b_indices.numel()
        slots = a_count + b_count
        capacity = min(k, slots)
        device = a_indices.device
        slot_indices = workspace.take("slot indices", slots)
        slot_values = workspace.take("slot values", slots, torch.float32)
        slot_keys = workspace.take("slot keys", slots)
        slot_fates = workspace.take("slot fates", slots)
        search = workspace.take("search", SEARCH_BYTES // 8, torch.int64).zero_()
        fate_a, fate_b = torch.empty_like(a_indices), torch.empty_like(b_indices)
        self._launcher(
            "merge.cu",
            "merge_slots",
            slots,
            a_indices,
            a_values,
            np.int64(a_count),
            b_indices,
            b_values,
            np.int64(b_count),
            slot_indices,
            slot_values,
            slot_keys,
            slot_fates,
            fate_a,
            fate_b,
            search,
        )
        indices, values = _vector(capacity, device)
        report = torch.empty(REPORT_SIZE, dtype=torch.int32, device=device)
        kept = workspace.take("kept of blocks", self._launcher.most_blocks, torch.int64)
        for phase in (2, 3, 4, 5):
            self._launcher(
                "merge.cu",
                "merge_settle",
                slots,
                np.int32(phase),
                np.uint32(capacity),
                slot_indices,
                slot_values,
                slot_keys,
                slot_fates,
                np.int64(slots),
                search,
                kept,
                indices,
                values,
                np.int64(capacity),
                report,
                each=THREADS * GROUP,
            )
        self._launcher(
            "merge.cu",
            "merge_fates",
            slots,
            slot_fates,
            fate_a,
            np.int64(a_count),
            fate_b,
            np.int64(b_count),
        )
        return MergedOnDevice(indices, values, fate_a, fate_b, report)

    def launch_random_indices(self, numel: int, k: int, seed: int, device: torch.device) -> Tensor:
        """`ddl.kernels.random_indices`, without synchronisation: int32 [k]."""
        indices = torch.empty(k, dtype=torch.int32, device=device)
        self._launcher(
            "random.cu",
            "draw",
            k,
            indices,
            np.int64(k),
            np.int64(numel),
            np.uint64(seed & (2**64 - 1)),
            np.int32(reference.half_bits(numel)),
        )
        return torch.sort(indices).values

    def scatter(self, dense: Tensor, indices: Tensor, values: Tensor, scale: float) -> None:
        """See `ddl.kernels.scatter`; padding is passed over."""
        dense.zero_()
        self._launcher(
            "scatter.cu",
            f"scatter_{SUFFIXES[dense.dtype]}",
            indices.numel(),
            dense,
            np.int64(dense.numel()),
            indices,
            values,
            np.float32(scale),
            np.int64(indices.numel()),
        )

    def give_back(
        self, residual: Tensor, indices: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> None:
        """See `ddl.kernels.give_back`; padding is passed over.

        Args:
            residual: float32 [numel], changed in place.
            indices: int32 [count].
            values: float32 [count].
            mask: bool [count], which entries to give back; None for all.
        """
        self._launcher(
            "scatter.cu",
            "give_back",
            indices.numel(),
            residual,
            np.int64(residual.numel()),
            indices,
            values,
            mask,
            np.int64(indices.numel()),
        )

    # These wait for the device: what they return has the right length, and plain numbers.

    def accumulate_topk(
        self, flat: Tensor, residual: Tensor, k: int, scale: float, threshold: float
    ) -> Selection:
        """See `ddl.kernels.accumulate_topk`."""
        workspace = Workspace(flat.device)
        picks = self.launch_topk(flat, residual, k, scale, threshold, workspace)
        return _selection(picks, k)

    def accumulate_gaussiank(
        self, flat: Tensor, residual: Tensor, k: int, scale: float
    ) -> Selection:
        """See `ddl.kernels.accumulate_gaussiank`."""
        picks = self.launch_gaussiank(flat, residual, k, scale, Workspace(flat.device))
        return _selection(picks, k)

    def accumulate_at(
        self, flat: Tensor, residual: Tensor, indices: Tensor, scale: float
    ) -> Selection:
        """See `ddl.kernels.accumulate_at`."""
        picks = self.launch_at(flat, residual, indices, scale, Workspace(flat.device))
        threshold = float(picks.values.abs().min()) if picks.values.numel() else 0.0
        finite = int(picks.report[NONFINITE]) == 0
        return Selection(
            picks.indices, picks.values, finite, threshold, indices.numel(), repaired=False
        )

    def random_indices(self, numel: int, k: int, seed: int, device: torch.device) -> Tensor:
        """See `ddl.kernels.random_indices`."""
        return self.launch_random_indices(numel, k, seed, device)

    def merge(
        self,
        a_indices: Tensor,
        a_values: Tensor,
        b_indices: Tensor,
        b_values: Tensor,
        k: int | None,
    ) -> Merged:
        """See `ddl.kernels.merge`."""
        most = a_indices.numel() + b_indices.numel()
        workspace = Workspace(a_indices.device)
        merged = self.launch_merge(
            a_indices, a_values, b_indices, b_values, most if k is None else k, workspace
        )
        count = int(merged.report[COUNT])
        return Merged(merged.indices[:count], merged.values[:count], merged.fate_a, merged.fate_b)


def _vector(capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    indices = torch.empty(capacity, dtype=torch.int32, device=device)
    return indices, torch.empty(capacity, dtype=torch.float32, device=device)


def _selection(picks: Picks, k: int) -> Selection:
    """Read the report: the one synchronisation of a selection."""
    report = picks.report.tolist()
    count = report[COUNT]
    return Selection(
        indices=picks.indices[:count],
        values=picks.values[:count],
        finite=report[NONFINITE] == 0,
        threshold=magnitude_of(report[THRESHOLD]),
        candidates=min(report[PASSED], 2 * k),
        repaired=bool(report[REPAIRED]),
    )
