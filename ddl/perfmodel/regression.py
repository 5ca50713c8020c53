"""Least squares with confidence intervals: linear with parameters of at least 0, and positive.

1. Times are fitted by their ratios, not their differences: residuals are relative. Otherwise the
   largest message of a sweep would decide everything, and nothing would be left of the latency.
2. Confidence intervals are those of Student's t with the covariance of the fit at its minimum: they
   presume that the form of the model is right, and tell nothing of whether it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

VANISHED = 1e-5
"""A parameter that changes all logarithms together by less, if multiplied by e, is 0."""


@dataclass(frozen=True)
class Estimate:
    """A parameter and its confidence interval, in the parameter's unit."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """What a fit found.

    Attributes:
        parameters: by name.
        error: root mean square of the relative residuals, per degree of freedom.
        samples: how many measurements went in.
        freedom: degrees of freedom left: samples minus parameters.
        confidence: of the intervals.
    """

    parameters: Mapping[str, Estimate]
    error: float
    samples: int
    freedom: int
    confidence: float

    def __getitem__(self, name: str) -> float:
        """The value of a parameter."""
        return self.parameters[name].value


def linear(
    terms: Mapping[str, Sequence[float]], seconds: Sequence[float], confidence: float = 0.95
) -> Fit:
    """Fit seconds = sum of parameter * term, by relative error, with no parameter below 0.

    A parameter that would be negative is set to 0 and the others are fitted again (the most
    negative one first); its interval then reaches from 0 to where it would be plausible alone.

    Args:
        terms: by parameter, what it is multiplied with in each measurement.
        seconds: measured, above 0.
        confidence: of the intervals.

    Raises:
        ValueError: fewer measurements than parameters, a time that is not above 0, or terms that
            cannot be told apart.
    """
    names = list(terms)
    y = np.asarray(seconds, dtype=float)
    _check(y, len(names), confidence)
    if any(len(terms[name]) != len(y) for name in names):
        raise ValueError(f"expected {len(y)} values of each term, as many as there are seconds")
    columns = np.array([terms[name] for name in names], dtype=float).T / y[:, None]
    scale = np.abs(columns).max(axis=0)
    if not scale.all():
        raise ValueError("a term is 0 in every measurement, so its parameter cannot be told")
    columns = columns / scale  # alpha and beta differ by many orders of magnitude
    if np.linalg.matrix_rank(columns) < len(names):
        raise ValueError(
            f"the measurements cannot tell {', '.join(names)} apart; vary sizes and numbers of "
            "ranks"
        )
    free = list(range(len(names)))
    while True:
        found = np.linalg.lstsq(columns[:, free], np.ones(len(y)), rcond=None)[0]
        if not free or found.min() >= 0:
            break
        del free[int(found.argmin())]
    values = np.zeros(len(names))
    values[free] = found
    residuals = columns @ values - 1
    freedom = len(y) - len(names)
    spread = _spread(residuals, freedom)
    half = _margins(np.linalg.inv(columns.T @ columns), spread, freedom, confidence)
    estimates = {
        name: Estimate(float(value / s), float(max(0.0, value - h) / s), float((value + h) / s))
        for name, value, h, s in zip(names, values, half, scale, strict=True)
    }
    return Fit(estimates, spread, len(y), freedom, confidence)


def positive(
    names: Sequence[str],
    predict: Callable[[Vector], Vector],
    seconds: Sequence[float],
    start: Sequence[float],
    confidence: float = 0.95,
) -> Fit:
    """Fit a model that is not linear, with parameters above 0, by the ratios of its predictions.

    Levenberg and Marquardt's method on the logarithms of parameters and times, so that factors
    count alike in both directions and intervals stay positive.

    Args:
        names: of the parameters.
        predict: from their values to the predicted seconds of each measurement, all above 0.
        seconds: measured, above 0.
        start: values to start from, above 0.
        confidence: of the intervals.

    Returns:
        The fit. A parameter that the data drive to 0 is reported as 0, with an interval up to where
        it would be plausible alone.

    Raises:
        ValueError: fewer measurements than parameters, or a number that is not above 0.
    """
    y = np.asarray(seconds, dtype=float)
    at = np.asarray(start, dtype=float)
    _check(y, len(names), confidence)
    if len(at) != len(names) or not (at > 0).all():
        raise ValueError(f"expected {len(names)} values above 0 to start from, got {list(start)}")
    at = np.log(at)

    def residuals(logs: Vector) -> Vector:
        return np.log(predict(np.exp(np.clip(logs, -150, 150))) / y)

    now = residuals(at)
    damping = 1e-2
    for _ in range(200):
        slopes = _slopes(residuals, at, now)
        normal = slopes.T @ slopes
        # What a parameter at 0 does vanishes with it: the floor keeps the system solvable.
        damped = normal + damping * np.diag(normal.diagonal()) + 1e-12 * np.eye(len(at))
        step = np.clip(np.linalg.solve(damped, -slopes.T @ now), -2, 2)
        there = residuals(at + step)
        if there @ there < now @ now:
            small = now @ now - there @ there <= 1e-13 * (now @ now)
            at, now, damping = at + step, there, max(damping / 3, 1e-9)
            if small:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    slopes = _slopes(residuals, at, now)
    freedom = len(y) - len(names)
    spread = _spread(now, freedom)
    inverse = np.linalg.pinv(slopes.T @ slopes, hermitian=True)
    half = np.minimum(_margins(inverse, spread, freedom, confidence), 300)  # exp(300) is enough
    estimates = {
        name: Estimate(math.exp(log), math.exp(log - h), math.exp(log + h))
        for name, log, h in zip(names, at, half, strict=True)
    }
    vanished = np.linalg.norm(slopes, axis=0) < VANISHED
    for place in (place for place, gone in enumerate(vanished) if gone):
        # On a logarithmic scale 0 has no interval: step back to where it started, and see.
        back = at.copy()
        back[place] = math.log(start[place])
        effect = float(np.linalg.norm(residuals(back) - now)) / start[place]
        inverse = np.array([[1 / effect**2 if effect else math.inf]])
        high = float(_margins(inverse, spread, freedom, confidence)[0])
        estimates[names[place]] = Estimate(0.0, 0.0, high)
    return Fit(estimates, spread, len(y), freedom, confidence)


def _slopes(function: Callable[[Vector], Vector], at: Vector, value: Vector) -> Vector:
    """Derivatives by every parameter, as columns."""
    step = 1e-6
    moved = [at + step * unit for unit in np.eye(len(at))]
    return np.array([(function(there) - value) / step for there in moved]).T


def student_t(confidence: float, freedom: int) -> float:
    """The t with P(|T| < t) = confidence for Student's distribution.

    With t = sqrt(freedom) tan(angle) the density becomes cos(angle)^(freedom - 1), which is smooth
    on a bounded interval: integrated by Gauss and Legendre's rule, inverted by bisection.

    Args:
        confidence: in (0, 1).
        freedom: degrees of freedom, at least 1.
    """
    nodes, weights = np.polynomial.legendre.leggauss(64)
    # Many degrees of freedom concentrate the density: 40 standard deviations hold all of it.
    limit = min(math.pi / 2, 40 / math.sqrt(freedom))

    def mass(angle: float) -> float:
        return float(angle / 2 * weights @ np.cos(angle / 2 * (nodes + 1)) ** (freedom - 1))

    low, high, total = 0.0, limit, mass(limit)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mass(middle) < confidence * total else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _margins(inverse: Vector, spread: float, freedom: int, confidence: float) -> Vector:
    """Half widths of the intervals; without freedom left to judge by, infinite."""
    if not freedom:
        return np.full(len(inverse), math.inf)
    deviations = spread * np.sqrt(np.maximum(inverse.diagonal(), 0))
    return student_t(confidence, freedom) * deviations


def _spread(residuals: Vector, freedom: int) -> float:
    return math.sqrt(residuals @ residuals / freedom) if freedom else 0.0


def _check(seconds: Vector, parameters: int, confidence: float) -> None:
    if len(seconds) < parameters:
        raise ValueError(
            f"{parameters} parameters need at least as many measurements, got {len(seconds)}"
        )
    if not (seconds > 0).all():
        raise ValueError("measured seconds must be above 0, got one that is not")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")
