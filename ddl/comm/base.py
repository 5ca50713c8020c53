"""The communicator: what moves bytes between ranks, and nothing else.

Each room (single, threads, MPI) implements one primitive, the exchange of messages between two
ranks. Everything else is built on it in ddl.collectives, so that every room runs the same
algorithms, gives the same bits, and counts the same bytes in the same place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from ddl.comm.suspects import REMEDY
from ddl.errors import CommunicationError

LARGEST_LABEL = 32767  # every MPI takes tags to this


class Communicator(ABC):
    """P ranks that exchange messages in pairs.

    A message is a contiguous 1-D uint8 tensor on the CPU, of any length; the receiver learns the
    length from the message itself. Messages from one rank to another arrive in the order sent.
    One thread at a time may use a communicator; a second thread takes a `duplicate`.

    Attributes:
        rank: this worker, 0..size-1.
        size: number of workers, P.
        timeout: seconds after which a wait ends in `DeadlineError`.
        local_rank: this worker among those on the same host, 0..local_size-1.
        local_size: number of workers on the same host.
        bytes_sent: bytes this rank has sent through this communicator so far.
        label: what the coming messages belong to, 0..LARGEST_LABEL. A rank that receives a message
            under another label than its own is told that the ranks are out of step.
        timeline: kept here for all optimizers over the ranks of a job, see `ddl.metrics.timeline`.
        doing: what the coming messages are for, in words, for those who wait for this rank.
        waits_for: the rank that another thread waits for in this communicator at present.
        job_ranks: the number in the whole job of each rank; messages name ranks by it.
        job_size: number of workers of the whole job.
    """

    timeline: Any = None

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        local: tuple[int, int] | None = None,
    ) -> None:
        """Set the public attributes; `local`: rank and size on this host, if others exist."""
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.local_rank, self.local_size = (rank, size) if local is None else local
        self.label = 0
        self.doing = ""
        self.bytes_sent = 0
        self.waits_for: int | None = None
        self.job_ranks: tuple[int, ...] = tuple(range(size))
        self.job_size = size

    @property
    def who(self) -> str:
        """This rank, for messages."""
        return f"rank {self.job_ranks[self.rank]} of {self.job_size}"

    def waiting(self) -> str | None:
        """For whom another thread waits, for messages; None if it does not wait."""
        peer = self.waits_for
        return None if peer is None else f"for rank {self.job_ranks[peer]}"

    def _split_from(self, whole: Communicator, members: Sequence[int]) -> None:
        """Take the names of these ranks over from a communicator that contains them."""
        self.job_ranks = tuple(whole.job_ranks[member] for member in members)
        self.job_size = whole.job_size

    def send(self, message: Tensor, dest: int) -> None:
        """Send `message` (uint8 [any length], reusable afterwards) to another rank.

        Raises:
            DeadlineError: the peer took nothing within `timeout` seconds.
            CommunicationError: the peer is gone.
        """
        self.bytes_sent += message.numel()
        self.waits_for = dest
        self._exchange(message, dest, None)
        self.waits_for = None

    def recv(self, source: int) -> Tensor:
        """Receive the next message of another rank: uint8 [its length], owned by the caller.

        Raises:
            DeadlineError: nothing came within `timeout` seconds.
            CommunicationError: the peer is gone, or sent something else than is expected here.
        """
        self.waits_for = source
        received = _received(self._exchange(None, None, source))
        self.waits_for = None
        return received

    def sendrecv(self, message: Tensor, dest: int, source: int) -> Tensor:
        """`send` to `dest` and `recv` from `source` at once, so that rings cannot deadlock."""
        self.bytes_sent += message.numel()
        self.waits_for = source
        received = _received(self._exchange(message, dest, source))
        self.waits_for = None
        return received

    @abstractmethod
    def _exchange(
        self, message: Tensor | None, dest: int | None, source: int | None
    ) -> Tensor | None:
        """Send if there is a `message`, receive if there is a `source`; wait for both."""

    @abstractmethod
    def split(self, color: int, key: int) -> Communicator:
        """Part the ranks into groups. Collective: every rank calls it.

        Args:
            color: ranks that give the same number form a group.
            key: order of the ranks within their group; ties by the present rank.

        Returns:
            The communicator of this rank's group, with a byte count of its own.
        """

    def duplicate(self) -> Communicator:
        """The same ranks with messages and a byte count of their own. Collective."""
        return self.split(0, self.rank)

    def cancel(self) -> None:  # noqa: B027
        """End a wait of another thread in `CommunicationError`, so that the thread can end."""

    def close(self) -> None:  # noqa: B027
        """Free what the room holds for this communicator. Collective; nothing may follow."""

    @abstractmethod
    def abort(self, reason: str, status: int = 1) -> NoReturn:
        """End the job on every rank with an exit status, after one line with `reason` on stderr."""


def out_of_step(comm: Communicator, source: int, label: int) -> CommunicationError:
    """The error of a message that belongs to something else.

    Args:
        comm: what has received it.
        source: who sent it.
        label: the message's.
    """
    rank, source = comm.job_ranks[comm.rank], comm.job_ranks[source]
    return CommunicationError(
        f"rank {rank} is at message group {comm.label}, rank {source} at {label}: the ranks are "
        "out of step; each must take the same steps in the same order, with the same learning "
        f"rates and the same parameters frozen; {REMEDY}"
    )


def _received(message: Tensor | None) -> Tensor:
    if message is None:  # only a room that breaks its contract gets here
        raise TypeError("_exchange() must return a message when given a source, got None")
    return message
