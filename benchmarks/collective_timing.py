"""How a collective is timed on many ranks at once, and what else is counted meanwhile."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from ddl.collectives import messages
from ddl.comm import Communicator

SAMPLE_SECONDS = 0.1
MOST_CALLS = 50


class Counting(Communicator):
    """Another communicator's messages, which it counts."""

    def __init__(self, inner: Communicator) -> None:
        """`inner` must not be used by anybody else meanwhile."""
        local = (inner.local_rank, inner.local_size)
        super().__init__(inner.rank, inner.size, inner.timeout, local)
        self._inner = inner
        self.exchanges = 0

    def _exchange(
        self, message: Tensor | None, dest: int | None, source: int | None
    ) -> Tensor | None:
        self.exchanges += 1
        self._inner.label = self.label
        return self._inner._exchange(message, dest, source)

    def split(self, color: int, key: int) -> Communicator:
        """See `Communicator.split`; what a part sends is not counted here."""
        return self._inner.split(color, key)

    def abort(self, reason: str, status: int = 1) -> NoReturn:
        """See `Communicator.abort`."""
        self._inner.abort(reason, status)


@dataclass(frozen=True)
class Sample:
    """What some calls in a row took on one rank; all but `idle` per call.

    Attributes:
        seconds: by the wall clock, from a common start.
        cpu_seconds: of this rank's process, or of its thread where ranks are threads.
        sent: bytes that the engine counted.
        link_sent: bytes that the interface counted; None where none was named.
        idle: the share of the host's cores that nobody used; None where the host does not tell.
    """

    seconds: float
    cpu_seconds: float
    sent: float
    link_sent: float | None
    idle: float | None


class Stopwatch:
    """Times calls on one rank of many."""

    def __init__(self, comm: Counting, interface: str | None) -> None:
        """`interface`: whose counters to read, such as eth0."""
        self._comm = comm
        self._interface = interface
        on_threads = threading.current_thread() is not threading.main_thread()
        self._cpu: Callable[[], float] = time.thread_time if on_threads else time.process_time

    def sample(self, run: Callable[[], Any], calls: int) -> Sample:
        """Time `calls` calls in a row. Collective.

        They follow each other without a pause, so that one rank's late start counts once, and no
        link can save up during pauses what it may carry at once.
        """
        messages.barrier(self._comm)
        sent, link, ticks = self._comm.bytes_sent, self._link_bytes(), _cpu_ticks()
        cpu, begin = self._cpu(), time.perf_counter()
        for _ in range(calls):
            run()
        seconds, cpu_seconds = time.perf_counter() - begin, self._cpu() - cpu
        counted, idle = self._comm.bytes_sent - sent, _idle(ticks, _cpu_ticks())
        messages.barrier(self._comm)  # what was sent last has crossed the link only now
        now = self._link_bytes()
        return Sample(
            seconds / calls,
            cpu_seconds / calls,
            counted / calls,
            None if now is None or link is None else (now - link) / calls,
            idle,
        )

    def calls(self, seconds: float) -> int:
        """How many calls make a sample, the same on every rank, if one takes so long here."""
        longest = max(messages.gather_objects(self._comm, seconds))
        return max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / max(longest, 1e-6))))

    def waiting(self, run: Callable[[], Any], late: float) -> float:
        """The share of a core that this rank uses while it waits for the last one. Collective.

        Args:
            run: a call.
            late: seconds by which the last rank comes late; it gets 0 as its answer.
        """
        messages.barrier(self._comm)
        is_late = self._comm.rank == self._comm.size - 1
        if is_late:
            time.sleep(late)
        before = self._cpu()
        run()
        return 0.0 if is_late else (self._cpu() - before) / late

    def _link_bytes(self) -> int | None:
        if self._interface is None:
            return None
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == self._interface:
                return int(counters.split()[8])  # sent
        raise SystemExit(f"there is no interface {self._interface!r}; /proc/net/dev lists them")


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    median = statistics.median(values)
    if len(values) == 1:
        return median, median, median
    low, *_, high = statistics.quantiles(values, n=5, method="inclusive")
    return median, low, high


def _cpu_ticks() -> list[int] | None:
    """Ticks of the host's cores by use: user, nice, system, idle, waiting for disks, ...."""
    try:
        return [int(word) for word in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
    except (OSError, ValueError):
        return None


def _idle(before: list[int] | None, after: list[int] | None) -> float | None:
    if before is None or after is None:
        return None
    passed = [new - old for old, new in zip(before, after, strict=True)]
    return (passed[3] + passed[4]) / max(1, sum(passed))
