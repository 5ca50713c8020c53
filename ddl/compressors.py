"""The compressors by name: pairings of a selector and a collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ddl.collectives import Collective, aligned, allgather, gtopk
from ddl.selectors import GaussianK, RandomK, Selector, TopK

GTOPK_COLLECTIVES: Mapping[str, Collective] = MappingProxyType(
    {"tree": gtopk.tree, "butterfly": gtopk.butterfly}
)
DEFAULT_GTOPK = "butterfly"


@dataclass(frozen=True)
class Compressor:
    """How one kind of compression selects and aggregates.

    Attributes:
        name: what the user calls it.
        make_selector: a new selector for a bucket, given a seed that is the bucket's own; None
            for the dense all-reduce.
        collective: aggregates the selected entries; None for the dense all-reduce.
        collective_name: the collective's name, for logs.
    """

    name: str
    make_selector: Callable[[int], Selector] | None
    collective: Collective | None
    collective_name: str

    @property
    def is_dense(self) -> bool:
        """Whether gradients are aggregated whole."""
        return self.make_selector is None


def _topk(seed: int) -> Selector:
    return TopK()


def _gaussiank(seed: int) -> Selector:
    return GaussianK()


# Name: selector, collective, its name. A collective of None stands for the gTop-k the user chose.
_TABLE: Mapping[str, tuple[Callable[[int], Selector] | None, Collective | None, str]] = {
    "none": (None, None, "all-reduce"),
    "topk": (_topk, allgather.all_gather, "all-gather"),
    "gtopk": (_topk, None, ""),
    "gaussiank": (_gaussiank, allgather.all_gather, "all-gather"),
    "gaussiank-gtopk": (_gaussiank, None, ""),
    "randomk": (RandomK, aligned.all_reduce, "all-reduce of values"),
}

COMPRESSORS: tuple[str, ...] = tuple(_TABLE)


def make_compressor(name: str, collective: str | None = None) -> Compressor:
    """Look a compressor up.

    Args:
        name: one of `COMPRESSORS`.
        collective: for `gtopk` and `gaussiank-gtopk`: "tree" or "butterfly" (default).

    Raises:
        ValueError: unknown name or collective, or a collective for a compressor without a choice.
    """
    if name not in _TABLE:
        raise ValueError(f"compressor must be one of {', '.join(COMPRESSORS)}, got {name!r}")
    make_selector, function, function_name = _TABLE[name]
    if make_selector is None or function is not None:
        if collective is not None:
            raise ValueError(
                f"compressor {name!r} has no choice of collective, got {collective!r}; leave it out"
            )
        return Compressor(name, make_selector, function, function_name)
    chosen = DEFAULT_GTOPK if collective is None else collective
    if chosen not in GTOPK_COLLECTIVES:
        raise ValueError(
            f"collective must be one of {', '.join(GTOPK_COLLECTIVES)}, got {chosen!r}"
        )
    return Compressor(name, make_selector, GTOPK_COLLECTIVES[chosen], chosen)
