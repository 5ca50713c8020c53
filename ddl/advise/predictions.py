"""What a step comes to with each candidate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ddl.advise.candidates import Candidate
from ddl.advise.situation import Situation
from ddl.perfmodel.contention import shared
from ddl.perfmodel.iteration import Iteration, efficiency

LEAST_DENSITY = 1e-7


@dataclass(frozen=True)
class Prediction:
    """A step with one candidate.

    Attributes:
        candidate: the compressor and its collective.
        P: workers.
        seconds: of a step.
        compute: seconds of reading, forward and backward pass.
        selection: seconds of selection, hidden or not.
        communication: seconds of communication, hidden or not.
        exposed: seconds of both that the backward pass does not hide, and by which it gets longer.
        update: seconds of writing averages back, and of the optimizer's update.
        images_per_second: samples a second of all workers together.
        efficiency: of scaling: seconds of the same step without aggregation, over `seconds`.
        bytes_sent: by a rank, in a step.
        hiding_density: the largest density at which selection and communication take no longer
            than the backward pass; None for the dense all-reduce, and where there is none.
        iteration: its timeline.
    """

    candidate: Candidate
    P: int
    seconds: float
    compute: float
    selection: float
    communication: float
    exposed: float
    update: float
    images_per_second: float
    efficiency: float
    bytes_sent: float
    hiding_density: float | None
    iteration: Iteration


def predict(situation: Situation, candidate: Candidate, P: int | None = None) -> Prediction:
    """Predict a step.

    Args:
        situation: what it consists of.
        candidate: one of those in it.
        P: workers, if others than in the situation: each computes as fast as there, and
            communication takes longer by as much as the formulas say.
    """
    P = situation.P if P is None else P
    profile, costs = situation.profile, situation.aggregations[candidate]
    communicate = _communicate(situation, candidate, P, situation.density)
    iteration = shared(
        profile, situation.plan, communicate, costs.select, costs.sharing, costs.apply
    )
    compute = profile.t_io + profile.t_h2d + profile.t_f + profile.t_b
    sent = sum(_bytes(situation, candidate, P, numel) for numel in situation.numels)
    return Prediction(
        candidate=candidate,
        P=P,
        seconds=iteration.seconds,
        compute=compute,
        selection=iteration.t_s,
        communication=iteration.t_c,
        exposed=iteration.exposed,
        update=iteration.seconds - iteration.exposed - compute,
        images_per_second=P * iteration.throughput,
        efficiency=efficiency(profile.alone(), iteration.seconds),
        bytes_sent=sent,
        hiding_density=_hiding_density(situation, candidate, P),
        iteration=iteration,
    )


def _communicate(
    situation: Situation, candidate: Candidate, P: int, density: float
) -> Callable[[int], float]:
    """Seconds for so many elements: as in the situation, plus what the formulas add to it."""
    known = situation.aggregations[candidate].communicate
    if (P, density) == (situation.P, situation.density):
        return known
    here = candidate.communicate(situation.P, situation.density, situation.links)
    there = candidate.communicate(P, density, situation.links)
    return lambda numel: max(0.0, known(numel) + there(numel) - here(numel))


def _bytes(situation: Situation, candidate: Candidate, P: int, numel: int) -> float:
    if situation.P == P:
        return situation.aggregations[candidate].bytes_sent(numel)
    return candidate.cost(P, numel, situation.density).sent_bytes


def _hiding_density(situation: Situation, candidate: Candidate, P: int) -> float | None:
    """By bisection on the logarithm: what more entries cost grows without a jump down."""
    if candidate.is_dense or P == 1:
        return None
    select = situation.aggregations[candidate].select

    def hides(density: float) -> bool:
        communicate = _communicate(situation, candidate, P, density)
        busy = sum(select(numel) + communicate(numel) for numel in situation.numels)
        return busy <= situation.profile.t_b

    if hides(1.0):
        return 1.0
    low, high = math.log(LEAST_DENSITY), 0.0
    if not hides(LEAST_DENSITY):
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if hides(math.exp(middle)) else (low, middle)
    return math.exp(low)
