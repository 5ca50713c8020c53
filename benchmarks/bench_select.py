"""The ways to select that are timed: what is called, and what is read from it afterwards.

On a GPU the timed call is the launch that waits for nothing; its outcome is read untimed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bench_rivals
import torch
from torch import Tensor

from ddl import kernels
from ddl.kernels import CudaOperations, Selection
from ddl.kernels.keys import magnitude_of
from ddl.kernels.launch import COUNT, NONFINITE, PASSED, REPAIRED, THRESHOLD, Picks, Workspace
from ddl.selectors import Prediction

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One row of the table, before it is measured."""

    op: str
    device: str
    dtype: str
    numel: int
    density: float
    distribution: str
    threads: int
    prediction: str  # "last": the last step's threshold; "none": a sample, as at the first step

    @property
    def k(self) -> int:
        """Entries to keep."""
        return max(1, round(self.density * self.numel))


@dataclass
class Outcome:
    """What one call did, for the columns that are not times."""

    count: int
    passed: int
    repaired: bool = False


def device_operations(device: str) -> CudaOperations | None:
    """Return the launches that wait for nothing; None on the CPU, which has none."""
    return kernels.device_operations(torch.device(device))


class Select:
    """One way to select from a gradient and a residual."""

    def __init__(self, k: int, call: Callable[[Tensor, Tensor], Any]) -> None:
        self.k = k
        self._call = call

    def __call__(self, flat: Tensor, residual: Tensor) -> Any:
        """Select."""
        return self._call(flat, residual)

    def outcome(self, result: Any) -> Outcome:
        """Say what a call did, and learn from it."""
        if isinstance(result, Outcome):
            return result
        selection = _read(result, self.k) if isinstance(result, Picks) else result
        self._learn(selection)
        return Outcome(selection.indices.numel(), selection.candidates, selection.repaired)

    def _learn(self, selection: Selection) -> None:
        """Take in an outcome, for the next call."""


def _read(picks: Picks, k: int) -> Selection:
    report = picks.report.tolist()
    count = report[COUNT]
    return Selection(
        picks.indices[:count],
        picks.values[:count],
        finite=report[NONFINITE] == 0,
        threshold=magnitude_of(report[THRESHOLD]),
        candidates=min(report[PASSED], 2 * k),
        repaired=bool(report[REPAIRED]),
    )


class TopK(Select):
    """accumulate_topk, with the predictions of one bucket."""

    def __init__(self, case: Case) -> None:
        operations = device_operations(case.device)
        workspace = Workspace(torch.device(case.device))

        def select(flat: Tensor, residual: Tensor) -> Any:
            predicted = self._prediction.threshold(case.k) if self._prediction else None
            if operations is None:
                return kernels.accumulate_topk(flat, residual, case.k, threshold=predicted)
            return operations.launch_topk(flat, residual, case.k, 1.0, predicted or 0.0, workspace)

        super().__init__(case.k, select)
        self._prediction = Prediction() if case.prediction == "last" else None

    def _learn(self, selection: Selection) -> None:
        if self._prediction:
            self._prediction.learn(self.k, selection)


def gaussiank(case: Case) -> Select:
    """accumulate_gaussiank."""
    operations = device_operations(case.device)
    workspace = Workspace(torch.device(case.device))

    def select(flat: Tensor, residual: Tensor) -> Any:
        if operations is None:
            return kernels.accumulate_gaussiank(flat, residual, case.k)
        return operations.launch_gaussiank(flat, residual, case.k, 1.0, workspace)

    return Select(case.k, select)


def at(case: Case, indices: Tensor) -> Select:
    """accumulate_at."""
    operations = device_operations(case.device)
    workspace = Workspace(torch.device(case.device))

    def select(flat: Tensor, residual: Tensor) -> Any:
        if operations is None:
            return kernels.accumulate_at(flat, residual, indices)
        operations.launch_at(flat, residual, indices, 1.0, workspace)
        return Outcome(case.k, case.k)

    return Select(case.k, select)


def published(case: Case) -> Select:
    """A rule of others, in torch."""
    rule = {"dgc": bench_rivals.dgc, "published_gaussiank": bench_rivals.gaussiank}[case.op]
    return Select(case.k, lambda flat, residual: Outcome(*rule(flat, residual, case.k)))
