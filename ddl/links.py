"""What a message costs between these ranks: measured once, the same numbers on every rank.

1. All ranks pass messages around a ring, at once and again and again, as they do in the rounds of a
   collective. So what is measured includes what collectives have to live with: ranks that wait with
   a back-off, that share a core, or that share their node's network interface.
2. A line through the seconds over a few sizes gives alpha and beta. Relative errors count, so that
   small messages decide on alpha and large ones on beta.
3. Where nodes hold several ranks, there is a ring within each node, then a ring of the first ranks
   of all nodes, one of the second ranks, and so on, all at once.
4. What the host does with a message is timed too, while all ranks do it: on a fast network, or
   where ranks share cores, it decides.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ddl import kernels
from ddl.collectives import messages
from ddl.comm import Communicator
from ddl.perfmodel.costs import Cost
from ddl.sparse import Packet, SparseVector
from ddl.wires import PLAIN, WireFormat

# A network may let the first quarter of a megabyte or so through above its rate; the warm-up of the
# largest size is to use that up.
SIZES = (64, 2**16, 2**20)
BATCHES, ROUNDS = 5, {64: 8, 2**16: 3, 2**20: 2}  # of a size: batches, and rounds in each
LONGEST_SECONDS = 0.3  # of one size: a size that would take longer is not tried
HANDLED_COUNTS = (64, 2**14)  # entries of the messages that the host's work is timed with


@dataclass(frozen=True)
class Line:
    """Seconds that grow with a size, as those of a round do in which each rank sends one message.

    Attributes:
        alpha: seconds, however small the size.
        beta: seconds per byte, or whatever the size counts.
    """

    alpha: float
    beta: float

    def seconds(self, size: float) -> float:
        """The time for `size`."""
        return self.alpha + self.beta * size


@dataclass(frozen=True)
class Links:
    """What rounds cost between the ranks of a job.

    Attributes:
        between: by bytes, between nodes where there are several, else between any two ranks.
        within: by bytes, between the ranks of a node, where there are several nodes and several
            ranks on one of them.
        host: by entries, what a rank does with one message: encode, decode and merge it.
    """

    between: Line
    within: Line | None = None
    host: Line = Line(0.0, 0.0)

    @property
    def ratio(self) -> float:
        """How much longer a byte takes between nodes than within one; 1 where all are alike."""
        if self.within is None or self.between.beta == 0:
            return 1.0
        return self.between.beta / self.within.beta if self.within.beta else math.inf

    def seconds(self, cost: Cost) -> float:
        """The time that a collective of that cost takes between nodes."""
        link, host = self.between, self.host
        return cost.seconds(link.alpha, link.beta, gamma=host.beta, delta=host.alpha)

    @classmethod
    def parse(cls, text: str) -> Links:
        """From "alpha,beta" in seconds and seconds per byte; two more are those within nodes.

        Raises:
            ValueError: the text is something else.
        """
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (2, 4) or not all(0 <= number < math.inf for number in numbers):
            raise ValueError(
                "links must be alpha,beta in seconds and seconds per byte, such as 50e-6,9e-9, and "
                f"may go on with those within nodes, got {text!r}"
            )
        return cls(Line(*numbers[:2]), Line(*numbers[2:]) if numbers[2:] else None)

    def __str__(self) -> str:
        """For logs."""
        within = f"; within nodes {_described(self.within)}" if self.within else ""
        return (
            f"{_described(self.between)}{within}; host work {self.host.alpha * 1e6:.3g} us a "
            f"message, {self.host.beta * 1e9:.3g} ns an entry"
        )


def measure_links(
    comm: Communicator, nodes: Sequence[int] | None = None, wire: WireFormat = PLAIN
) -> Links:
    """Measure what rounds cost now, in well under a second. Collective.

    Args:
        comm: the ranks; nothing else may use it meanwhile.
        nodes: the node of each rank, where several share one; None: every rank has its own.
        wire: the format that the host's work is timed with.

    Returns:
        The same on every rank, to the bit.

    Raises:
        DeadlineError: a rank did not take part in time.
        CommunicationError: a rank is gone.
    """
    if comm.size == 1:
        return Links(Line(0.0, 0.0))
    host = _slowest(comm, {2 * count: _handling_seconds(count, wire) for count in HANDLED_COUNTS})
    if nodes is None or len(set(nodes)) in (1, comm.size):
        return Links(_ring(comm, comm), None, host)
    mine = nodes[comm.rank]
    place = list(nodes[: comm.rank]).count(mine)
    lines = []
    for color in (mine, place):
        group = comm.split(color, comm.rank)
        lines.append(_ring(comm, group))
        group.close()
    within, between = lines
    return Links(between, within, host)


def fit(seconds: Mapping[int, float]) -> Line:
    """Alpha and beta by least squares of relative errors; neither is ever negative.

    Args:
        seconds: by size, at least one.
    """
    # Minimise the sum of ((alpha + beta * size) / t - 1)^2, with a = 1 / t and b = size / t.
    a = [1 / t for t in seconds.values()]
    b = [size / t for size, t in seconds.items()]
    aa, ab, bb = _dot(a, a), _dot(a, b), _dot(b, b)
    determinant = aa * bb - ab * ab
    if len(seconds) == 1 or determinant <= 0:
        return Line(min(seconds.values()), 0.0)
    alpha = (sum(a) * bb - sum(b) * ab) / determinant
    beta = (sum(b) * aa - sum(a) * ab) / determinant
    if alpha < 0:
        return Line(0.0, sum(b) / bb)
    return Line(alpha, beta) if beta >= 0 else Line(sum(a) / aa, 0.0)


def _ring(comm: Communicator, group: Communicator) -> Line:
    """What a round costs in the slowest of the groups that `comm` was split into. Collective."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    seconds: dict[int, float] = {}
    for size in SIZES:
        rounds, message = ROUNDS[size], torch.zeros(size, dtype=torch.uint8)
        whole = (BATCHES + 1) * rounds
        if len(seconds) > 1 and fit(seconds).seconds(size) * whole > LONGEST_SECONDS:
            break

        def pass_on(rounds: int = rounds, message: torch.Tensor = message) -> None:
            for _ in range(rounds):
                group.sendrecv(message, right, left)

        mine = _median_seconds(pass_on) / rounds if group.size > 1 else 0.0
        # Over all groups, so that they stay together: they may share network interfaces.
        seconds[size] = max(messages.gather_objects(comm, mine))
    return fit(seconds)


def _handling_seconds(count: int, wire: WireFormat) -> float:
    """Seconds for encoding, decoding and merging a message of `count` entries."""
    indices = torch.arange(0, 2 * count, 2, dtype=torch.int32)
    values = indices.remainder(251).float()
    packet = Packet(SparseVector(indices, values, 2 * count), finite=True)

    def handle() -> None:
        theirs = wire.decode(wire.encode(packet), 2 * count, values.device).vector
        kernels.merge(theirs.indices, theirs.values, indices + 1, values, count)

    return _median_seconds(handle)


def _median_seconds(action: Callable[[], None]) -> float:
    seconds = []
    for _ in range(BATCHES + 1):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])  # the first warms up


def _slowest(comm: Communicator, seconds: dict[int, float]) -> Line:
    """The line through the seconds of the slowest rank for each size. Collective."""
    everyone = messages.gather_objects(comm, seconds)
    return fit({size: max(rank[size] for rank in everyone) for size in seconds})


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _described(link: Line) -> str:
    rate = f"{1e-6 / link.beta:.4g} MB/s" if link.beta else "no limit of rate"
    return f"{link.alpha * 1e6:.3g} us a round, {rate}"
