"""Ranks of an MPI job that wait long ask each other whom they wait for, and answer.

1. *Ask.* Who has waited for PATIENCE asks the rank it waits for, then the one which that one names,
   and so on. It asks again later, ever less often, and shortly before its deadline.
2. *Answer.* Whoever waits long answers with the rank it waits for. Who computes, or is stalled,
   does not: that is an answer, too.
3. *Leave.* A rank at the end of its script answers that it is gone, until all are. So who waits for
   it hears at once, while jobs that end as they should exchange nothing but one barrier.

Nothing is sent in waits shorter than PATIENCE.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

from ddl.comm.obituary import Mourned
from ddl.comm.suspects import GONE, Waiting

ASK, ANSWER = 1, 2  # tags

# Seconds.
PATIENCE = 1.0
PAUSE = 0.05  # between two looks at what has come
ANSWERING = 0.5  # for the answers to the last question, before a deadline
PAUSE_AT_THE_END = 2e-3


class Inquiry:
    """What one process knows of the waits of the others.

    Attributes:
        rank: of this process.
        mourned: its connection to who tells if it dies; None if nobody does.
    """

    mourned: Mourned | None = None

    def __init__(self, mpi: Any, handle: Any) -> None:
        """`mpi`: mpi4py's module; `handle`: all ranks, for questions and answers only."""
        self._mpi = mpi
        self._handle = handle
        self.rank = handle.Get_rank()
        self._process = os.getpid()
        self._lock = threading.Lock()  # the caller's thread and the worker's may wait at once
        self._waits: dict[int, Waiting] = {}  # by thread
        self._left = False
        self._answers: dict[int, Waiting] = {}
        self._sent: list[Any] = []  # requests, and the numbers that they read

    def waits_for(self, rank: int) -> Waiting | None:
        """What another rank has said of its wait; None if it has not answered."""
        return self._answers.get(rank)

    def leave(self, timeout: float) -> None:
        """Answer for this rank that it is gone, until every rank is. At the end of the process.

        Args:
            timeout: seconds after which it stops; MPI itself then waits for the others.
        """
        if os.getpid() != self._process or self._mpi.Is_finalized():
            return
        self.say_goodbye()
        with contextlib.suppress(self._mpi.Exception):
            self._left = True
            everybody = self._handle.Ibarrier()
            deadline = time.monotonic() + timeout
            while not everybody.Test() and time.monotonic() < deadline:
                self.serve()
                time.sleep(PAUSE_AT_THE_END)

    def say_goodbye(self, *, for_all: bool = False) -> None:
        """This process ends, or ends all, with its own words."""
        if self.mourned is not None:
            self.mourned.say_goodbye(for_all=for_all)

    def serve(self) -> None:
        """Take in what has come, and answer. Never blocks."""
        MPI = self._mpi
        with self._lock:
            status = MPI.Status()
            while self._handle.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                source, tag = status.Get_source(), status.Get_tag()
                text = bytearray(status.Get_count(MPI.BYTE))
                self._handle.Recv([text, MPI.BYTE], source, tag)
                if tag == ANSWER:
                    rank, doing = text.decode().split(" ", 1)
                    self._answers[source] = Waiting(int(rank), doing)
                elif self._left:
                    self._send(Waiting(GONE, ""), source)
                else:
                    for waiting in list(self._waits.values())[:1]:
                        self._send(waiting, source)
            self._sent = [sent for sent in self._sent if not sent[0].Test()]

    def _send(self, waiting: Waiting | None, dest: int) -> None:
        text = bytearray() if waiting is None else f"{waiting.rank} {waiting.doing}".encode()
        tag = ASK if waiting is None else ANSWER
        self._sent.append((self._handle.Isend([text, self._mpi.BYTE], dest, tag), text))

    def ask(self, rank: int) -> None:
        """Ask a rank, and forget what it said."""
        with self._lock:
            self._answers.pop(rank, None)
            self._send(None, rank)


class Wait:
    """One wait of one thread, from its beginning."""

    def __init__(self, inquiry: Inquiry, waiting: Waiting, timeout: float) -> None:
        """`waiting`: for whom, in the numbering of the job, in what; `timeout`: seconds."""
        self._inquiry = inquiry
        self._waiting = waiting
        self._peer = waiting.rank
        self._began = time.monotonic()
        self._patience = min(PATIENCE, timeout / 4)
        self._last_question = self._began + timeout - min(ANSWERING, timeout / 4)
        self._next_look = self._began + self._patience
        self._next_question = self._next_look
        self._asked: set[int] = set()
        self._gone_since: float | None = None

    def __enter__(self) -> Wait:
        """Wait."""
        self._inquiry._waits[threading.get_ident()] = self._waiting
        return self

    def __exit__(self, *error: Any) -> None:
        """Wait no more."""
        self._inquiry._waits.pop(threading.get_ident(), None)

    def look(self) -> bool:
        """Ask and answer, if it is time; whether `peer` is gone, so that nothing will come."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + PAUSE
        self._inquiry.serve()
        if now >= self._next_question:
            self._asked.clear()
            elapsed = now - self._began
            again = self._began + 2 * elapsed
            if now < self._last_question:
                again = min(again, self._last_question)
            self._next_question = again
        self._follow()
        said = self._inquiry.waits_for(self._peer)
        if said is None or said.rank != GONE:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now  # its last message may still be on its way
        return self._gone_since is not None and now - self._gone_since > 4 * PAUSE

    def _follow(self) -> None:
        """Ask the first rank of the chain that has not been asked."""
        said: Waiting | None = self._waiting
        seen = {self._inquiry.rank, GONE}
        while said is not None and said.rank not in seen:
            if said.rank not in self._asked:
                self._asked.add(said.rank)
                self._inquiry.ask(said.rank)
                return
            seen.add(said.rank)
            said = self._inquiry.waits_for(said.rank)
