"""The measured operations: how each is called, reset, and what is its floor and its rival."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bench_gradients
import bench_rivals
import bench_select
import torch
from bench_select import DTYPES, Case, Outcome, Select, device_operations
from torch import Tensor

from ddl import kernels
from ddl.kernels.launch import Workspace


@dataclass
class Measured:
    """Functions to time. `reset` runs before each, untimed; `floor` is None where there is none."""

    run: Callable[[], Any]
    outcome: Callable[[Any], Outcome]  # of what `run` returned; untimed
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
        select: Select,
        rival: Callable[[], Any] | None,
        rival_name: str,
        check: Callable[[], None] = lambda: None,
    ) -> Measured:
        """Return what is timed, with these arrays' reset and floor."""
        moved = 8.0 + self.flats[0].element_size()
        return Measured(
            run=lambda: select(self.flat, self.residual),
            outcome=select.outcome,
            reset=self.reset,
            floor=self.floor,
            floor_scale=1.0 if self._target is None else moved / 8.0,
            rival=rival,
            rival_name=rival_name,
            bytes_per_element=moved,
            check=check,
        )


def accumulate_topk(case: Case) -> Measured:
    arrays = Arrays(case)

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
        bench_select.TopK(case),
        lambda: bench_rivals.composition(arrays.flat, arrays.residual, case.k),
        "add_, abs, topk, gather, zero",
        check,
    )


def accumulate_gaussiank(case: Case) -> Measured:
    arrays = Arrays(case)
    return arrays.measured(
        bench_select.gaussiank(case),
        lambda: bench_rivals.gaussiank(arrays.flat, arrays.residual, case.k),
        "published Gaussian-k",
    )


def accumulate_at(case: Case) -> Measured:
    arrays = Arrays(case)
    indices = kernels.random_indices(case.numel, case.k, 1, device=case.device)
    wide = indices.long()
    return arrays.measured(
        bench_select.at(case, indices),
        lambda: bench_rivals.at(arrays.flat, arrays.residual, wide),
        "add_, gather, zero",
    )


def published(case: Case) -> Measured:
    """A rule of others, in torch: for its counts."""
    return Arrays(case).measured(bench_select.published(case), None, "none")


def _sparse(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    indices = kernels.random_indices(case.numel, case.k, seed, device=case.device)
    return indices, bench_gradients.draw(case.distribution, case.k, seed).to(case.device)


def merge(case: Case) -> Measured:
    """Merge and keep k; the floor is the same merge that keeps everything."""
    a, b = _sparse(case, 1), _sparse(case, 2)
    operations, workspace = device_operations(case.device), Workspace(torch.device(case.device))

    def keep(k: int) -> Any:
        if operations is None:
            return kernels.merge(*a, *b, k=k)
        return operations.launch_merge(*a, *b, k, workspace)

    return Measured(
        run=lambda: keep(case.k),
        outcome=lambda merged: Outcome(merged.indices.numel(), 2 * case.k),
        reset=lambda: None,
        floor=lambda: keep(2 * case.k),
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
    return Measured(
        run=lambda: kernels.scatter(dense, indices, values),  # waits for nothing on a GPU either
        outcome=lambda _: Outcome(case.k, case.k),
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
