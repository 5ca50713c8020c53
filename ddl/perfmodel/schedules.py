"""Schedules of an iteration: which of its parts run at the same time.

Each schedule is a graph of tasks (`dag.py`), run by the clock. In closed form, with t_c the time of
all communication and t_c_no the part that stays exposed (arXiv 1711.05979, performance models):

    naive          t_io' + t_h2d + t_f + t_b + t_c + t_u
    io_overlap     max(t_io' + t_h2d, t_f + t_b + t_c + t_u)
    wfbp           max(t_io' + t_h2d, t_f + t_b + t_c_no + t_u), a message for every layer
    merged         the same, with the best buckets (arXiv 1811.11141; `plans.py`)
    sparse         the same, with selection before each communication

Costs are functions of the elements of a bucket, such as
`lambda numel: costs.tree(16, 0.001 * numel).seconds(alpha, beta)`.
"""

from __future__ import annotations

from ddl.perfmodel import plans
from ddl.perfmodel.dag import Task, run
from ddl.perfmodel.iteration import Iteration, IterationProfile
from ddl.perfmodel.plans import Plan, Seconds, Where, nothing


def naive(profile: IterationProfile, communicate: Seconds, plan: Plan | None = None) -> Iteration:
    """Everything after everything else: read, copy, forward, backward, aggregate, update.

    Args:
        profile: of one worker.
        communicate: seconds to aggregate so many elements.
        plan: what is aggregated together; layer by layer if None, as the papers have it.
    """
    return iterate(
        profile,
        communicate,
        plan or plans.layerwise(len(profile.layers)),
        name="naive",
        overlap_input=False,
        overlap_backward=False,
    )


def io_overlap(
    profile: IterationProfile, communicate: Seconds, plan: Plan | None = None
) -> Iteration:
    """Samples of the next iteration are read and copied during this one. Arguments as `naive`."""
    return iterate(
        profile,
        communicate,
        plan or plans.layerwise(len(profile.layers)),
        name="io_overlap",
        overlap_backward=False,
    )


def wfbp(profile: IterationProfile, communicate: Seconds) -> Iteration:
    """Wait-free backpropagation: each layer is aggregated as soon as its gradient is there.

    Messages go one after the other, in the order of the backward pass. Arguments as `naive`.
    """
    return iterate(profile, communicate, plans.layerwise(len(profile.layers)), name="wfbp")


def merged(
    profile: IterationProfile, communicate: Seconds, startup: float | None = None
) -> Iteration:
    """Wait-free backpropagation with layers merged into fewer messages.

    Args:
        profile: of one worker.
        communicate: seconds to aggregate so many elements.
        startup: None for the best plan. Otherwise the published greedy rule of MG-WFBP, with this
            many seconds saved by a merge (the `a` of a cost a + b M). See `plans.py` for both.
    """
    t_b = [layer.t_b for layer in profile.layers]
    numels = [layer.numel for layer in profile.layers]
    if startup is None:
        plan = plans.best(t_b, numels, communicate)
    else:
        plan = plans.greedy(t_b, numels, communicate, startup)
    return iterate(profile, communicate, plan, name="merged")


def sparse(
    profile: IterationProfile,
    communicate: Seconds,
    select: Seconds,
    where: Where = "worker",
    plan: Plan | None = None,
) -> Iteration:
    """Selection, then communication, for every bucket as it gets ready.

    With `where="compute"` it is the model of OMGS-SGD (Shi et al., INFOCOM 2020): selecting from a
    layer delays the backward pass of all layers below it.

    Args:
        profile: of one worker.
        communicate: seconds to aggregate what was selected from so many elements.
        select: seconds to select from so many elements.
        where: selection runs.
        plan: the buckets; the best plan if None.
    """
    if plan is None:
        t_b = [layer.t_b for layer in profile.layers]
        numels = [layer.numel for layer in profile.layers]
        plan = plans.best(t_b, numels, communicate, select, where)
    return iterate(profile, communicate, plan, name="sparse", select=select, where=where)


def iterate(
    profile: IterationProfile,
    communicate: Seconds,
    plan: Plan,
    *,
    name: str = "custom",
    select: Seconds = nothing,
    where: Where = "worker",
    overlap_input: bool = True,
    overlap_backward: bool = True,
) -> Iteration:
    """Any schedule: build its graph and run it.

    Args:
        profile: of one worker.
        communicate: seconds to aggregate a bucket of so many elements.
        plan: the buckets.
        name: of the schedule, for the result.
        select: seconds to select from a bucket of so many elements.
        where: selection runs.
        overlap_input: read and copy the next samples during the iteration, not before it.
        overlap_backward: launch buckets when they are ready, not after the backward pass.

    Raises:
        ValueError: a plan that does not fit, an unknown place, a cost below 0.
    """
    layers = profile.layers
    plans.check_plan(plan, len(layers))
    if where not in plans.PLACES:
        raise ValueError(f"where must be one of {', '.join(plans.PLACES)}, got {where!r}")
    selects = select is not nothing
    sender = "worker" if selects and where == "worker" else "network"
    chooser = {"worker": "worker", "thread": "selector", "compute": "compute"}[where]
    tasks: list[Task] = []

    def add(what: str, resource: str, seconds: float, *after: int) -> int:
        tasks.append(Task(what, resource, seconds, after))
        return len(tasks) - 1

    def backward(bucket: range) -> int:
        for layer in reversed(bucket):
            add(f"backward {layers[layer].name}", "compute", layers[layer].t_b)
        return len(tasks) - 1

    def aggregate(bucket: range, ready: int) -> int:
        numel = sum(layers[layer].numel for layer in bucket)
        what = f"{layers[bucket.stop - 1].name}..{layers[bucket.start].name}"
        if selects:
            ready = add(f"select {what}", chooser, select(numel), ready)
        return add(f"communicate {what}", sender, communicate(numel), ready)

    read = add("read", "input", profile.t_io_shared)
    copied = add("copy", "input", profile.t_h2d, read)
    forward = add("forward", "compute", profile.t_f, *(() if overlap_input else (copied,)))
    if overlap_backward:
        averages = [aggregate(bucket, backward(bucket)) for bucket in plan]
    else:
        ready = backward(range(len(layers)))
        averages = [aggregate(bucket, ready) for bucket in plan]
    add("update", "compute", profile.t_u, averages[-1])

    spans = run(tasks)
    return Iteration(
        schedule=name,
        # What overlaps the input works on samples read during the iteration before.
        seconds=max(span.end for span in spans),
        exposed=max(0.0, spans[averages[-1]].end - spans[forward].end - profile.t_b),
        t_c=sum(tasks[average].seconds for average in averages),
        t_s=sum(task.seconds for task in tasks if task.name.startswith("select ")),
        buckets=plan,
        spans=spans,
        batch=profile.batch,
    )
