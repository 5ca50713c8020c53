"""From measurements to models: a link, a collective, a cluster.

The alpha-beta model is what the papers print and not what clusters do: among 32 workers on 1 Gb/s
Ethernet the communication of gTop-k took 5 to 70 times the formula, and dense 7 to 12 times
(measurements of arXiv 1901.04359). Two terms more say where that time goes:

    t = alpha rounds + beta bytes c(P) + host numel        c(P) = max(1, (P / free)^growth)

`host` is what each aggregation costs for each element of the *gradient*, however few are sent:
selection, copies between device and host, sorting in an interpreter. `c` is contention: up to
`free` workers the switches keep up, beyond it each byte takes longer. Neither follows from theory.
They are fitted, and hold for the machines they were fitted on, between the sizes measured there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddl.perfmodel.costs import Cost
from ddl.perfmodel.regression import Fit, Vector, linear, positive


def fit_link(sizes: Sequence[float], seconds: Sequence[float], confidence: float = 0.95) -> Fit:
    """Fit seconds = alpha + beta size: a ping-pong, or one collective over sizes.

    Args:
        sizes: bytes of each message.
        seconds: each took one way.
        confidence: of the intervals.

    Returns:
        "alpha" in seconds and "beta" in seconds per byte.

    Raises:
        ValueError: fewer than two sizes, or a time that is not above 0.
    """
    return linear({"alpha": [1.0] * len(sizes), "beta": sizes}, seconds, confidence)


def fit_collectives(
    costs: Sequence[Cost],
    seconds: Sequence[float],
    host: Sequence[str] = ("gamma",),
    confidence: float = 0.95,
) -> Fit:
    """Fit alpha rounds + beta path bytes + gamma entries + delta messages, over collectives.

    Args:
        costs: of each measured call.
        seconds: it took.
        host: which terms of host work to fit: "gamma", "delta", both or none. Sparse collectives
            must be among the measurements, for delta of several kinds.
        confidence: of the intervals.

    Returns:
        "alpha" in seconds, "beta" in seconds per byte, "gamma" and "delta" in seconds per entry
        and per message of `Cost`.

    Raises:
        ValueError: too few measurements, or such as cannot tell the parameters apart.
    """
    terms = {
        "alpha": [float(cost.rounds) for cost in costs],
        "beta": [cost.path_bytes for cost in costs],
        "gamma": [cost.host_entries for cost in costs],
        "delta": [cost.host_messages for cost in costs],
    }
    if not set(host) <= {"gamma", "delta"}:
        raise ValueError(f"host terms are gamma and delta, got {', '.join(host)}")
    wanted = ("alpha", "beta", *host)
    return linear({name: terms[name] for name in wanted}, seconds, confidence)


@dataclass(frozen=True)
class Sample:
    """A measured iteration whose communication follows its computation.

    Attributes:
        method: what aggregates, as a key of `Cluster.host`.
        P: workers.
        numel: elements of the gradient.
        cost: of the aggregation.
        alone: seconds of the iteration without it.
        seconds: of the iteration, measured.
        label: of the measurement, such as the network's name.
    """

    method: str
    P: int
    numel: int
    cost: Cost
    alone: float
    seconds: float
    label: str = ""


@dataclass(frozen=True)
class Cluster:
    """A cluster with host work and contention; the formula is in this module's docstring.

    Attributes:
        alpha: seconds a round.
        beta: seconds per byte, uncontended.
        host: seconds per element of the gradient, by method.
        free: workers up to which there is no contention.
        growth: the power by which it grows beyond.
    """

    alpha: float
    beta: float
    host: Mapping[str, float]
    free: float = float("inf")
    growth: float = 0.0

    def contention(self, P: int) -> float:
        """How many times longer a byte takes among P workers: at least 1."""
        return max(1.0, (P / self.free) ** self.growth)

    def communicate(self, method: str, P: int, numel: int, cost: Cost) -> float:
        """Seconds of an aggregation, host work included. Arguments as in `Sample`."""
        host = self.host.get(method, 0.0) * numel
        return cost.seconds(self.alpha, self.beta * self.contention(P)) + host

    def predict(self, sample: Sample) -> float:
        """Seconds of a sample's iteration; what was measured does not enter."""
        return sample.alone + self.communicate(sample.method, sample.P, sample.numel, sample.cost)


def fit_cluster(
    samples: Sequence[Sample],
    alpha: float | None = None,
    beta: float | None = None,
    confidence: float = 0.95,
) -> tuple[Cluster, Fit]:
    """Fit a cluster to measured iterations, by the ratios of their times.

    Args:
        samples: iterations, with at least three numbers of workers among them.
        alpha: seconds a round, if known from a ping-pong; fitted if None.
        beta: seconds per byte, likewise.
        confidence: of the intervals.

    Returns:
        The cluster, and the fit: "host <method>" in seconds per element, "free" and "growth"
        without unit, and "alpha" and "beta" if they were not given.

    Raises:
        ValueError: too few samples, or too few numbers of workers to see contention grow.
    """
    P = np.array([sample.P for sample in samples], dtype=float)
    if len(set(P)) < 3:
        raise ValueError(
            f"contention needs at least 3 numbers of workers, got {sorted(map(int, set(P)))}; fit "
            "a single one with fit_collectives"
        )
    methods = sorted({sample.method for sample in samples})
    place = np.array([methods.index(sample.method) for sample in samples])
    numel = np.array([sample.numel for sample in samples], dtype=float)
    rounds = np.array([sample.cost.rounds for sample in samples], dtype=float)
    path = np.array([sample.cost.path_bytes for sample in samples])
    alone = np.array([sample.alone for sample in samples])
    seconds = [sample.seconds for sample in samples]

    names = [f"host {method}" for method in methods] + ["free", "growth"]
    names += [name for name, known in (("alpha", alpha), ("beta", beta)) if known is None]
    wanting = dict(zip(names, range(len(names)), strict=True))

    def predict(values: Vector) -> Vector:
        a = values[wanting["alpha"]] if alpha is None else alpha
        b = values[wanting["beta"]] if beta is None else beta
        free, growth = values[wanting["free"]], values[wanting["growth"]]
        contention = np.maximum(1.0, (P / free) ** min(growth, 50.0))
        return alone + a * rounds + b * path * contention + values[place] * numel

    # From where contention sets in the fit only moves if some workers lie beyond: try several.
    excess = np.maximum(np.array(seconds) - alone, 1e-3 * np.array(seconds))
    each = excess / numel / 2
    host = [float(np.median(each[place == number])) for number in range(len(methods))]
    guess_beta = float(np.median(excess / path)) / 2
    guess_alpha = float(np.median(excess / rounds)) / 10
    rest = [g for g, known in ((guess_alpha, alpha), (guess_beta, beta)) if known is None]
    fits = [
        positive(names, predict, seconds, [*host, begin, 1.0, *rest], confidence)
        for begin in sorted(set(P))[:-1]
    ]
    fit = min(fits, key=lambda fit: fit.error)
    cluster = Cluster(
        alpha=fit["alpha"] if alpha is None else alpha,
        beta=fit["beta"] if beta is None else beta,
        host={method: fit[f"host {method}"] for method in methods},
        free=fit["free"],
        growth=fit["growth"],
    )
    return cluster, fit


def leave_one_out(
    samples: Sequence[Sample],
    fit: Callable[[Sequence[Sample]], Cluster],
    group: Callable[[Sample], Hashable] | None = None,
) -> list[float]:
    """Predict every sample by a cluster that was fitted without it.

    Args:
        samples: measurements.
        fit: from samples to a cluster.
        group: what is left out together with a sample: all with the same value, such as
            `lambda sample: sample.label`; only itself if None.

    Returns:
        Predicted seconds, in the order of `samples`.
    """
    keys = list(range(len(samples))) if group is None else [group(sample) for sample in samples]
    fitted = {
        key: fit([other for other, theirs in zip(samples, keys, strict=True) if theirs != key])
        for key in set(keys)
    }
    return [fitted[key].predict(sample) for key, sample in zip(keys, samples, strict=True)]


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """|predicted / measured - 1| of rates or of times, one by one.

    Raises:
        ValueError: lists of different lengths.
    """
    if len(predicted) != len(measured):
        raise ValueError(f"got {len(predicted)} predictions for {len(measured)} measurements")
    return [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
