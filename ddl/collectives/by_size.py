"""The gTop-k where none was chosen: decided by the number of ranks alone, so that runs are alike.

From 8 ranks on the exact collective sends no more entries than the butterfly, about log2(P)/2 + 1
against log2(P) times k (log2(P)/2 + 2 where twice as many winners are kept, the default), and cuts
nothing but the sum.
"""

from __future__ import annotations

from ddl.collectives.collected import Collected
from ddl.collectives.exact import Exact
from ddl.collectives.gtopk import butterfly
from ddl.comm import Communicator
from ddl.sparse import Packet
from ddl.wires import PLAIN, WireFormat

EXACT_FROM = 8  # ranks
NAME = f"butterfly, exact from {EXACT_FROM} ranks on"


class BySize:
    """The butterfly or the exact collective of one bucket; see `Collective`."""

    def __init__(self) -> None:
        """Nothing predicted yet."""
        self._exact = Exact()

    def __call__(
        self, comm: Communicator, packet: Packet, k: int, wire: WireFormat = PLAIN
    ) -> Collected:
        """See `Collective`."""
        collective = self._exact if comm.size >= EXACT_FROM else butterfly
        return collective(comm, packet, k, wire)
