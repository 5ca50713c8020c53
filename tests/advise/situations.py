"""Situations whose truth is known."""

from ddl.advise import candidates
from ddl.advise.situation import Aggregation, Situation
from ddl.links import Line, Links
from ddl.perfmodel.contention import Sharing
from ddl.perfmodel.iteration import IterationProfile, LayerProfile
from ddl.perfmodel.plans import Linear

LINKS = Links(Line(1e-3, 1e-8))


def situation(*labels, P=4, density=0.01, sharing=None, links=LINKS, t_b=(0.2, 0.1)):
    """Two layers of 1 and 3 million, a bucket each; communication as the formulas say."""
    layers = tuple(
        LayerProfile(f"layer{place}", numel, 0.05, t)
        for place, (numel, t) in enumerate(zip((1_000_000, 3_000_000), t_b, strict=True))
    )
    aggregations = {}
    for candidate in (candidates.find(label, P) for label in labels):
        nothing = Linear(0.0, 0.0)
        aggregations[candidate] = Aggregation(
            select=nothing if candidate.is_dense else Linear(0.0, 1e-9),
            communicate=Linear.like(candidate.communicate(P, density, links), 4_000_000),
            apply=nothing if candidate.is_dense else Linear(0.0, 5e-10),
            bytes_sent=Linear.like(lambda n, c=candidate: c.cost(P, n, density).sent_bytes, 10**6),
            sharing=sharing or Sharing(),
        )
    profile = IterationProfile(layers, t_io=0.01, t_u=0.02, batch=32)
    plan = (range(1, 2), range(0, 1))
    return Situation("toy", P, density, profile, plan, links, aggregations)
