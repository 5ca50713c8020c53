"""Bucket boundaries from measurement: `bucket_bytes="auto"`.

1. *Watch.* In the first steps, with the default buckets: when each parameter gets its gradient, and
   what each bucket costs to select from and to communicate.
2. *Plan.* Once: the averages of all ranks go into the best plan of `ddl.perfmodel.plans`, with
   what one more message costs by the formulas, from links measured now. Where the ranks of a
   machine leave no core to the background thread, what it computes hides nothing.
3. *Move.* If the plan is predicted to save at least 3 % of a step, parameters move into new
   buckets, and what is owed with them. All ranks decide alike, from the same numbers.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple
from itertools import pairwise
from typing import NamedTuple

import torch

from ddl.aggregation.aggregator import Aggregator, Outcome
from ddl.collectives import messages
from ddl.comm import Communicator
from ddl.compressors import Compressor, is_exact
from ddl.density import entries
from ddl.links import Links, measure_links
from ddl.perfmodel import costs, plans
from ddl.perfmodel.contention import Sharing, shared
from ddl.perfmodel.iteration import IterationProfile, LayerProfile
from ddl.perfmodel.plans import Linear, Plan
from ddl.reduction.buckets import Bucket, NamedParameter

logger = logging.getLogger(__name__)

FIRST_STEP, LAST_STEP = 2, 5  # that are watched; the first ones warm up
LEAST_GAIN = 0.03  # of a step
KEPT = ("residual", "velocity")  # by an aggregator, of each entry
BUCKET_SECONDS = 1e-4  # a bucket more: hooks, a task, kernels; Python's time


class Watched(NamedTuple):
    """What one rank has seen, medians over steps, in seconds.

    Attributes:
        t_b: of each parameter, in the order of the forward pass.
        select, communicate: of each bucket, in the order of launch.
        busy: share of the background thread's time in which it used a core or waited for one.
        step: of a whole step.
        crowded: the ranks of this machine have more threads than it has cores.
    """

    t_b: list[float]
    select: list[float]
    communicate: list[float]
    busy: float
    step: float
    crowded: bool


class Planner:
    """Watches one reducer's first steps, then plans once.

    Attributes:
        due: whether enough was seen.
    """

    def __init__(
        self, buckets: Sequence[Bucket], compressor: Compressor, comm: Communicator
    ) -> None:
        """Watch.

        Args:
            buckets: all there are, of one kind of parameter.
            compressor: how they are aggregated.
            comm: the ranks.
        """
        self._compressor = compressor
        self.members = [m for bucket in reversed(buckets) for m in reversed(bucket.members)]
        self._numels = [bucket.flat.numel() for bucket in buckets]
        self._sizes = [len(bucket.members) for bucket in buckets]
        places = {id(member.parameter): i for i, member in enumerate(self.members)}
        self._layer = [[places[id(m.parameter)] for m in bucket.members] for bucket in buckets]
        self._comm = comm
        self._ready = [0.0] * len(self.members)
        self._cpu = [0.0] * len(buckets)
        self._rows: list[list[float]] = []
        self._step_seconds: list[float] = []
        self._steps = 0
        self._last_end = 0.0

    @property
    def due(self) -> bool:
        """Whether enough was seen."""
        return self._steps >= LAST_STEP

    def saw_gradient(self, index: int, place: int) -> None:
        """The parameter at `place` of bucket `index` has its gradient now."""
        self._ready[self._layer[index][place]] = time.perf_counter()

    def saw_work(self, index: int, seconds: float) -> None:
        """The background thread has so long used a core, or waited for one, for bucket `index`."""
        self._cpu[index] = seconds

    def end_step(self, outcomes: Sequence[Outcome]) -> None:
        """A step is over."""
        now = time.perf_counter()
        self._steps += 1
        if self._steps >= FIRST_STEP:
            latest = min(self._ready)
            ends = [latest]
            for moment in reversed(self._ready):
                latest = max(latest, moment)
                ends.append(latest)
            t_b = [end - start for start, end in pairwise(ends)][::-1]
            select = [outcome.select_seconds for outcome in outcomes]
            communicate = [outcome.ended - outcome.started for outcome in outcomes]
            self._rows.append([*t_b, *select, *communicate, *self._cpu])
            self._step_seconds.append(now - self._last_end)
        self._last_end = now

    def watched(self) -> Watched:
        """What this rank has seen so far."""
        medians = [statistics.median(column) for column in zip(*self._rows, strict=True)]
        L, B = len(self.members), len(self._numels)
        select, communicate = medians[L : L + B], medians[L + B : L + 2 * B]
        work = sum(select) + sum(communicate)
        busy = min(1.0, sum(medians[L + 2 * B :]) / work) if work > 0 else 1.0
        threads = self._comm.local_size * (torch.get_num_threads() + 1)
        step = statistics.median(self._step_seconds)
        return Watched(medians[:L], select, communicate, busy, step, threads > _cores())

    def plan(self, density: float) -> list[list[NamedParameter]] | None:
        """The members of new buckets, in the order of launch; None to keep those there are.

        Collective; the same on every rank.

        Args:
            density: fraction of entries kept.
        """
        compressor = self._compressor
        everyone = [Watched(*w) for w in messages.gather_objects(self._comm, tuple(self.watched()))]
        links = measure_links(self._comm, wire=compressor.wire)
        seen = _mean(everyone)
        sizes = [member.parameter.numel() for member in self.members]
        old = _plan_of(self._sizes, len(self.members))
        best, gain = choose(seen, sizes, old, compressor, density, self._comm.size, links)
        moves = gain >= LEAST_GAIN * seen.step
        logger.log(
            logging.INFO if self._comm.rank == 0 else logging.DEBUG,
            "buckets: %s of %s M entries; %s M would save %.3g ms of %.4g ms a step (%s)",
            "leaving those" if moves else "keeping those",
            "+".join(f"{numel / 1e6:.3g}" for numel in self._numels),
            "+".join(f"{sum(sizes[place] for place in b) / 1e6:.3g}" for b in best),
            1e3 * gain,
            1e3 * seen.step,
            links,
        )
        if not moves:
            return None
        return [[self.members[place] for place in reversed(bucket)] for bucket in best]


def choose(
    seen: Watched,
    sizes: Sequence[int],
    old: Plan,
    compressor: Compressor,
    density: float,
    P: int,
    links: Links,
) -> tuple[Plan, float]:
    """The best plan, and the seconds of a step that it is predicted to save.

    Args:
        seen: the averages of all ranks.
        sizes: elements of the parameters, in the order of the forward pass.
        old: the plan under which that was seen.
        compressor: how buckets are aggregated.
        density: fraction of entries kept.
        P: ranks.
        links: what messages cost.
    """
    numel = sum(sizes)
    # What one more bucket costs, whatever is in it.
    startup = 0.0 if P == 1 else links.seconds(_cost(compressor, P, 1, density))
    communicate = _line(startup, sum(seen.communicate), len(old), numel)
    select = _line(BUCKET_SECONDS, sum(seen.select), len(old), numel)
    layers = tuple(
        LayerProfile(f"layer {i}", size, t_b=t)
        for i, (size, t) in enumerate(zip(sizes, seen.t_b, strict=True))
    )
    profile = IterationProfile(layers)
    sharing = Sharing()
    if seen.crowded:
        # A thread that waits for another rank's thread to get a core hides nothing either, so no
        # more than the links take counts as waiting.
        network = _cost(compressor, P, numel, density).seconds(*astuple(links.between))
        work = sum(seen.select) + sum(seen.communicate)
        waits = min(1.0 - seen.busy, network / work) if work > 0 else 0.0
        sharing = Sharing((1 + waits) / 2, (1 + waits) / 2)

    def seconds(plan: Plan) -> float:
        return shared(profile, plan, communicate, select, sharing).seconds

    best = plans.best(seen.t_b, sizes, communicate, select)
    return best, seconds(old) - seconds(best)


def _cost(compressor: Compressor, P: int, numel: int, density: float) -> costs.Cost:
    """Of a bucket of so many elements, by the formulas."""
    k = entries(numel, density)
    if compressor.is_dense:
        return costs.dense_ring(P, numel)
    winners = k * compressor.ratio(P)
    name = "exact" if is_exact(compressor.collective_name, P) else compressor.collective_name
    if name in costs.SPARSE:
        return costs.SPARSE[name](P, k, costs.PLAIN_ENTRY_BYTES, winners)
    # Few ranks, or chosen bucket by bucket: the butterfly has the fewest messages.
    return costs.butterfly(P, k, costs.PLAIN_ENTRY_BYTES, winners)


def _line(startup: float, total: float, buckets: int, numel: int) -> Linear:
    """Seconds of a bucket, from those of all together; the startup is given."""
    startup = min(startup, total / buckets)
    return Linear(startup, (total - buckets * startup) / max(1, numel))


def _mean(everyone: Sequence[Watched]) -> Watched:
    def means(rows: Sequence[Sequence[float]]) -> list[float]:
        return [statistics.fmean(column) for column in zip(*rows, strict=True)]

    return Watched(
        means([w.t_b for w in everyone]),
        means([w.select for w in everyone]),
        means([w.communicate for w in everyone]),
        statistics.fmean(w.busy for w in everyone),
        statistics.fmean(w.step for w in everyone),
        any(w.crowded for w in everyone),
    )


def _plan_of(counts: Sequence[int], layers: int) -> Plan:
    """The ranges of layers of buckets with so many members, in the order of launch."""
    stop, plan = layers, []
    for count in counts:
        plan.append(range(stop - count, stop))
        stop -= count
    return tuple(plan)


def planner_of(
    buckets: Sequence[Bucket],
    aggregators: Sequence[Aggregator],
    compressor: Compressor,
    comm: Communicator,
) -> Planner | None:
    """Who plans; None, and a line in the log, where parameters cannot move.

    Args:
        buckets: all there are.
        aggregators: theirs.
        compressor: how they are aggregated.
        comm: the ranks.
    """
    if can_plan(buckets, aggregators):
        return Planner(buckets, compressor, comm)
    logger.warning('bucket_bytes="auto" has no effect: parameters are of several kinds')
    return None


def can_plan(buckets: Sequence[Bucket], aggregators: Sequence[Aggregator]) -> bool:
    """Whether parameters can move between these buckets.

    They can if all are of one kind, on the CPU, and each rank owes for all entries of a bucket, or
    for none.
    """
    kinds = {(bucket.flat.dtype, bucket.flat.device.type, bucket.dense) for bucket in buckets}
    if len(kinds) != 1 or buckets[0].flat.device.type != "cpu":
        return False
    return all(
        a.residual is None or a.residual.numel() == bucket.flat.numel()
        for bucket, a in zip(buckets, aggregators, strict=True)
    )


def carry_over(
    old: Sequence[tuple[Bucket, Aggregator]], new: Sequence[tuple[Bucket, Aggregator]]
) -> None:
    """Keep in the new buckets what the old ones kept, parameter by parameter, to the bit.

    That is residuals and velocities.

    Random draws go on where the old buckets' were, so that none is drawn twice.

    Args:
        old: buckets and their aggregators, between two steps.
        new: others of the same parameters.
    """
    kept = {
        (kind, id(member.parameter)): bucket.part(getattr(aggregator, kind), place)
        for bucket, aggregator in old
        for kind in KEPT
        if getattr(aggregator, kind) is not None
        for place, member in enumerate(bucket.members)
    }
    drawn = max((a.draws.drawn for _, a in old if a.draws is not None), default=0)
    for bucket, aggregator in new:
        if aggregator.draws is not None:
            aggregator.draws.drawn = drawn
        for kind in KEPT:
            whole = getattr(aggregator, kind)
            if whole is not None:
                for place, member in enumerate(bucket.members):
                    bucket.part(whole, place).copy_(kept[kind, id(member.parameter)])


def core_seconds() -> float:
    """How long this thread has used a core, or waited for its turn on one."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            used, waited, _ = file.read().split()
        return (int(used) + int(waited)) / 1e9
    except (OSError, ValueError):  # not Linux, or one that does not count the waits
        return time.thread_time()


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
