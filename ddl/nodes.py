"""Which ranks share a node (a host, with one network interface for all of them)."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ddl.collectives import messages
from ddl.comm import Communicator
from ddl.links import Links

LEAST_RATIO = 4.0  # of the cost of a byte between nodes to that within one


class Place(NamedTuple):
    """What a rank knows of where it is; hosts in containers may have the same name."""

    local_rank: int
    local_size: int
    host: str


def find_nodes(comm: Communicator) -> tuple[int, ...] | None:
    """The node of every rank, see `group_by_node`; the same on every rank. Collective."""
    mine = Place(comm.local_rank, comm.local_size, platform.node())
    return group_by_node([Place(*place) for place in messages.gather_objects(comm, tuple(mine))])


def group_by_node(places: Sequence[Place]) -> tuple[int, ...] | None:
    """The node of each place, numbered by first ranks; None where that cannot be told.

    Ranks are numbered within their node in the order of their ranks, so a rank belongs to a node of
    its size that so far has as many members as its number among them says. Where launchers fill
    node after node there is one such node at most; where they deal ranks out in turn there may be
    several, and the host's name decides.

    Args:
        places: of all ranks, in rank order.
    """
    members: list[list[int]] = []
    node_of_rank = []
    for rank, place in enumerate(places):
        if place.local_rank == 0:
            members.append([])
        open_nodes = [
            node
            for node, ranks in enumerate(members)
            if len(ranks) == place.local_rank
            and (not ranks or places[ranks[0]].local_size == place.local_size)
        ]
        if len(open_nodes) > 1:
            open_nodes = [
                node
                for node in open_nodes
                if members[node] and places[members[node][0]].host == place.host
            ]
        if len(open_nodes) != 1:
            return None
        members[open_nodes[0]].append(rank)
        node_of_rank.append(open_nodes[0])
    if any(len(ranks) != places[ranks[0]].local_size for ranks in members):
        return None
    return tuple(node_of_rank)


class Teams:
    """The ranks of a job by node, and the owners of each shard by node.

    Attributes:
        job: all ranks; its label goes to the others.
        within: the ranks of this node.
        across: the owners of this rank's shard, one per node; without meaning for ranks that own
            none.
        shards: how many shards there are.
        shard: this rank's, None if it owns none.
    """

    def __init__(self, job: Communicator, nodes: Sequence[int]) -> None:
        """Split up. Collective.

        Args:
            job: all ranks.
            nodes: the node of each rank; several nodes.
        """
        sizes = [list(nodes).count(node) for node in set(nodes)]
        place = list(nodes[: job.rank]).count(nodes[job.rank])
        self.job = job
        self.shards = min(sizes)
        self.shard = place if place < self.shards else None
        self.within = job.split(nodes[job.rank], job.rank)
        self.across = job.split(min(place, self.shards), job.rank)

    def label(self) -> None:
        """Put the coming messages under the label of the job's."""
        self.within.label = self.across.label = self.job.label
        self.within.doing = self.across.doing = self.job.doing

    def cancel(self) -> None:
        """End the wait of another thread; see `Communicator.cancel`."""
        for comm in (self.job, self.within, self.across):
            comm.cancel()

    def close(self) -> None:
        """Free what was split off; see `Communicator.close`. Collective."""
        self.within.close()
        self.across.close()


def two_levels(
    wanted: bool | None, nodes: Sequence[int] | None, links: Callable[[], Links]
) -> bool:
    """Whether to aggregate in two levels.

    Args:
        wanted: True and False decide, where there are two levels. None: where every node holds
            several ranks, and a byte takes more than 4 times as long between nodes as within.
        nodes: the node of each rank, the same on every rank; None where that is not known.
        links: measures; asked only if the answer depends on it.

    Raises:
        ValueError: wanted, and the nodes are not known.
    """
    if wanted is False:
        return False
    if nodes is None:
        if wanted:
            raise ValueError(
                "hierarchical=True needs to know which ranks share a node, got host names and "
                "local ranks that do not fit together; start the ranks node by node, or leave it "
                "out"
            )
        return False
    sizes = [list(nodes).count(node) for node in set(nodes)]
    if len(sizes) == 1 or max(sizes) == 1:
        return False
    if wanted:
        return True
    return min(sizes) > 1 and links().ratio > LEAST_RATIO
