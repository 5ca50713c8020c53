"""Many workers: scaling curves, and what stragglers add.

An iteration of S-SGD is the same on every worker, so a scaling curve needs one schedule a number of
workers and no more: 4,096 take no longer than 4. Where workers differ, every aggregation waits for
the last of them: `stragglers` draws each worker's computing time and joins them bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddl.perfmodel import plans
from ddl.perfmodel.iteration import Iteration, IterationProfile, efficiency, speedup
from ddl.perfmodel.plans import Plan, Seconds, nothing


@dataclass(frozen=True)
class Point:
    """One number of workers of a scaling curve.

    Attributes:
        P: workers.
        iteration: of each.
        throughput: samples a second of all together.
        speedup: over one worker.
        efficiency: speedup / P.
    """

    P: int
    iteration: Iteration
    throughput: float
    speedup: float
    efficiency: float


def scaling(
    profile: IterationProfile,
    schedule: Callable[[IterationProfile, Seconds], Iteration],
    communicate: Callable[[int, int], float],
    workers: Sequence[int],
) -> list[Point]:
    """A scaling curve: the same batch for each of ever more workers.

    Args:
        profile: of one worker.
        schedule: such as `schedules.merged`, from a profile and a cost to an iteration.
        communicate: seconds to aggregate, from the number of workers and the elements of a bucket,
            such as `lambda P, numel: costs.dense(P, numel).seconds(alpha, beta)`.
        workers: numbers of workers.

    Raises:
        ValueError: a number below 1.
    """
    t_1 = schedule(profile, nothing).seconds
    points = []
    for P in workers:
        if P < 1:
            raise ValueError(f"a number of workers must be at least 1, got {P}")
        cost = _among(P, communicate) if P > 1 else nothing
        iteration = schedule(profile, cost)
        points.append(
            Point(
                P=P,
                iteration=iteration,
                throughput=P * iteration.throughput,
                speedup=speedup(P, t_1, iteration.seconds),
                efficiency=efficiency(t_1, iteration.seconds),
            )
        )
    return points


def _among(P: int, communicate: Callable[[int, int], float]) -> Seconds:
    return lambda numel: communicate(P, numel)


@dataclass(frozen=True)
class Straggling:
    """Simulated iterations of workers that are not equally fast.

    Attributes:
        seconds: of each iteration.
        undisturbed: seconds of an iteration if all were as fast as in the profile.
        exposed: seconds, mean over workers and iterations, that a worker was not computing.
    """

    seconds: tuple[float, ...]
    undisturbed: float
    exposed: float

    @property
    def mean(self) -> float:
        """Seconds of an iteration, on average."""
        return sum(self.seconds) / len(self.seconds)


def stragglers(
    profile: IterationProfile,
    communicate: Seconds,
    P: int,
    spread: float,
    plan: Plan | None = None,
    steps: int = 20,
    seed: int = 0,
) -> Straggling:
    """Iterations in which each worker's computing time is drawn anew.

    In every collective here each rank depends on all others, so none gets its average before the
    last rank's gradients and one aggregation; all get it about then. A bucket is aggregated when
    the last worker has it ready and the one before is done:

        end(bucket) = max over ranks of max(ready(rank, bucket), end(bucket before)) + t_c(bucket)

    Computing times are log-normal with the profile's as their median: a worker is never much faster
    than usual and now and then much slower.

    Args:
        profile: of one worker; input is taken as hidden.
        communicate: seconds to aggregate so many elements, among P workers.
        P: workers.
        spread: standard deviation of the logarithm of computing times; 0.05 is about 5 %.
        plan: of the buckets; layer by layer if None.
        steps: iterations to simulate.
        seed: of the random numbers.

    Raises:
        ValueError: no worker, no step, a negative spread, or a plan that does not fit.
    """
    if P < 1 or steps < 1 or spread < 0:
        raise ValueError(
            f"P and steps must be at least 1 and spread at least 0, got {P}, {steps}, {spread}"
        )
    layers = profile.layers
    plan = plans.check_plan(plan or plans.layerwise(len(layers)), len(layers))
    elapsed = profile.t_f
    ready, lasts = [], []
    for bucket in plan:
        elapsed += sum(layers[layer].t_b for layer in bucket)
        ready.append(elapsed)
        lasts.append(communicate(sum(layers[layer].numel for layer in bucket)))
    random = np.random.default_rng(seed)
    seconds, waits = [], []
    for factors in [np.ones(1), *np.exp(spread * random.standard_normal((steps, P)))]:
        end = 0.0
        for due, t_c in zip(ready, lasts, strict=True):
            end = max(end, float((due * factors).max())) + t_c
        seconds.append(end + profile.t_u)
        waits.append(float((end - elapsed * factors).mean()))
    return Straggling(tuple(seconds[1:]), seconds[0], sum(waits[1:]) / steps)
