"""What a training step consists of on these workers: everything that predictions are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddl.advise.candidates import Candidate
from ddl.links import Links
from ddl.perfmodel.contention import Sharing
from ddl.perfmodel.iteration import IterationProfile
from ddl.perfmodel.plans import Linear, Plan


@dataclass(frozen=True)
class Aggregation:
    """What aggregating a bucket costs with one candidate, by the elements of the bucket.

    Attributes:
        select: seconds of accumulating and selecting, alone.
        communicate: seconds of all else that the background thread does, alone.
        apply: seconds until the average is in the gradient, after the wait.
        bytes_sent: by a rank, mean over ranks.
        sharing: how fast the background thread and the backward pass go beside each other.
    """

    select: Linear
    communicate: Linear
    apply: Linear
    bytes_sent: Linear
    sharing: Sharing = field(default_factory=Sharing)


@dataclass(frozen=True)
class Situation:
    """A model, workers, links, and what they take.

    Attributes:
        model: its name.
        P: workers.
        density: fraction of entries kept.
        profile: of one worker while all others compute as well, without aggregation.
        plan: the buckets, as ranges of layers.
        links: what messages cost.
        aggregations: by the candidates compared.
    """

    model: str
    P: int
    density: float
    profile: IterationProfile
    plan: Plan
    links: Links
    aggregations: Mapping[Candidate, Aggregation]

    @property
    def numels(self) -> list[int]:
        """Elements of the buckets, in the order of launch."""
        layers = self.profile.layers
        return [sum(layers[layer].numel for layer in bucket) for bucket in self.plan]
