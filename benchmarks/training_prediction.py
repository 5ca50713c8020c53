"""What `ddl.perfmodel` predicts of an iteration, from parts that were measured.

Forward and backward passes are those of ranks that do not communicate; the seconds that a bucket
takes to be selected from and communicated are those of the run that is predicted. So what is tested
is the schedule: whether the parts overlap as the model says.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from training_loop import BucketTimes, Measured

from ddl.perfmodel.iteration import IterationProfile, LayerProfile
from ddl.perfmodel.schedules import iterate


def profile(model: nn.Module, computed: Measured, batch: int) -> IterationProfile:
    """Parameter by parameter; the forward pass is not split, the first one has all of it.

    A parameter's backward pass lasts from the gradient of the one behind it to its own; of those
    that come in another order, the last counts.
    """
    names = [name for name, _ in model.named_parameters()]
    numels = [parameter.numel() for parameter in model.parameters()]
    parts = {name: part.median for name, part in computed.parts.items()}
    ends = [0.0]
    for moment in reversed([parts["t_b"], *computed.ready[1:]]):
        ends.append(min(parts["t_b"], max(ends[-1], moment)))
    t_b = [end - begin for begin, end in pairwise(ends)][::-1]
    layers = tuple(
        LayerProfile(name, numel, 0.0 if place else parts["t_f"], seconds)
        for place, (name, numel, seconds) in enumerate(zip(names, numels, t_b, strict=True))
    )
    return IterationProfile(
        layers, t_io=parts["t_io"], t_h2d=parts["t_h2d"], t_u=parts["t_u"], batch=batch
    )


def predict(measured: IterationProfile, buckets: list[BucketTimes]) -> dict[str, float]:
    """Seconds of an iteration by schedule.

    What reading takes is not overlapped by either: with readers ahead, the profile has only what
    they do not hide.

    Args:
        measured: parts of an iteration without communication.
        buckets: those of the engine, together all layers, the last layers first.

    Returns:
        naive: everything after everything else; wfbp: the engine's buckets travel while the
        backward pass goes on (arXiv 1711.05979, performance models).
    """
    plan, stop = [], len(measured.layers)
    for bucket in buckets:
        start, left = stop, bucket.numel
        while left > 0:
            start -= 1
            left -= measured.layers[start].numel
        plan.append(range(start, stop))
        stop = start
    select = _mean_by_numel([(bucket.numel, bucket.select) for bucket in buckets])
    communicate = _mean_by_numel([(bucket.numel, bucket.communicate) for bucket in buckets])
    return {
        name: iterate(
            measured,
            lambda numel: communicate[int(numel)],
            tuple(plan),
            name=name,
            select=lambda numel: select[int(numel)],
            overlap_input=False,
            overlap_backward=overlaps,
        ).seconds
        for name, overlaps in (("naive", False), ("wfbp", True))
    }


def _mean_by_numel(seconds: list[tuple[int, float]]) -> dict[int, float]:
    """The model knows buckets by their size alone."""
    by_numel: dict[int, list[float]] = {}
    for numel, one in seconds:
        by_numel.setdefault(numel, []).append(one)
    return {numel: sum(several) / len(several) for numel, several in by_numel.items()}
