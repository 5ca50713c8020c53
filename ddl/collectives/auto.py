"""The collective that is predicted to be the fastest, on this network and for these counts.

Predictions are those of `ddl.perfmodel.costs`, from links that are measured once and then the same
on all ranks. So all decide alike without a word, once for each bucket length and number of entries.

Candidates differ in more than time. In the order of what they leave to later steps, which is the
order in which near ties are settled: the dense all-reduce leaves nothing, the all-gather none of
what was selected, the exact collective cuts the true sum, the butterfly and the tree cut at every
merge. A dense all-reduce is not a sum of sparse vectors: see `ddl.aggregation.dense_where_faster`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from ddl.collectives import allgather, gtopk
from ddl.collectives.collected import Collected, Collective
from ddl.collectives.exact import Exact
from ddl.comm import Communicator
from ddl.links import Links, measure_links
from ddl.perfmodel import costs
from ddl.sparse import Packet
from ddl.wires import PLAIN, WireFormat

logger = logging.getLogger(__name__)

DENSE = "dense"
BEST_FIRST = (DENSE, "all-gather", "exact", "butterfly", "tree")
NEAR = 1.25  # times the shortest time: predictions are not good enough to tell these apart


class Choice(NamedTuple):
    """A decision.

    Attributes:
        sparse: the best collective of sparse vectors.
        dense: whether the dense all-reduce is better than that.
        seconds: predicted, by candidate.
    """

    sparse: str
    dense: bool
    seconds: Mapping[str, float]

    @property
    def name(self) -> str:
        """What is used where both forms are possible."""
        return DENSE if self.dense else self.sparse


class Chooser:
    """Decides for all buckets of one optimizer on one rank.

    Attributes:
        links: the same on every rank; None until they are known, which the first decision sees to.
    """

    def __init__(self, links: Links | None = None) -> None:
        """Nothing decided yet."""
        self.links = links
        self._choices: dict[tuple[int, int, int, float, float], Choice] = {}

    def choose(
        self,
        comm: Communicator,
        numel: int,
        winners: int,
        wire: WireFormat = PLAIN,
        winners_per_pick: float = 1.0,
    ) -> Choice:
        """Decide, or recall; logs a new decision with its reason.

        Args:
            comm: the ranks, which all ask alike; nothing is sent once the links are known.
            numel: length of the bucket.
            winners: entries that are kept of the sum.
            wire: the format in which entries travel.
            winners_per_pick: how many times the number of entries that each rank sends that is.
        """
        picks = winners / winners_per_pick
        entry_bytes = costs.PLAIN_ENTRY_BYTES
        if not wire.exact:
            entry_bytes = costs.compact_entry_bytes(min(1.0, picks / max(1, numel)))
        key = (comm.size, numel, winners, picks, entry_bytes)
        if key not in self._choices:
            if self.links is None:
                self.links = measure_links(comm, wire=wire)
            choice = self._choices[key] = _decide(self.links, *key)
            self._log(comm, numel, winners, choice)
        return self._choices[key]

    def _log(self, comm: Communicator, numel: int, k: int, choice: Choice) -> None:
        by_time = sorted(choice.seconds.items(), key=lambda item: item[1])
        logger.log(
            logging.INFO if comm.rank == 0 and comm.size > 1 else logging.DEBUG,
            "%s for %d of %d entries on %d ranks: predicted %s ms; the best of those that take at "
            "most %g times the shortest (%s)",
            choice.name,
            k,
            numel,
            comm.size,
            ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in by_time),
            NEAR,
            self.links,
        )


def _decide(
    links: Links, P: int, numel: int, winners: int, picks: float, entry_bytes: float
) -> Choice:
    sparse = {
        name: links.seconds(cost(P, picks, entry_bytes, winners))
        for name, cost in costs.SPARSE.items()
    }
    seconds = {DENSE: links.seconds(costs.dense(P, numel + 1)), **sparse}
    # A single rank has nothing to save, but is to do what it would do among others.
    return Choice(_best(sparse), P > 1 and _best(seconds) == DENSE, seconds)


def _best(seconds: Mapping[str, float]) -> str:
    limit = NEAR * min(seconds.values())
    return next(name for name in BEST_FIRST if seconds.get(name, limit + 1) <= limit)


class Auto:
    """The best collective of sparse vectors, for one bucket; see `Collective`."""

    def __init__(self, chooser: Chooser, winners_per_pick: float = 1.0) -> None:
        """Choose among all of them.

        Args:
            chooser: this rank's, shared by all buckets.
            winners_per_pick: entries kept of the sum for each that a rank is to select.
        """
        self.chooser = chooser
        self._winners_per_pick = winners_per_pick
        self.collectives: Mapping[str, Collective] = {
            "all-gather": allgather.all_gather,
            "exact": Exact(),
            "butterfly": gtopk.butterfly,
            "tree": gtopk.tree,
        }

    def __call__(
        self, comm: Communicator, packet: Packet, k: int, wire: WireFormat = PLAIN
    ) -> Collected:
        """See `Collective`."""
        choice = self.choice(comm, packet.vector.numel, k, wire)
        return self.collectives[choice.sparse](comm, packet, k, wire)

    def choice(
        self, comm: Communicator, numel: int, winners: int, wire: WireFormat = PLAIN
    ) -> Choice:
        """See `Chooser.choose`."""
        return self.chooser.choose(comm, numel, winners, wire, self._winners_per_pick)
