"""A worker whose background thread competes with its backward pass for cores.

Two threads: one computes, one aggregates the buckets that are ready. While both are busy each goes
at a share of the speed that it has alone (`Sharing`); while one waits, the other goes at full
speed. On cores of their own both shares are 1 and this is the queue of `schedules.sparse`; on one
core for both they are about 1/2 for work, and nearer to 1 for what waits for a network.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddl.perfmodel import plans
from ddl.perfmodel.dag import Span, Task
from ddl.perfmodel.iteration import Iteration, IterationProfile
from ddl.perfmodel.plans import Plan, Seconds, nothing

LEAST_SHARE = 0.05
# Two threads at once are hardly slower than one after the other. On a machine that did nothing
# else both shares came to 0.88 or more together; less, on a busy one, is other programs' doing.
LEAST_SUM = 0.9


@dataclass(frozen=True)
class Sharing:
    """Speeds of a worker's two threads while both are busy; 1 is that of each alone.

    Attributes:
        compute: of the backward pass.
        worker: of selection and communication.
    """

    compute: float = 1.0
    worker: float = 1.0

    def __post_init__(self) -> None:
        """Check the shares.

        Raises:
            ValueError: one of them is not in (0, 1].
        """
        for what in ("compute", "worker"):
            if not 0 < getattr(self, what) <= 1:
                raise ValueError(f"the share {what} must lie in (0, 1], got {getattr(self, what)}")

    @classmethod
    def observed(
        cls, compute: float, worker: float, compute_ended: float, worker_ended: float
    ) -> Sharing:
        """From one run in which both threads started at once, each with a given amount of work.

        Args:
            compute: seconds that the work of the computing thread takes alone.
            worker: seconds that the work of the other takes alone.
            compute_ended: seconds after which the computing thread was done.
            worker_ended: seconds after which the other was done.

        Returns:
            The shares; measurements that contradict each other are cut to [0.05, 1], and raised
            in proportion if they come to less than 0.9 together.

        Raises:
            ValueError: a time that is not above 0.
        """
        if not min(compute, worker, compute_ended, worker_ended) > 0:
            raise ValueError(
                f"times must be above 0 s, got {compute}, {worker}, {compute_ended}, {worker_ended}"
            )
        both = min(compute_ended, worker_ended)
        # Whoever ended last had the rest of the time to itself.
        shares = (
            _cut((compute - max(0.0, compute_ended - both)) / both),
            _cut((worker - max(0.0, worker_ended - both)) / both),
        )
        factor = max(1.0, LEAST_SUM / sum(shares))
        return cls(*(_cut(factor * share) for share in shares))


def _cut(value: float) -> float:
    return min(1.0, max(LEAST_SHARE, value))


def shared(
    profile: IterationProfile,
    plan: Plan,
    communicate: Seconds,
    select: Seconds = nothing,
    sharing: Sharing | None = None,
    apply: Seconds = nothing,
) -> Iteration:
    """An iteration with input and update in line, and aggregation beside the backward pass.

    Args:
        profile: of one worker.
        plan: the buckets.
        communicate: seconds to aggregate a bucket of so many elements, alone.
        select: seconds to select from it, alone; by the same thread.
        sharing: what the threads take from each other; None: nothing.
        apply: seconds to bring a bucket's average into the gradient, before the update.

    Raises:
        ValueError: a plan that does not fit.
    """
    layers = profile.layers
    plans.check_plan(plan, len(layers))
    sharing = Sharing() if sharing is None else sharing
    spans: list[Span] = []

    def add(name: str, resource: str, start: float, end: float) -> float:
        spans.append(Span(Task(name, resource, end - start), start, end))
        return end

    numels = [sum(layers[layer].numel for layer in bucket) for bucket in plan]
    left = [sum(layers[layer].t_b for layer in bucket) for bucket in plan]
    selecting = [select(numel) for numel in numels]
    sending = [communicate(numel) for numel in numels]
    parts = [part for pair in zip(selecting, sending, strict=True) for part in pair]

    now = add("read", "compute", 0.0, profile.t_io + profile.t_h2d)
    now = add("forward", "compute", now, now + profile.t_f)
    forward_ended = began_compute = began_worker = now
    computed = done = 0  # buckets whose backward pass is done; parts that the worker has done
    while done < len(parts):
        computing = computed < len(plan)
        working = done // 2 < computed
        both = computing and working
        fast = sharing.compute if both else 1.0
        quick = sharing.worker if both else 1.0
        to_compute = left[computed] / fast if computing else float("inf")
        to_work = parts[done] / quick if working else float("inf")
        step = min(to_compute, to_work)
        now += step
        if computing:
            left[computed] -= step * fast
        if working:
            parts[done] -= step * quick
        if to_work == step:
            kind = "communicate" if done % 2 else "select"
            add(f"{kind} bucket {done // 2}", "worker", began_worker, now)
            done += 1
            began_worker = now
        if to_compute == step:
            began_compute = add(f"backward bucket {computed}", "compute", began_compute, now)
            if done // 2 == computed:  # the worker has waited for this one
                began_worker = now
            computed += 1
    averaged = now
    for bucket, numel in enumerate(numels):
        now = add(f"apply bucket {bucket}", "compute", now, now + apply(numel))
    now = add("update", "compute", now, now + profile.t_u)
    return Iteration(
        schedule="shared",
        seconds=now,
        exposed=max(0.0, averaged - forward_ended - profile.t_b),
        t_c=sum(sending),
        t_s=sum(selecting),
        buckets=plan,
        spans=tuple(span for span in spans if span.end > span.start),
        batch=profile.batch,
    )
