"""What is kept of the steps of one optimizer on one rank: sums, the last step, a timeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ddl.metrics import RunTotals, Span, StepMetrics
from ddl.metrics.timeline import StepSpans, Track

T = TypeVar("T")


class Recorder:
    """Is told of every step by whatever aggregates the gradients.

    Attributes:
        totals: of all steps so far, see `ddl.metrics.summary`.
        track: this optimizer's part of the job's timeline; None where there is none.
    """

    def __init__(self) -> None:
        """Nothing happened yet, and there is no timeline."""
        self.totals = RunTotals()
        self.track: Track | None = None
        self._last: StepSpans = StepSpans(-1, None, ())

    def step(self, spans: StepSpans, finite: bool = True) -> None:
        """Take in a step, or gradients that were given up.

        Args:
            spans: what happened.
            finite: whether the step could be taken.
        """
        self.totals.add(spans.buckets, finite=finite, kept=spans.kept)
        if spans.kept:
            self._last = spans
        if self.track is not None:
            self.track.step(spans)

    def update(self, step: Callable[[], T]) -> T:
        """Let the wrapped optimizer step, and note how long it takes."""
        begin = time.perf_counter()
        result = step()
        if self.track is not None:
            self.track.update(self._last.step, (begin, time.perf_counter()))
        return result

    def metrics(self, residual_norm: float) -> StepMetrics:
        """What the last step cost."""
        step, backward, buckets, _ = self._last
        backward_ended = float("-inf") if backward is None else backward[1]
        return StepMetrics.of(step, buckets, backward_ended, residual_norm)

    def give_up(self) -> None:
        """A step has failed: other ranks will not come to gather the timeline. It ends here."""
        self.track = None

    def close(self) -> None:
        """End the timeline, unless a step has failed. Collective."""
        if self.track is not None:
            self.track.finish()


class Stopwatch:
    """Notes when things began and ended that follow each other.

    Attributes:
        spans: of those that have ended.
    """

    def __init__(self) -> None:
        """The first begins now."""
        self.spans: list[Span] = []
        self._begin = time.perf_counter()

    def lap(self) -> None:
        """One has ended, and the next begins."""
        begin, self._begin = self._begin, time.perf_counter()
        self.spans.append((begin, self._begin))
