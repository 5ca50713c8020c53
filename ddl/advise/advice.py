"""The recommendation: one candidate, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddl.advise.candidates import Candidate
from ddl.advise.predictions import Prediction

NEAR = 1.03  # times the shortest: neither predictions nor measurements tell these apart
# What they leave to later steps, least first.
LEAVES_LEAST_FIRST = ("all-reduce", "all-gather", "exact", "butterfly", "tree")


Measured = Mapping[Candidate, tuple[float, float]]


@dataclass(frozen=True)
class Advice:
    """What to take.

    Attributes:
        best: the prediction of the recommended candidate.
        by_prediction: the prediction of the candidate that predictions alone would recommend.
        sentence: for people.
    """

    best: Prediction
    by_prediction: Prediction
    sentence: str


class _Known(NamedTuple):
    """A candidate, and what its step takes as far as that is known."""

    prediction: Prediction
    seconds: float

    @property
    def candidate(self) -> Candidate:
        return self.prediction.candidate


def advise(predictions: Sequence[Prediction], measured: Measured | None = None) -> Advice:
    """Recommend the fastest; of those at most 3 % slower, what leaves least to later steps.

    Random-k is not recommended unless it is alone.

    Args:
        predictions: at least one.
        measured: seconds of real steps, and their spread, by candidate. Where all candidates have
            them they decide, and predictions do not.
    """
    if not measured or any(p.candidate not in measured for p in predictions):
        measured = {}
    predicted = [_Known(p, p.seconds) for p in predictions]
    by_prediction = _choose(predicted).prediction
    if not measured:
        known = predicted
    else:
        known = [_Known(p, measured[p.candidate][0]) for p in predictions]
    best = _choose(known)
    sentence = _sentence(best, known)
    if by_prediction is not best.prediction:
        sentence += (
            f" That is by measurement; predictions alone would have said "
            f"{by_prediction.candidate.label}."
        )
    return Advice(best.prediction, by_prediction, sentence)


def _choose(known: Sequence[_Known]) -> _Known:
    eligible = _eligible(known)
    limit = NEAR * min(row.seconds for row in eligible)
    return min(
        (row for row in eligible if row.seconds <= limit),
        key=lambda row: (LEAVES_LEAST_FIRST.index(row.candidate.collective), row.seconds),
    )


def _eligible(known: Sequence[_Known]) -> Sequence[_Known]:
    return [row for row in known if row.candidate.is_advisable] or known


def _sentence(best: _Known, known: Sequence[_Known]) -> str:
    if best.prediction.P == 1 and best.candidate.is_dense:
        return "Stay dense: a single worker sends nothing."
    label = best.candidate.label
    if best.candidate.is_dense:
        rivals = [row for row in _eligible(known) if not row.candidate.is_dense]
        rival = min(rivals, key=lambda row: row.seconds, default=None)
        if rival is None:
            return "Stay dense."
        gain = best.seconds / rival.seconds - 1
        saves = f"at most {gain:.0%}" if gain > 0 else "nothing"
        return (
            f"Stay dense: the best compressor, {rival.candidate.label}, would save {saves} of a "
            "step."
        )
    dense = next((row for row in known if row.candidate.is_dense), None)
    if dense is None:
        return f"Take {label}, the fastest of those compared."
    return (
        f"Take {label}: a step of {1e3 * best.seconds:.4g} ms instead of "
        f"{1e3 * dense.seconds:.4g} ms dense, {dense.seconds / best.seconds:.2f} times as fast."
    )
