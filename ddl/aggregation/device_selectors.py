"""The selectors of ddl.selectors as launches: what they pick stays on the device, uncounted.

The same picks to the bit. What a selection tells the next one (the prediction of a threshold)
comes a step late, in the report that the aggregator reads at the end of each step anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ddl.kernels import CudaOperations, Selection
from ddl.kernels.keys import magnitude_of
from ddl.kernels.launch import NONFINITE, PASSED, REPAIRED, THRESHOLD, Picks, Workspace
from ddl.selectors import GaussianK, Prediction, RandomK, Selector, TopK


class DeviceSelector(Protocol):
    """Chooses entries of one bucket, step after step, without leaving the device."""

    def launch(
        self,
        operations: CudaOperations,
        flat: Tensor,
        residual: Tensor,
        k: int,
        workspace: Workspace,
    ) -> Picks:
        """As `Selector.select` with scale 1, on the current stream; the host waits for nothing."""

    def learn(self, k: int, picks: Picks, report: Sequence[int]) -> None:
        """Take in the outcome of the last launch; `report` is that of `picks`, on the host."""


class LaunchedTopK:
    """See `ddl.selectors.TopK`."""

    def __init__(self) -> None:
        """Without a prediction for the first selection."""
        self._prediction = Prediction()

    def launch(
        self,
        operations: CudaOperations,
        flat: Tensor,
        residual: Tensor,
        k: int,
        workspace: Workspace,
    ) -> Picks:
        """See `DeviceSelector.launch`."""
        threshold = self._prediction.threshold(k) or 0.0
        return operations.launch_topk(flat, residual, k, 1.0, threshold, workspace)

    def learn(self, k: int, picks: Picks, report: Sequence[int]) -> None:
        """See `DeviceSelector.learn`."""
        selection = Selection(
            indices=picks.indices,
            values=picks.values,
            finite=report[NONFINITE] == 0,
            threshold=magnitude_of(report[THRESHOLD]),
            candidates=min(report[PASSED], 2 * k),
            repaired=bool(report[REPAIRED]),
        )
        self._prediction.learn(k, selection)


class LaunchedGaussianK:
    """See `ddl.selectors.GaussianK`."""

    def launch(
        self,
        operations: CudaOperations,
        flat: Tensor,
        residual: Tensor,
        k: int,
        workspace: Workspace,
    ) -> Picks:
        """See `DeviceSelector.launch`."""
        if k == flat.numel():  # as GaussianK does: everything is wanted
            return operations.launch_topk(flat, residual, k, 1.0, 0.0, workspace)
        return operations.launch_gaussiank(flat, residual, k, 1.0, workspace)

    def learn(self, k: int, picks: Picks, report: Sequence[int]) -> None:
        """Each selection finds its own threshold."""


class LaunchedRandomK:
    """See `ddl.selectors.RandomK`."""

    def __init__(self, draws: RandomK) -> None:
        """`draws`: whose sequence of seeds to go on with."""
        self.draws = draws

    def launch(
        self,
        operations: CudaOperations,
        flat: Tensor,
        residual: Tensor,
        k: int,
        workspace: Workspace,
    ) -> Picks:
        """See `DeviceSelector.launch`."""
        seed = self.draws.next_seed()
        indices = operations.launch_random_indices(flat.numel(), k, seed, flat.device)
        return operations.launch_at(flat, residual, indices, 1.0, workspace)

    def learn(self, k: int, picks: Picks, report: Sequence[int]) -> None:
        """Draws do not depend on gradients."""


def launched(selector: Selector) -> DeviceSelector | None:
    """The form of a selector that stays on the device; None where it has none."""
    if isinstance(selector, TopK):
        return LaunchedTopK()
    if isinstance(selector, GaussianK):
        return LaunchedGaussianK()
    if isinstance(selector, RandomK):
        return LaunchedRandomK(selector)
    return None
