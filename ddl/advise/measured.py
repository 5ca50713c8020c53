"""A situation as it is measured, on the workers that are to train.

Everything is measured in rounds: a step without aggregation, each candidate's aggregation, and, if
wanted, some real steps with each. So a machine that gets busier meets all alike, and medians over
the rounds belong together.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from ddl.advise.candidates import Candidate
from ddl.advise.computation import Computation
from ddl.advise.probes import Probe
from ddl.advise.situation import Aggregation, Situation
from ddl.advise.trials import Trial
from ddl.advise.workloads import Workload
from ddl.comm import Communicator
from ddl.links import Links, measure_links
from ddl.nodes import find_nodes
from ddl.perfmodel import plans
from ddl.perfmodel.contention import Sharing
from ddl.perfmodel.plans import Linear

LONGEST_SECONDS = 3.0  # of one aggregation: a larger bucket is not tried but extrapolated
SLOW_SECONDS = 0.5
MOST_ROUNDS = 3  # times as many as asked for, while medians are not settled
REPEATS = 3  # in a round, of the quick candidates, where others are slow


@dataclass(frozen=True)
class Measurement:
    """What the rounds gave; the same on every rank.

    Attributes:
        situation: to predict from.
        measured: seconds of a step and their spread, by candidate, where trials were wanted.
        own_share: of the cores that these ranks could use, what they got; the rest other programs
            took. None where nothing was measured.
    """

    situation: Situation
    measured: Mapping[Candidate, tuple[float, float]]
    own_share: float | None = None


def measure(
    workload: Workload,
    candidates: Sequence[Candidate],
    density: float,
    bucket_bytes: int,
    comm: Communicator,
    *,
    rounds: int,
    verify_steps: int = 0,
) -> Measurement:
    """Measure everything. Collective.

    Args:
        workload: its model is used up.
        candidates: to compare.
        density: fraction of entries kept.
        bucket_bytes: as for `ddl.DistributedOptimizer`.
        comm: the ranks; nothing else may use it meanwhile.
        rounds: at least 1; medians over them count. Up to three times as many where they scatter.
        verify_steps: real steps with each candidate in each round.

    Raises:
        CommunicationError: a rank is gone, or did not take part in time.
    """
    links = measure_links(comm, find_nodes(comm) if comm.size > 1 else None)
    copies = [workload.copy() for _ in candidates] if verify_steps else []
    computation = Computation(workload, bucket_bytes, comm)
    plan = plan_of(computation, bucket_bytes)
    numels = [sum(computation.members[i].parameter.numel() for i in bucket) for bucket in plan]
    gradient = computation.gradient()
    largest = max(2, max(numels))
    if gradient.numel() < largest:  # a single number to learn
        gradient = gradient.repeat(largest)
    probes = []
    for candidate in candidates:
        size = _affordable(candidate, largest, density, links, comm.size)
        probes.append(Probe(candidate, gradient, size, density, comm))
    trials = [
        Trial(candidate, copy, density, bucket_bytes, comm)
        for candidate, copy in zip(candidates, copies, strict=False)
    ]
    slow = [
        place
        for place, candidate in enumerate(candidates)
        if candidate.communicate(comm.size, density, links)(largest) > SLOW_SECONDS
    ]
    quick = [place for place in range(len(probes)) if place not in slow]
    t_b = 0.0
    if comm.rank == 0:
        print(
            f"measuring {len(candidates)} candidates in {rounds} rounds or more: minutes, on a "
            "machine that does nothing else",
            file=sys.stderr,
            flush=True,
        )
    bar = tqdm(
        desc="measuring",
        unit=" rounds",
        disable=comm.rank > 0 or not sys.stderr.isatty(),
        leave=False,
    )
    for turn in range(1 + MOST_ROUNDS * rounds):
        if turn > rounds and computation.settled and all(trial.settled for trial in trials):
            break
        bar.update()
        count = turn > 0  # the first round warms up
        # Quick ones more often, to be spread over the time that slow ones take.
        places = slow + (REPEATS if slow and count else 1) * quick
        if turn > rounds and trials:
            places = [place for place in places if not trials[place].settled]
            computation.step()
        for place in places:
            computation.step(count=False)  # others have used the caches; trials warm up, too
            computation.step(count)
            if count:
                t_b = computation.backward_seconds
            probes[place].measure(computation, t_b, count)
            if trials:
                trials[place].run(verify_steps if count else 1, count)
    bar.close()
    profile = computation.profile()
    situation = Situation(
        workload.name,
        comm.size,
        density,
        profile,
        plan,
        links,
        {
            candidate: probe.aggregation(computation.backward_seconds)
            for candidate, probe in zip(candidates, probes, strict=True)
        },
    )
    measured = {
        candidate: (trial.seconds, trial.spread)
        for candidate, trial in zip(candidates, trials, strict=False)
    }
    for probe in probes:
        probe.close()
    for trial in trials:
        trial.close()
    computation.close()
    return Measurement(situation, measured, computation.own_share)


def plan_of(computation: Computation, bucket_bytes: int) -> plans.Plan:
    """The engine's buckets, as ranges of layers."""
    sizes = [m.parameter.numel() * m.parameter.element_size() for m in computation.members]
    return plans.by_size(sizes, bucket_bytes)


def _affordable(candidate: Candidate, numel: int, density: float, links: Links, P: int) -> int:
    """So many elements, or fewer if aggregating them would take too long."""
    seconds = candidate.communicate(P, density, links)
    while numel > 4096 and seconds(numel) > LONGEST_SECONDS:
        numel //= 2
    return numel


def imagined(
    situation: Situation, P: int, links: Links, candidates: Sequence[Candidate]
) -> Situation:
    """One worker's computing and selecting as measured, among others on another network.

    Args:
        situation: measured on a single worker.
        P: workers, each on a machine of its own.
        links: between them; the host's work as measured.
        candidates: for so many workers, in the order of those in the situation.
    """
    joined = Links(links.between, links.within, situation.links.host)
    numel = max(situation.numels)
    aggregations = {}
    for candidate, known in zip(candidates, situation.aggregations.values(), strict=True):
        line = Linear.like(candidate.communicate(P, situation.density, joined), numel)
        own = known.communicate
        sent = Linear.like(
            lambda n, c=candidate: c.cost(P, n, situation.density).sent_bytes,  # type: ignore[misc]
            numel,
        )
        aggregations[candidate] = Aggregation(
            known.select,
            Linear(line.startup + own.startup, line.each + own.each),
            known.apply,
            sent,
            # Beside the backward pass runs mostly waiting, which takes nothing from it.
            Sharing(),
        )
    return Situation(
        situation.model,
        P,
        situation.density,
        situation.profile,
        situation.plan,
        joined,
        aggregations,
    )
