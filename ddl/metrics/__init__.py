"""What one step cost and moved, under the names that go to JSON lines and TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddl.aggregation.aggregator import Outcome


@dataclass(frozen=True)
class StepMetrics:
    """One step of one rank.

    Attributes:
        step: aggregations before this one.
        finite: whether the step was taken; False where a gradient of any rank was not finite.
        select_seconds: selecting, summed over buckets (on the background thread).
        communicate_seconds: aggregating, summed over buckets (on the background thread).
        wait_seconds: how long the main thread waited for both.
        bytes_sent: bytes this rank sent.
        bytes_dense: bytes it would have sent, on average, in dense ring all-reduces.
        density_actual: entries selected / parameters.
        overlap_fraction: share of the communication time, the last bucket's left out, that
            passed before the backward pass ended; 0 with a single bucket.
        residual_norm: Euclidean norm of all residuals of this rank.
    """

    step: int
    finite: bool
    select_seconds: float
    communicate_seconds: float
    wait_seconds: float
    bytes_sent: int
    bytes_dense: int
    density_actual: float
    overlap_fraction: float
    residual_norm: float

    @property
    def ratio(self) -> float:
        """bytes_sent / bytes_dense; 0 where nothing needs to be sent."""
        return self.bytes_sent / self.bytes_dense if self.bytes_dense else 0.0

    def as_dict(self) -> dict[str, float]:
        """Under the names of the metrics log."""
        return {
            "time/select": self.select_seconds,
            "time/communicate": self.communicate_seconds,
            "time/wait": self.wait_seconds,
            "comm/bytes_sent": self.bytes_sent,
            "comm/bytes_dense": self.bytes_dense,
            "comm/ratio": self.ratio,
            "comm/density_actual": self.density_actual,
            "comm/overlap_fraction": self.overlap_fraction,
            "residual/norm": self.residual_norm,
        }


def overlap_fraction(outcomes: Sequence[Outcome], backward_ended: float) -> float:
    """Share of the communication time, the last bucket's left out, before `backward_ended`.

    Args:
        outcomes: in the order of launches.
        backward_ended: clock (time.perf_counter) at the last gradient.
    """
    spans = [(outcome.started, outcome.ended) for outcome in outcomes[:-1]]
    total = math.fsum(ended - started for started, ended in spans)
    hidden = math.fsum(max(0.0, min(ended, backward_ended) - started) for started, ended in spans)
    return hidden / total if total > 0 else 0.0
