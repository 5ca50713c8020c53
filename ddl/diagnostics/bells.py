"""Bells: whether values have the shape for which top-k is promised to leave little."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ddl.diagnostics.samples import sample

LARGEST_SAMPLE = 2**14  # of so many the limit of a dip is 0.014
HULL_POINTS = 512  # dips are exact to one in so many
KUIPER = 1.747  # what sqrt(n) times Kuiper's statistic exceeds in 5 % of samples, n large


@dataclass(frozen=True)
class Bell:
    """Whether values are bell-shaped in the sense of Shi et al., arXiv 1911.08772, Theorem 1.

    Its condition: the squares, sorted from the largest down and plotted over their ranks, make a
    curve that is convex and falls to zero, and so lies below the straight line from its largest to
    zero. That is to say, the distribution function of the squares is concave from the origin on:
    they are densest at zero and thin out from there. Normal, Laplace, Student's t and uniform
    values are so, and whatever else has its only mode at zero; equal magnitudes and two bumps are
    not.

    Attributes:
        dip: the largest distance between the distribution function of the squares and the least
            concave function above it that begins in the origin, in [0, 1]. Of values that are not
            zero: zeros never spoil a bell, and to count them would hide what the others do.
        limit: what the dip of independent draws from a bell exceeds in at most 5 % of cases, of
            whatever bell: it is at most Kuiper's statistic of the draws, by the argument of
            Marshall's lemma. The quantile of that is Stephens' (1970).
    """

    dip: float
    limit: float

    @property
    def shaped(self) -> bool:
        """Whether the values do not refute that they are bell-shaped; very few never do."""
        return self.dip <= self.limit


def bell_of(values: Tensor) -> Bell:
    """Judge finite values, float32 [at least 1], unchanged, by a sample of them."""
    sizes = sample(values, LARGEST_SAMPLE).abs().cpu().numpy()
    squares = np.square(np.sort(sizes[sizes > 0]).astype(np.float64))
    n = len(squares)
    if n == 0:
        return Bell(dip=0.0, limit=1.0)
    ranks = np.unique(np.linspace(1, n, min(n, HULL_POINTS)).round().astype(np.int64))
    places, heights = _concave_above(squares[ranks - 1].tolist(), (ranks / n).tolist())
    # Just below each of the squares, where the distribution function is about to jump.
    dips = np.interp(squares, places, heights) - np.arange(n) / n
    limit = KUIPER / (math.sqrt(n) + 0.155 + 0.24 / math.sqrt(n))
    return Bell(dip=float(dips.max()), limit=limit)


def _concave_above(places: list[float], heights: list[float]) -> tuple[list[float], list[float]]:
    """The corners of the least concave function above the origin and points in ascending order."""
    hull = [(0.0, 0.0)]
    for x, y in zip(places, heights, strict=True):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (x1 - x0) * (y - y0) < (x - x0) * (y1 - y0):
                break
            hull.pop()
        hull.append((x, y))
    return [x for x, _ in hull], [y for _, y in hull]
