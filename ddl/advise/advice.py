"""The recommendation: one candidate, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddl.advise.predictions import Prediction

NEAR = 1.03  # times the shortest: predictions do not tell these apart
# What they leave to later steps, least first.
LEAVES_LEAST_FIRST = ("all-reduce", "all-gather", "exact", "butterfly", "tree")


@dataclass(frozen=True)
class Advice:
    """What to take.

    Attributes:
        best: the prediction of the recommended candidate.
        sentence: for people.
    """

    best: Prediction
    sentence: str


def advise(predictions: Sequence[Prediction]) -> Advice:
    """Recommend the fastest; of those at most 3 % slower, what leaves least to later steps.

    Random-k is not recommended unless it is alone.

    Args:
        predictions: at least one.
    """
    eligible = [p for p in predictions if p.candidate.is_advisable] or list(predictions)
    limit = NEAR * min(p.seconds for p in eligible)
    best = min(
        (p for p in eligible if p.seconds <= limit),
        key=lambda p: (LEAVES_LEAST_FIRST.index(p.candidate.collective), p.seconds),
    )
    dense = next((p for p in predictions if p.candidate.is_dense), None)
    rivals = [p for p in eligible if not p.candidate.is_dense]
    rival = min(rivals, key=lambda p: p.seconds, default=None)
    if best.P == 1 and best.candidate.is_dense:
        return Advice(best, "Stay dense: a single worker sends nothing.")
    if best.candidate.is_dense:
        why = ""
        if rival is not None:
            gain = best.seconds / rival.seconds - 1
            saves = f"at most {gain:.0%}" if gain > 0 else "nothing"
            why = f": the best compressor, {rival.candidate.label}, would save {saves} of a step"
        return Advice(best, f"Stay dense{why}.")
    label = best.candidate.label
    if dense is None:
        return Advice(best, f"Take {label}, the fastest of those compared.")
    return Advice(
        best,
        f"Take {label}: a step of {1e3 * best.seconds:.4g} ms instead of "
        f"{1e3 * dense.seconds:.4g} ms dense, {dense.seconds / best.seconds:.2f} times as fast.",
    )
