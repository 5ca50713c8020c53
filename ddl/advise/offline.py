"""A situation from published figures, for those who have no cluster yet.

Rough by nature: rates of devices and links are those of `ddl.perfmodel.hardware`, layers share the
computing time by their multiply-adds, and what the engine itself takes is as stated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddl.advise.candidates import Candidate
from ddl.advise.situation import Aggregation, Situation
from ddl.links import Line, Links
from ddl.perfmodel import networks, plans
from ddl.perfmodel.hardware import compute_seconds
from ddl.perfmodel.plans import Linear

# Handling a message of the engine, between the plain hosts of `benchmarks/results`.
HOST = Line(120e-6, 5.6e-9)
# Data sheets, bytes a second.
MEMORY_RATE = {
    "k80": 240e9,
    "p102-100": 440e9,
    "v100": 900e9,
    "a100": 1555e9,
}
# Accumulating reads and writes 12 bytes an entry; a first selection takes up to twice the passes.
SELECT_BYTES = 2 * 12
LAUNCHES_SECONDS = 50e-6  # of the kernels of one selection
APPLY_BYTES = 4
UPDATE_BYTES = 20  # SGD with momentum: reads three numbers, writes two


def situation(
    model: str,
    batch: int,
    density: float,
    bucket_bytes: int,
    links: Links,
    P: int,
    device: str,
    candidates: Sequence[Candidate],
) -> Situation:
    """What a step consists of, by the figures.

    Args:
        model: one of `ddl.perfmodel.networks.NETWORKS`.
        batch: samples of a worker.
        density: fraction of entries kept.
        bucket_bytes: gradient bytes aggregated together.
        links: between the workers.
        P: workers.
        device: one of `ddl.perfmodel.hardware.RESNET50_RATE`.
        candidates: to compare.

    Raises:
        ValueError: an unknown model or device.
    """
    network = networks.find(model)
    plan = plans.by_size([4 * tensor.numel for tensor in network.tensors], bucket_bytes)
    links = Links(links.between, links.within, HOST)
    seconds_per_byte = 1 / MEMORY_RATE[device.removesuffix("-amp")]
    profile = replace(
        network.profile(compute_seconds(device, network, batch), batch),
        t_u=UPDATE_BYTES * network.numel * seconds_per_byte,
    )
    select = Linear(LAUNCHES_SECONDS, SELECT_BYTES * seconds_per_byte)
    apply = Linear(0.0, APPLY_BYTES * seconds_per_byte)
    nothing = Linear(0.0, 0.0)
    numels = [sum(profile.layers[layer].numel for layer in bucket) for bucket in plan]
    aggregations = {}
    for candidate in candidates:
        cost = candidate.communicate(P, density, links)
        sent = Linear.like(lambda n, c=candidate: c.cost(P, n, density).sent_bytes, max(numels))  # type: ignore[misc]
        aggregations[candidate] = Aggregation(
            nothing if candidate.is_dense else select,
            Linear.like(cost, max(numels)),
            nothing if candidate.is_dense else apply,
            sent,
        )
    return Situation(model, P, density, profile, plan, links, aggregations)
