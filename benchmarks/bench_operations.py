"""The measured operations: how each is called, reset, and what is its floor and its rival."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bench_gradients
import bench_rivals
import torch
from torch import Tensor

from ddl import kernels
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


@dataclass
class Measured:
    """Functions to time. `reset` runs before each, untimed; `floor` is None where there is none."""

    run: Callable[[], Outcome]
    reset: Callable[[], None]
    floor: Callable[[], Any] | None
    floor_scale: float  # by which the floor's time is multiplied, for the same bytes
    rival: Callable[[], Any] | None
    rival_name: str
    bytes_per_element: float  # that any implementation has to move
    check: Callable[[], None] = lambda: None


class Arrays:
    """Two gradients that take turns, and a residual that can be put back."""

    def __init__(self, case: Case) -> None:
        self.k = case.k
        self.floats = [
            bench_gradients.draw(case.distribution, case.numel, seed).to(case.device)
            for seed in (1, 2)
        ]
        dtype = DTYPES[case.dtype]
        self.flats = [flat.to(dtype) for flat in self.floats]
        self.before = bench_gradients.draw(case.distribution, case.numel, 3).to(case.device)
        self.residual = self.before.clone()
        self._turn = 0
        # A CUDA device's floor is a copy, 8 bytes an element.
        self._target = torch.empty_like(self.residual) if case.device != "cpu" else None

    def reset(self) -> None:
        """Put the residual back."""
        self.residual.copy_(self.before)

    @property
    def flat(self) -> Tensor:
        """The gradient of the next step."""
        self._turn += 1
        return self.flats[self._turn % 2]

    def floor(self) -> None:
        """Move the same bytes, and do nothing else."""
        if self._target is not None:
            self._target.copy_(self.residual)
        else:
            # In float32 whatever the gradient's dtype: torch's mixed add_ is slower than that.
            bench_rivals.add(self.floats[self._turn % 2], self.residual)

    def measured(
        self,
        run: Callable[[], Outcome],
        rival: Callable[[], Any] | None,
        rival_name: str,
        check: Callable[[], None] = lambda: None,
    ) -> Measured:
        """Return what is timed, with these arrays' reset and floor."""
        moved = 8.0 + self.flats[0].element_size()
        scale = 1.0 if self._target is None else moved / 8.0
        return Measured(run, self.reset, self.floor, scale, rival, rival_name, moved, check)


class TopK:
    """accumulate_topk, with the predictions of one bucket."""

    def __init__(self, k: int, prediction: str) -> None:
        self.k = k
        self._prediction = Prediction() if prediction == "last" else None

    def __call__(self, flat: Tensor, residual: Tensor) -> kernels.Selection:
        """Select, and learn from the outcome."""
        predicted = self._prediction.threshold(self.k) if self._prediction else None
        selection = kernels.accumulate_topk(flat, residual, self.k, threshold=predicted)
        if self._prediction:
            self._prediction.learn(self.k, selection)
        return selection


def _outcome(selection: kernels.Selection) -> Outcome:
    return Outcome(selection.indices.numel(), selection.candidates, selection.repaired)


def accumulate_topk(case: Case) -> Measured:
    arrays = Arrays(case)
    select = TopK(case.k, case.prediction)

    def check() -> None:
        """Compare with a full selection by torch: the same magnitudes, to the bit."""
        arrays.reset()
        flat = arrays.flat
        got = kernels.accumulate_topk(flat, arrays.residual, case.k).values.abs().sort().values
        arrays.reset()
        x = (flat.float() + arrays.residual).abs()
        expected = torch.where(torch.isfinite(x), x, 0.0).topk(case.k).values.sort().values
        expected = expected[expected > 0]
        if not torch.equal(got, expected):
            raise SystemExit(f"accumulate_topk is not exact on {case}")

    return arrays.measured(
        lambda: _outcome(select(arrays.flat, arrays.residual)),
        lambda: bench_rivals.composition(arrays.flat, arrays.residual, case.k),
        "add_, abs, topk, gather, zero",
        check,
    )


def accumulate_gaussiank(case: Case) -> Measured:
    arrays = Arrays(case)
    return arrays.measured(
        lambda: _outcome(kernels.accumulate_gaussiank(arrays.flat, arrays.residual, case.k)),
        lambda: bench_rivals.gaussiank(arrays.flat, arrays.residual, case.k),
        "published Gaussian-k",
    )


def accumulate_at(case: Case) -> Measured:
    arrays = Arrays(case)
    indices = kernels.random_indices(case.numel, case.k, 1, device=case.device)
    wide = indices.long()
    return arrays.measured(
        lambda: _outcome(kernels.accumulate_at(arrays.flat, arrays.residual, indices)),
        lambda: bench_rivals.at(arrays.flat, arrays.residual, wide),
        "add_, gather, zero",
    )


def published(case: Case) -> Measured:
    """A rule of others, in torch: for its counts."""
    arrays = Arrays(case)
    rule = {"dgc": bench_rivals.dgc, "published_gaussiank": bench_rivals.gaussiank}[case.op]
    return arrays.measured(
        lambda: Outcome(*rule(arrays.flat, arrays.residual, case.k)), None, "none"
    )


def _sparse(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    indices = kernels.random_indices(case.numel, case.k, seed, device=case.device)
    return indices, bench_gradients.draw(case.distribution, case.k, seed).to(case.device)


def merge(case: Case) -> Measured:
    """Merge and keep k; the floor is the same merge that keeps everything."""
    a, b = _sparse(case, 1), _sparse(case, 2)
    return Measured(
        run=lambda: Outcome(kernels.merge(*a, *b, k=case.k).indices.numel(), 2 * case.k),
        reset=lambda: None,
        floor=lambda: kernels.merge(*a, *b),
        floor_scale=1.0,
        rival=lambda: bench_rivals.merge(*a, *b, k=case.k),
        rival_name="unique, index_add_, topk, sort",
        bytes_per_element=math.nan,
    )


def scatter(case: Case) -> Measured:
    """Make a sparse vector dense; the floor is the zeroing alone."""
    dense = torch.empty(case.numel, dtype=DTYPES[case.dtype], device=case.device)
    indices, values = _sparse(case, 1)
    wide = indices.long()

    def run() -> Outcome:
        kernels.scatter(dense, indices, values)
        return Outcome(case.k, case.k)

    return Measured(
        run=run,
        reset=lambda: None,
        floor=dense.zero_,
        floor_scale=1.0,
        rival=lambda: bench_rivals.scatter(dense, wide, values),
        rival_name="zero_, index_put_",
        bytes_per_element=dense.element_size(),
    )


OPERATIONS: dict[str, Callable[[Case], Measured]] = {
    "accumulate_topk": accumulate_topk,
    "accumulate_gaussiank": accumulate_gaussiank,
    "accumulate_at": accumulate_at,
    "merge": merge,
    "scatter": scatter,
    "dgc": published,
    "published_gaussiank": published,
}
PREDICTED = ("accumulate_topk",)  # operations that a prediction makes faster
SELECTING = ("accumulate_topk", "accumulate_gaussiank", "dgc", "published_gaussiank")
