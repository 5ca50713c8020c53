"""What is compared: a compressor and the collective by which it aggregates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddl.collectives.by_size import EXACT_FROM
from ddl.compressors import AUTO, EXACT_RATIO, GTOPK_CHOICES, is_exact, make_compressor
from ddl.density import entries
from ddl.links import Links
from ddl.perfmodel import costs
from ddl.perfmodel.costs import Cost

ALL_REDUCE, ALL_GATHER = "all-reduce", "all-gather"
# In the order of what they leave to later steps, which settles near ties. Random-k ignores what
# gradients say, so it is never advised.
DEFAULT = (
    "none",
    "topk",
    "gaussiank",
    "gtopk:exact",
    "gtopk:butterfly",
    "gaussiank-gtopk",
    "randomk",
)


@dataclass(frozen=True)
class Candidate:
    """A row of the table.

    Attributes:
        label: as the user writes it, `compressor` or `compressor:collective`.
        compressor: one of `ddl.COMPRESSORS`.
        collective: what it aggregates by.
        choice: the `collective` to give to `ddl.DistributedOptimizer`; None where there is none.
    """

    label: str
    compressor: str
    collective: str
    choice: str | None

    @property
    def is_dense(self) -> bool:
        """Whether gradients travel whole."""
        return self.compressor == "none"

    @property
    def is_advisable(self) -> bool:
        """Whether it is for training, not only for studies."""
        return self.compressor != "randomk"

    @property
    def arguments(self) -> dict[str, Any]:
        """For `ddl.DistributedOptimizer`."""
        choice = {} if self.choice is None else {"collective": self.choice}
        return {"compressor": self.compressor, **choice}

    def cost(self, P: int, numel: int, density: float) -> Cost:
        """What aggregating a bucket of so many elements costs among P workers."""
        if self.is_dense:
            return costs.dense(P, numel)
        k = entries(numel, density)
        if self.compressor == "randomk":
            return costs.aligned(P, k)
        winners = k * EXACT_RATIO if is_exact(self.collective, P) else None
        return costs.SPARSE[self.collective](P, k, costs.PLAIN_ENTRY_BYTES, winners)

    def communicate(self, P: int, density: float, links: Links) -> Callable[[int], float]:
        """Seconds for so many elements, by the formulas and what messages cost."""
        if P == 1:
            return lambda numel: 0.0
        return lambda numel: links.seconds(self.cost(P, numel, density))


def find(label: str, P: int) -> Candidate:
    """The candidate of a label; where it leaves the collective open, the engine's default for P.

    Args:
        label: `compressor` or `compressor:collective`.
        P: workers.

    Raises:
        ValueError: there is none; says what there is.
    """
    name, _, collective = label.partition(":")
    if collective == AUTO:
        named = ", ".join(choice for choice in GTOPK_CHOICES if choice != AUTO)
        raise ValueError(f"{label!r} would choose by itself, expected one of {named} after the :")
    kind = make_compressor(name, collective or None)
    if kind.is_dense or name == "randomk":
        return Candidate(label, name, ALL_REDUCE, None)
    if "gtopk" not in name:
        return Candidate(label, name, ALL_GATHER, None)
    chosen = collective or ("exact" if P >= EXACT_FROM else "butterfly")
    return Candidate(label, name, chosen, chosen)
