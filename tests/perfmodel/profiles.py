"""Random profiles: the schedules' and plans' tests run over them."""

import random

from ddl.perfmodel.iteration import IterationProfile, LayerProfile
from ddl.perfmodel.plans import Linear


def random_profile(seed, most_layers):
    """Layers of very different sizes and times, some of them nothing; and a cost a + b M.

    All regimes occur: communication hidden, communication that takes longer than everything else,
    start-up times of nothing and of more than a whole backward pass.
    """
    draw = random.Random(seed)
    layers = tuple(
        LayerProfile(
            f"layer{place}",
            numel=draw.choice([0, 1, *(int(draw.lognormvariate(6, 3)) for _ in range(6))]),
            t_f=draw.expovariate(1),
            t_b=draw.choice([0.0, *(draw.expovariate(1) for _ in range(6))]),
        )
        for place in range(draw.randint(1, most_layers))
    )
    profile = IterationProfile(
        layers, t_io=draw.expovariate(0.5), t_h2d=draw.expovariate(2), t_u=draw.expovariate(5)
    )
    numel = max(1, profile.numel)
    startup = draw.choice([0.0, draw.expovariate(10), draw.expovariate(1), draw.expovariate(0.1)])
    each = draw.choice([0.1, 1.0, 10.0]) * draw.expovariate(1) * profile.t_b / numel
    return profile, Linear(startup, each)


def random_selection(seed):
    """The cost of a selection, of the same order as a layer's times."""
    draw = random.Random(-seed)
    return Linear(draw.choice([0.0, draw.expovariate(5)]), draw.expovariate(1) / 3000)
