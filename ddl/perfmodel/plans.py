"""Which layers travel together: the plans of bucket boundaries, and the best of them.

A *plan* is a tuple of ranges of layers, in the order of launch, which is that of the backward pass:
the first range ends at layer L, the last begins at layer 1 (place 0). A bucket is launched when the
backward pass of its first layer, the last to finish, is done.

Merging saves the fixed cost of a message and delays its start. Two rules:

* `greedy`, the published one of MG-WFBP (arXiv 1811.11141, its algorithm): going backwards, merge a
  layer into the next if its message would still be waiting or under way when the next gradient is
  ready, unless waiting costs more than the start-up time that is saved. With a cost of a + b M for
  every message no single merge ends later than the two messages would, so it is never worse than
  no merging. It is not optimal, though: a merge that pays by itself can hold a message back into
  which the next layers then fall, too, where two messages would have been better. And with costs
  that are not a + b M, such as those of a collective that changes its algorithm at some size, it
  can be worse than no merging.
* `best`, ours: exact by dynamic programming, for any costs. What later buckets can see of earlier
  ones is when the resources become free; no later is better in each. So of all plans for the layers
  L..j it is enough to keep those that no other beats in every resource. No merging and one message
  for everything are plans, too, so the best is never worse than either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = Callable[[int], float]
"""Seconds that something costs for a bucket of so many elements."""

Plan = tuple[range, ...]

Where = Literal["worker", "thread", "compute"]
"""Where selection runs: with the communication in one background thread, as this engine does on
CPUs; in a background thread of its own; or on the device that computes, between two layers of the
backward pass, as OMGS-SGD does (Shi et al., INFOCOM 2020)."""

PLACES: tuple[Where, ...] = ("worker", "thread", "compute")


def nothing(numel: int) -> float:
    """The cost of what is not done: 0 s."""
    return 0.0


@dataclass(frozen=True)
class Linear:
    """The cost startup + each * numel, a `Seconds` for which plans are found fast.

    Attributes:
        startup: seconds, however small the bucket.
        each: seconds per element.
    """

    startup: float
    each: float

    def __call__(self, numel: int) -> float:
        """Seconds for a bucket of so many elements."""
        return self.startup + self.each * numel

    @classmethod
    def like(cls, seconds: Seconds, numel: int) -> Linear:
        """The line through what `seconds` gives for `numel` and for half as many elements.

        The cost itself wherever it is linear, as that of every collective is that does not change
        its algorithm in between.
        """
        half = numel // 2
        each = (seconds(numel) - seconds(half)) / (numel - half)
        return cls(max(0.0, seconds(numel) - each * numel), each)


class Clock(NamedTuple):
    """When the resources of a worker become free, in seconds from the start of the backward pass.

    Attributes:
        delay: of the backward pass, by selection on the device that computes.
        select: the selecting thread is free, if there is one.
        network: communication is free; if selection runs in the same thread, both.
    """

    delay: float = 0.0
    select: float = 0.0
    network: float = 0.0

    def after(self, ready: float, t_s: float, t_c: float, where: Where) -> Clock:
        """The clock after one more bucket.

        Args:
            ready: when its gradients are there, if nothing delays the backward pass.
            t_s: seconds of its selection.
            t_c: seconds of its communication.
            where: its selection runs.
        """
        if where == "compute":
            delay = self.delay + t_s
            return Clock(delay, self.select, max(ready + delay, self.network) + t_c)
        if where == "thread":
            selected = max(ready, self.select) + t_s
            return Clock(self.delay, selected, max(selected, self.network) + t_c)
        return Clock(self.delay, self.select, max(ready, self.network) + t_s + t_c)

    def not_before(self, ready: float) -> Clock:
        """The same to all who come after `ready`: to be free earlier is of no use to them."""
        return Clock(self.delay, max(self.select, ready), max(self.network, ready + self.delay))

    def beats(self, other: Clock, slack: float) -> bool:
        """Whether no resource becomes free later than the other's, to within `slack` seconds."""
        return (
            self.delay <= other.delay + slack
            and self.select <= other.select + slack
            and self.network <= other.network + slack
        )


def layerwise(layers: int) -> Plan:
    """Every layer by itself, as in wait-free backpropagation (WFBP)."""
    return tuple(range(place, place + 1) for place in reversed(range(layers)))


def single(layers: int) -> Plan:
    """All layers in one message, after the backward pass."""
    return (range(layers),)


def by_size(sizes: Sequence[int], limit: int) -> Plan:
    """Fill buckets up to a fixed size, as this engine and torch DDP do.

    Args:
        sizes: of the layers, in the order of the forward pass, in any unit.
        limit: a bucket is full when one more layer would exceed this; a larger layer is a bucket.
    """
    plan: list[range] = []
    stop, size = len(sizes), 0
    for place in reversed(range(len(sizes))):
        if place + 1 < stop and size + sizes[place] > limit:
            plan.append(range(place + 1, stop))
            stop, size = place + 1, 0
        size += sizes[place]
    plan.append(range(stop))
    return tuple(plan)


def greedy(t_b: Sequence[float], numels: Sequence[int], communicate: Seconds, a: float) -> Plan:
    """The published rule of MG-WFBP (arXiv 1811.11141, its algorithm); see this module's docstring.

    Args:
        t_b: seconds of the backward pass of each layer, in the order of the forward pass.
        numels: gradient elements of each layer.
        communicate: seconds for a message of so many elements.
        a: seconds that a merge saves: the fixed part of `communicate`.
    """
    check_layers(t_b, numels)
    plan: list[range] = []
    stop = len(numels)
    compute = 0.0  # when the backward pass of this layer is done
    network = 0.0  # when the messages before are done
    for place in reversed(range(len(numels))):
        compute += t_b[place]
        bucket = range(place, stop)
        begin = max(network, compute)
        end = begin + communicate(sum(numels[layer] for layer in bucket))
        if place:
            ready = compute + t_b[place - 1]
            if ready < end and (begin > ready or ready - begin < a):
                continue
        plan.append(bucket)
        stop, network = place, end
    return tuple(plan)


def best(
    t_b: Sequence[float],
    numels: Sequence[int],
    communicate: Seconds,
    select: Seconds = nothing,
    where: Where = "worker",
) -> Plan:
    """The plan after which all averages are there earliest, to within rounding.

    O(L^2) evaluations of the costs; fast if they are `Linear`. Of the states of a layer, one is
    worth keeping if selection runs in the worker, few if in a thread, up to L if it delays
    computing. Of equals, that of fewest buckets is kept.

    Args:
        t_b: seconds of the backward pass of each layer, in the order of the forward pass.
        numels: gradient elements of each layer.
        communicate: seconds for a message of so many elements.
        select: seconds to select from so many elements.
        where: selection runs.

    Raises:
        ValueError: lists of different lengths, no layer, a negative entry, or an unknown place.
    """
    check_layers(t_b, numels)
    if where not in PLACES:
        raise ValueError(f"where must be one of {', '.join(PLACES)}, got {where!r}")
    ready = [0.0] * (len(numels) + 1)  # ready[j]: the backward pass of the layer at place j is done
    for place in reversed(range(len(numels))):
        ready[place] = ready[place + 1] + t_b[place]
    slack = 1e-12 * (ready[0] + sum(communicate(numel) + select(numel) for numel in numels))
    if where == "worker" or select is nothing:
        return _best_of_one_queue(ready, numels, communicate, select, slack)
    return _best_of_states(ready, numels, communicate, select, where, slack)


def _best_of_one_queue(
    ready: Sequence[float],
    numels: Sequence[int],
    communicate: Seconds,
    select: Seconds,
    slack: float,
) -> Plan:
    """The best plan if everything but computing runs in one queue.

    end(j), when the layers at places j..L-1 are averaged, is the least of
    max(ready(j), end(i)) + cost(j..i-1) over all i > j.
    """
    L = len(numels)
    end = np.zeros(L + 1)
    buckets = np.zeros(L + 1, dtype=int)
    stops = [0] * L
    for first in reversed(range(L)):
        sums = np.cumsum(numels[first:])  # of the bucket first..i-1, for i = first + 1..L
        ends = np.maximum(end[first + 1 :], ready[first]) + _row(communicate, sums)
        if select is not nothing:
            ends += _row(select, sums)
        if first:  # to be done before the next gradient is of no use
            ends = np.maximum(ends, ready[first - 1])
        equals = np.flatnonzero(ends <= ends.min() + slack)
        choice = int(equals[buckets[first + 1 :][equals].argmin()])
        end[first] = ends[choice]
        buckets[first] = buckets[first + 1 + choice] + 1
        stops[first] = first + 1 + choice
    plan = []
    first = 0
    while first < L:
        plan.append(range(first, stops[first]))
        first = stops[first]
    return tuple(reversed(plan))


def _row(seconds: Seconds, numels: NDArray[np.int_]) -> NDArray[np.float64]:
    if isinstance(seconds, Linear):
        return seconds.startup + seconds.each * numels.astype(np.float64)
    return np.array([seconds(int(numel)) for numel in numels])


class _Step(NamedTuple):
    """How a state of the search was reached: its clock, and the bucket and state before."""

    clock: Clock
    buckets: int
    first: int
    before: _Step | None


def _best_of_states(
    ready: Sequence[float],
    numels: Sequence[int],
    communicate: Seconds,
    select: Seconds,
    where: Where,
    slack: float,
) -> Plan:
    """The best plan if several resources matter: search over all clocks that none beats."""
    L = len(numels)
    # states[j]: what is worth keeping of plans for the layers at places j..L-1.
    states: list[list[_Step]] = [[] for _ in range(L)] + [[_Step(Clock(), 0, L, None)]]
    for first in reversed(range(L)):
        reached: list[_Step] = []
        numel = 0
        for last in range(first, L):
            numel += numels[last]
            t_c, t_s = communicate(numel), select(numel)
            for state in states[last + 1]:
                clock = state.clock.after(ready[first], t_s, t_c, where)
                if first:
                    clock = clock.not_before(ready[first - 1])
                reached.append(_Step(clock, state.buckets + 1, first, state))
        states[first] = _unbeaten(reached, slack)
    step = min(states[0], key=lambda step: step.clock.network)
    plan: list[range] = []
    while step.before is not None:
        plan.append(range(step.first, step.before.first))
        step = step.before
    return tuple(reversed(plan))


def _unbeaten(steps: list[_Step], slack: float) -> list[_Step]:
    """The steps whose clocks no other beats; of about equal clocks, that of fewest buckets."""
    kept: list[_Step] = []
    for step in sorted(steps, key=lambda step: (step.clock, step.buckets)):
        if not any(other.clock.beats(step.clock, slack) for other in kept):
            kept.append(step)
    return kept


def check_layers(t_b: Sequence[float], numels: Sequence[int]) -> None:
    """Check what a plan is made from.

    Raises:
        ValueError: no layer, lists of different lengths, or a negative entry.
    """
    if not numels or len(t_b) != len(numels):
        raise ValueError(
            f"expected one time and one size for each of at least one layer, got {len(t_b)} times "
            f"and {len(numels)} sizes"
        )
    if min(t_b) < 0 or min(numels) < 0:
        raise ValueError("times and sizes of layers must be at least 0, got a negative one")


def check_plan(plan: Plan, layers: int) -> Plan:
    """Return a plan if it covers every layer once, in the order of the backward pass.

    Raises:
        ValueError: it does not.
    """
    stop = layers
    for bucket in plan:
        if bucket.stop != stop or not bucket.start < bucket.stop or bucket.step != 1:
            raise ValueError(
                f"bucket {bucket} of a plan for {layers} layers must end at layer {stop} and hold "
                "at least one layer"
            )
        stop = bucket.start
    if stop:
        raise ValueError(f"a plan for {layers} layers leaves out the first {stop}")
    return plan


def plan_buckets(
    layer_times: Sequence[float], sizes: Sequence[int], alpha: float, beta: float
) -> Plan:
    """Bucket boundaries for a backward pass whose messages of M bytes take alpha + beta M.

    Args:
        layer_times: seconds of the backward pass of each layer or parameter, in the order of the
            forward pass.
        sizes: bytes of their gradients.
        alpha: seconds of an aggregation however small: for a ring of P ranks 2 (P-1) times the
            latency of its link.
        beta: seconds a byte of an aggregation, and of selecting if that is done: for a ring
            2 (P-1)/P times that of its link.

    Returns:
        The best plan: ranges of places in `sizes`, in the order of launch.

    Raises:
        ValueError: lists of different lengths, no layer, or a negative number.
    """
    if not alpha >= 0 or not beta >= 0:
        raise ValueError(f"alpha and beta must be at least 0, got {alpha} s and {beta} s/byte")
    return best(layer_times, sizes, Linear(alpha, beta))
