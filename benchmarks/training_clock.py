"""Times the parts of an iteration, on a CPU by the clock and on a GPU by events of its stream."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch


class Clock:
    """Notes moments, and says what lies between them once the device has come so far.

    A GPU runs behind the program: its moments are those in which it gets to the mark, so that
    timing makes nothing wait before the end of an iteration.
    """

    def __init__(self, device: torch.device) -> None:
        """Of the computation on `device`."""
        self._cuda = device.type == "cuda"
        self._device = device

    def now(self) -> Any:
        """A moment."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait for the device, so that moments before this are known."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def between(self, begin: Any, end: Any) -> float:
        """Seconds from one moment to another, after `settle`."""
        return begin.elapsed_time(end) / 1e3 if self._cuda else end - begin

    def laps(self, moments: Sequence[Any]) -> list[float]:
        """Seconds between each two moments in a row, after `settle`."""
        return [self.between(*pair) for pair in pairwise(moments)]


class Spread(NamedTuple):
    """Median and quartiles over iterations, in seconds."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


class Rate(NamedTuple):
    """Mean over groups of iterations, and 1.96 standard deviations, as Horovod reports it."""

    mean: float
    margin: float


def rate(values: Sequence[float]) -> Rate:
    """Of at least one value."""
    return Rate(statistics.fmean(values), 1.96 * statistics.pstdev(values))
