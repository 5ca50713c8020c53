"""Timing what all ranks do at once, as in training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from ddl.collectives import messages
from ddl.comm import Communicator

SETTLED = 0.05


class Samples:
    """Repeated measurements of the same few numbers; the same on every rank.

    Attributes:
        rows: one a measurement.
    """

    def __init__(
        self, comm: Communicator, over_ranks: Callable[[list[float]], float] = statistics.fmean
    ) -> None:
        """Nothing measured yet.

        Args:
            comm: the ranks.
            over_ranks: what becomes of the numbers of all ranks. The mean for parts, so that they
                add up; `max` for moments that all ranks have to wait for.
        """
        self._comm = comm
        self._over_ranks = over_ranks
        self.rows: list[list[float]] = []

    def add(self, mine: Sequence[float]) -> None:
        """Take in what this rank has measured. Collective."""
        everyone = messages.gather_objects(self._comm, list(mine))
        self.rows.append([self._over_ranks(list(c)) for c in zip(*everyone, strict=True)])

    def medians(self) -> list[float]:
        """Of each number over the measurements."""
        return [statistics.median(column) for column in zip(*self.rows, strict=True)]

    @property
    def settled(self) -> bool:
        """Whether the median of the last number is known to about 5 %."""
        values = [row[-1] for row in self.rows]
        # Of a normal distribution half the distance of the quartiles is 0.6745 sigma, and the
        # median of n values scatters by 1.25 sigma / sqrt(n).
        return 1.25 / 0.6745 * spread(values) <= SETTLED * math.sqrt(len(values))


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, over the median: 0.05 is 5 %."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else 0.0
