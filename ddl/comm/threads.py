"""P ranks as threads of one process, for tests, notebooks and simulations of large P.

    results = run(4, lambda comm: train(comm))       # one result per rank

Messages are copied into mailboxes under one lock; a rank that fails ends the waits of the others.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from ddl.comm.base import Communicator, out_of_step
from ddl.comm.current import use
from ddl.comm.polling import STALLED
from ddl.comm.suspects import Waiting, suspicion
from ddl.errors import CommunicationError, DeadlineError

T = TypeVar("T")
GRACE_SECONDS = 5.0  # for ranks to end in when their caller is interrupted


class _Switchboard:
    """What the ranks of one job share: mailboxes, meetings, and the first failure."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.mail: dict[Hashable, deque[tuple[int, Tensor]]] = defaultdict(deque)
        self.meetings: dict[Hashable, dict[int, tuple[int, int]]] = defaultdict(dict)
        self.failure: str | None = None
        self.waits: dict[Hashable, tuple[int, Waiting]] = {}  # who for whom, of all groups

    def fail(self, reason: str) -> None:
        with self.changed:
            self.failure = self.failure or reason
            self.changed.notify_all()

    def waits_for(self, rank: int) -> Waiting | None:
        """What a rank waits for; None if for nothing."""
        return next((wait for waiter, wait in self.waits.values() if waiter == rank), None)

    def wait_until(
        self,
        ready: Callable[[], Any],
        timeout: float,
        what: str,
        suspicion: Callable[[], str] = lambda: STALLED,
    ) -> None:
        """Wait, with `changed` held, until ready() or the deadline or a failure elsewhere."""
        deadline = time.monotonic() + timeout
        while not ready():
            if self.failure is not None:
                raise CommunicationError(f"{what}: {self.failure}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"{what}: nothing within {timeout:g} s; {suspicion()}")
            self.changed.wait(left)


class ThreadCommunicator(Communicator):
    """One rank of a job whose ranks are threads; made by `run` and by `split`."""

    def __init__(
        self, board: _Switchboard, group: Hashable, rank: int, size: int, timeout: float
    ) -> None:
        """`group` tells this communicator's messages from those of others on the same board."""
        super().__init__(rank, size, timeout)
        self._board = board
        self._group = group
        self._splits = 0
        self._cancelled = False

    def _exchange(
        self, message: Tensor | None, dest: int | None, source: int | None
    ) -> Tensor | None:
        board = self._board
        copy = None if message is None else message.clone()
        with board.changed:
            if copy is not None:
                board.mail[self._group, self.rank, dest].append((self.label, copy))
                board.changed.notify_all()
            if source is None:
                return None
            box = board.mail[self._group, source, self.rank]
            me, peer = self.job_ranks[self.rank], self.job_ranks[source]
            what = f"{self.who} waits for a message of rank {peer}"
            board.waits[self._group, me] = me, Waiting(peer, self.doing)
            board.wait_until(
                lambda: box or self._cancelled,
                self.timeout,
                what,
                lambda: suspicion(me, peer, board.waits_for),
            )
            del board.waits[self._group, me]
            if not box:
                raise CommunicationError(f"{what}: cancelled")
            label, received = box.popleft()
            if label != self.label:
                raise out_of_step(self, source, label)
            return received

    def split(self, color: int, key: int) -> ThreadCommunicator:
        """See `Communicator.split`."""
        self._splits += 1
        meeting = (self._group, self._splits)
        board = self._board
        with board.changed:
            attending = board.meetings[meeting]
            attending[self.rank] = (color, key)
            board.changed.notify_all()
            what = f"{self.who} waits for all ranks to split"
            board.wait_until(lambda: len(attending) == self.size, self.timeout, what)
        members = sorted((k, rank) for rank, (c, k) in attending.items() if c == color)
        ranks = [member for _, member in members]
        group = ThreadCommunicator(
            board, (*meeting, color), ranks.index(self.rank), len(ranks), timeout=self.timeout
        )
        group._split_from(self, ranks)
        return group

    def cancel(self) -> None:
        """See `Communicator.cancel`."""
        with self._board.changed:
            self._cancelled = True
            self._board.changed.notify_all()

    def abort(self, reason: str, status: int = 1) -> NoReturn:
        """End the waits of all ranks; each raises `CommunicationError` with the reason."""
        self._board.fail(reason)
        raise CommunicationError(reason)


def run(size: int, work: Callable[[ThreadCommunicator], T], *, timeout: float = 60.0) -> list[T]:
    """Call `work` once per rank, each in a thread, and return the results in rank order.

    Args:
        size: number of ranks, at least 1.
        work: gets its rank's communicator, which is also the thread's `ddl.init()`.
        timeout: seconds after which a wait for a message ends in `DeadlineError`.

    Raises:
        ValueError: `size` is below 1.
        Exception: what the first rank to fail raised; the others are ended. What interrupts the
            caller, as a KeyboardInterrupt does, is raised when all ranks have ended, which they do
            where they communicate next, or after GRACE_SECONDS.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}; it is the number of ranks")
    board = _Switchboard()
    results: list[Any] = [None] * size
    failures: list[BaseException] = []
    # An interrupted join of Python 3.11 takes the thread for ended; a wait for an event does not.
    ended = [threading.Event() for _ in range(size)]

    def rank_main(rank: int) -> None:
        comm = ThreadCommunicator(board, "world", rank, size, timeout)
        try:
            with use(comm):
                results[rank] = work(comm)
        except BaseException as error:  # carried over to the caller's thread
            failures.append(error)
            board.fail(f"rank {rank} failed: {error!r}")
        finally:
            ended[rank].set()

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(size)
    ]
    started = []
    try:
        for thread, event in zip(threads, ended, strict=True):
            started.append(event)  # first, for an interrupted start has started it
            thread.start()
        for event in ended:
            event.wait()
    except BaseException as error:  # as by Ctrl-C
        # Threads that are within torch when the process ends would abort it.
        board.fail(f"the caller was interrupted: {error!r}")
        give_up = time.monotonic() + GRACE_SECONDS
        for event in started:
            event.wait(max(0.0, give_up - time.monotonic()))
        raise
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
