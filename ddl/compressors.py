"""The compressors by name: pairings of a selector, a collective and a wire format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ddl.collectives import Collective, aligned, allgather, by_size, gtopk
from ddl.collectives.auto import Auto, Chooser
from ddl.collectives.exact import Exact
from ddl.selectors import GaussianK, RandomK, Selector, TopK
from ddl.wires import PLAIN, WireFormat, find_wire

MakeSelector = Callable[[int], Selector]  # of a bucket, from its seed
MakeCollective = Callable[[], Collective]  # of a bucket

GTOPK_COLLECTIVES: Mapping[str, MakeCollective] = MappingProxyType(
    {"tree": lambda: gtopk.tree, "butterfly": lambda: gtopk.butterfly, "exact": Exact}
)
AUTO = "auto"
# At equal bytes twice as many winners as picks, or four times, trained better than as many, which
# leave sums that are whole and known unused: docs/results.md, "More winners than picks".
EXACT_RATIO = 2.0
GTOPK_CHOICES = (*GTOPK_COLLECTIVES, AUTO)


def is_exact(collective_name: str, P: int) -> bool:
    """Whether this collective adds up before it cuts, on P ranks."""
    if collective_name == by_size.NAME:
        return P >= by_size.EXACT_FROM
    return collective_name == "exact"


@dataclass(frozen=True)
class Compressor:
    """How one kind of compression selects and aggregates.

    Attributes:
        name: what the user calls it.
        make_selector: a new selector for a bucket, given a seed that is the bucket's own; None
            for the dense all-reduce.
        make_collective: a new collective for a bucket, which aggregates the selected entries; None
            for the dense all-reduce.
        collective_name: the collective's name, for logs.
        wire: the format in which the selected entries travel, where they do.
        winners_per_pick: entries to keep of the sum for each that a rank is to select, where the
            collective keeps a part and the user has said so; see `ratio`.
        chooser: chooses the collective, and needs to know the links; None where there is no choice.
    """

    name: str
    make_selector: MakeSelector | None
    make_collective: MakeCollective | None
    collective_name: str
    wire: WireFormat = PLAIN
    winners_per_pick: float | None = None
    chooser: Chooser | None = None

    @property
    def is_dense(self) -> bool:
        """Whether gradients are aggregated whole."""
        return self.make_selector is None

    def ratio(self, P: int) -> float:
        """Entries to keep of the sum for each that a rank is to select, on P ranks that aggregate.

        Where nothing was said that is 1, as published; of exact sums, EXACT_RATIO.
        """
        if self.winners_per_pick is not None:
            return self.winners_per_pick
        return EXACT_RATIO if is_exact(self.collective_name, P) else 1.0

    @property
    def settings(self) -> Mapping[str, object]:
        """What all ranks must have chosen alike, by the names of the user's arguments."""
        return {
            "compressor": self.name,
            "collective": self.collective_name,
            "wire": self.wire.name,
            "global_density / density": self.winners_per_pick or "by default",
        }


def _topk(seed: int) -> Selector:
    return TopK()


def _gaussiank(seed: int) -> Selector:
    return GaussianK()


class _Row(NamedTuple):
    """What a compressor is made of, before the user's choices."""

    make_selector: MakeSelector | None
    make_collective: MakeCollective | None  # None for the gTop-k the user chooses, or a dense sum
    collective_name: str
    sends_entries: bool  # as indices and values, so that there is a choice of wire


_TABLE: Mapping[str, _Row] = {
    "none": _Row(None, None, "all-reduce", False),
    "topk": _Row(_topk, lambda: allgather.all_gather, "all-gather", True),
    "gtopk": _Row(_topk, None, "", True),
    "gaussiank": _Row(_gaussiank, lambda: allgather.all_gather, "all-gather", True),
    "gaussiank-gtopk": _Row(_gaussiank, None, "", True),
    "randomk": _Row(RandomK, lambda: aligned.all_reduce, "all-reduce of values", False),
}

COMPRESSORS: tuple[str, ...] = tuple(_TABLE)


def make_compressor(
    name: str,
    collective: str | None = None,
    wire: str | None = None,
    winners_per_pick: float | None = None,
) -> Compressor:
    """Look a compressor up.

    Args:
        name: one of `COMPRESSORS`.
        collective: for `gtopk` and `gaussiank-gtopk`: "tree", "butterfly", "exact", or "auto",
            which also chooses the all-gather, and a dense all-reduce of the whole bucket; default
            by the number of ranks, see `ddl.collectives.by_size`.
        wire: for all but `none` and `randomk`: "plain" (default), "compact" or "compact-fp16".
        winners_per_pick: for `gtopk` and `gaussiank-gtopk`: global density / density; default
            EXACT_RATIO for "exact", or where it is the default, otherwise 1; also for "auto", which
            compares collectives that keep as many.

    Raises:
        ValueError: an unknown name, or a choice for a compressor that has none.
    """
    if name not in _TABLE:
        raise ValueError(f"compressor must be one of {', '.join(COMPRESSORS)}, got {name!r}")
    row = _TABLE[name]
    is_gtopk = row.make_selector is not None and row.make_collective is None
    for what, value, has_choice in (
        ("collective", collective, is_gtopk),
        ("wire", wire, row.sends_entries),
        ("global_density", winners_per_pick, is_gtopk),
    ):
        if value is not None and not has_choice:
            got = f", got {value!r}" if isinstance(value, str) else ""
            raise ValueError(f"compressor {name!r} has no choice of {what}{got}; leave it out")
    wire_format = PLAIN if wire is None else find_wire(wire)
    if not is_gtopk:
        return Compressor(
            name, row.make_selector, row.make_collective, row.collective_name, wire_format
        )
    if collective is not None and collective not in GTOPK_CHOICES:
        raise ValueError(
            f"collective must be one of {', '.join(GTOPK_CHOICES)}, got {collective!r}"
        )
    ratio = winners_per_pick  # None: by default
    if collective is None:
        return Compressor(name, row.make_selector, by_size.BySize, by_size.NAME, wire_format, ratio)
    if collective != AUTO:
        make_collective = GTOPK_COLLECTIVES[collective]
        return Compressor(name, row.make_selector, make_collective, collective, wire_format, ratio)
    chooser = Chooser()

    def make_auto() -> Auto:
        return Auto(chooser, ratio or 1.0)

    return Compressor(name, row.make_selector, make_auto, AUTO, wire_format, ratio, chooser)
