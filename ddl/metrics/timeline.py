"""A timeline of a window of steps: Chrome trace events, one file a job, for ui.perfetto.dev.

1. *Open.* The ranks align their clocks: each measures how far its own is from rank 0's.
2. *Record.* After every step a rank replaces its own file, FILE.rankN.json beside FILE, as a whole,
   so that it is valid JSON whenever a rank dies.
3. *Gather.* When the window is over, or the optimizer closes, rank 0 writes FILE with the events of
   all ranks, and the files of the ranks go.

Clocks are compared once. Where those of two hosts drift, by 10 microseconds a second, say, their
spans do so, too.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import platform
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ddl.collectives import messages
from ddl.comm import Communicator
from ddl.comm.current import current
from ddl.errors import CommunicationError
from ddl.metrics import BucketMetrics, Span
from ddl.settings import Settings

logger = logging.getLogger(__name__)

# About 4 MB a rank; a file of hundreds of megabytes opens in no viewer.
EVENTS_AT_MOST = 20_000
ROUNDS = 8  # of the measurement of clocks; the fastest counts


@dataclass(frozen=True)
class TimelineConfig:
    """What is to be recorded.

    Attributes:
        path: the file of the job.
        first, end: the window [first, end) of the steps of this run, counted from 0.
    """

    path: str
    first: int
    end: int

    @classmethod
    def of(cls, settings: Settings, path: str | os.PathLike[str] | None) -> TimelineConfig | None:
        """What code and environment ask for; `path` wins over DDL_TIMELINE."""
        wanted = settings.timeline if path is None else os.fspath(path)
        return cls(wanted, *settings.timeline_steps) if wanted else None


class StepSpans(NamedTuple):
    """What happened in a step, or until its gradients were given up.

    Attributes:
        step: aggregations before this one.
        backward: from the first gradient to the last; None where there was none.
        buckets: what happened to each.
        kept: False for gradients that were given up.
    """

    step: int
    backward: Span | None
    buckets: Sequence[BucketMetrics]
    kept: bool = True


def open_track(
    config: TimelineConfig | None, job: Communicator, control: Communicator
) -> Track | None:
    """The part of the job's timeline that belongs to a new optimizer. Collective.

    Args:
        config: the same on every rank; None for no timeline.
        job: all ranks; keeps the timeline for all optimizers over them.
        control: the same ranks, for this call and the calls of the track.

    Raises:
        ValueError: a rank cannot write its file.
    """
    if config is None:
        return None
    if job is not current():  # its rank 0 would write the same file as the job's
        level = logging.WARNING if job.rank == 0 else logging.DEBUG
        logger.log(level, "no timeline of an optimizer over ranks other than those of ddl.init()")
        return None
    if job.timeline is None:
        job.timeline = Timeline(Path(config.path), control)
    return Track(job.timeline, config, control)


class Timeline:
    """The events of one rank, of all optimizers over the ranks of a job."""

    def __init__(self, path: Path, comm: Communicator) -> None:
        """Align the clocks and write an empty timeline. Collective.

        Args:
            path: the file of the job; that of an earlier run is removed.
            comm: all ranks.

        Raises:
            ValueError: a rank cannot write its file.
        """
        self._rank, self._size = comm.rank, comm.size
        self._path = path
        self._own = path if comm.size == 1 else rank_file(path, comm.rank)
        self._events: list[str] = []  # as JSON
        self._lock = threading.Lock()  # optimizers may aggregate on threads of their own
        self._tracks = self._written = 0  # optimizers; events in the file
        self._full = self._broken = False
        problem = None
        try:
            if comm.rank == 0:
                remove_earlier(path)
        except OSError as error:
            problem = str(error)
        # No rank goes on from here before rank 0 has come, so none loses the file it writes below.
        self._offset = clock_offset(comm)
        self._origin = messages.broadcast_object(comm, time.perf_counter())
        host = platform.node()
        self._about("process_name", {"name": f"rank {comm.rank} of {comm.size}, {host}"}, 0)
        self._about("process_sort_index", {"sort_index": comm.rank}, 0)
        try:
            replace_file(self._own, self._events)
        except OSError as error:
            problem = str(error)
        for rank, found in enumerate(messages.gather_objects(comm, problem)):
            if found is not None:
                raise ValueError(
                    f"rank {rank} cannot write the timeline {path}: {found}; choose a file in a "
                    "folder that exists on every machine"
                )

    def new_threads(self) -> tuple[int, int]:
        """The numbers of the rows of one more optimizer: its main and its background thread."""
        self._tracks += 1
        main, background = 2 * self._tracks - 1, 2 * self._tracks
        which = "" if self._tracks == 1 else f", optimizer {self._tracks}"
        self._about("thread_name", {"name": f"main{which}"}, main)
        self._about("thread_name", {"name": f"background{which}"}, background)
        return main, background

    def add(self, name: str, span: Span, thread: int, args: dict[str, int | str]) -> None:
        """Record what went on for a while on a thread; `span` is on this rank's own clock."""
        begin, end = (1e6 * (moment + self._offset - self._origin) for moment in span)
        event = {"name": name, "ph": "X", "ts": round(begin, 1), "dur": round(end - begin, 1)}
        self._append({**event, "pid": self._rank, "tid": thread, "args": args})

    def _about(self, name: str, args: dict[str, int | str], thread: int) -> None:
        self._append({"name": name, "ph": "M", "pid": self._rank, "tid": thread, "args": args})

    def _append(self, event: dict[str, object]) -> None:
        with self._lock:
            if len(self._events) < EVENTS_AT_MOST:
                self._events.append(json.dumps(event, separators=(",", ":")))
            elif not self._full:
                self._full = True
                logger.warning(
                    "timeline %s: full with %d events of rank %d; record fewer steps, by "
                    "DDL_TIMELINE_STEPS, or make larger buckets",
                    self._path,
                    EVENTS_AT_MOST,
                    self._rank,
                )

    def write(self) -> None:
        """Bring this rank's own file up to date. A full disk ends the timeline, not the run."""
        with self._lock:
            if not self._broken and len(self._events) > self._written:
                self._written = len(self._events)
                self._broken = not self._replace(self._own, self._events)

    def _replace(self, path: Path, events: Sequence[str]) -> bool:
        try:
            replace_file(path, events)
        except OSError as error:
            logger.warning("timeline %s, rank %d: %s", self._path, self._rank, error)
            return False
        return True

    def gather(self, comm: Communicator) -> None:
        """Write the file of the job, with the events of all ranks so far. Collective.

        Raises:
            CommunicationError: a rank is gone, or did not take part in time.
        """
        self.write()
        if self._size == 1:
            return
        try:
            if self._rank == 0:
                events = list(self._events)
                for rank in range(1, self._size):
                    events += decode(comm.recv(rank))
                written = self._replace(self._path, events)
            else:
                comm.send(encode(self._events), 0)
                written = False
            if messages.broadcast_object(comm, written):
                with contextlib.suppress(OSError):
                    self._own.unlink(missing_ok=True)
        except CommunicationError as error:
            raise type(error)(f"timeline {self._path}: {error}") from error


class Track:
    """The rows of one optimizer in a timeline, on one rank."""

    def __init__(self, timeline: Timeline, config: TimelineConfig, comm: Communicator) -> None:
        """Nothing recorded yet.

        Args:
            timeline: of the job.
            config: the window.
            comm: all ranks; used when the window is over.
        """
        self._timeline, self._config, self._comm = timeline, config, comm
        self._main, self._background = timeline.new_threads()
        self._steps = 0
        self._done = False

    @property
    def _within(self) -> bool:
        return not self._done and self._config.first <= self._steps < self._config.end

    def step(self, spans: StepSpans) -> None:
        """Record a step. Collective where it is the first one behind a window still open."""
        if self._steps >= self._config.end:
            self.finish()
        if self._within:
            self._record(spans)
            self._timeline.write()
        self._steps += spans.kept

    def update(self, step: int, span: Span) -> None:
        """Record the optimizer's own step, after the gradients became averages.

        Collective where it is the last one of the window.
        """
        # `step` has counted it already.
        if not self._done and self._config.first < self._steps <= self._config.end:
            self._timeline.add("update", span, self._main, {"step": step})
            if self._steps == self._config.end:
                self.finish()

    def finish(self) -> None:
        """End the window, if that has not been done. Collective."""
        if not self._done:
            self._done = True
            self._timeline.gather(self._comm)

    def _record(self, spans: StepSpans) -> None:
        add, step = self._timeline.add, spans.step
        if spans.backward is not None:
            add("backward", spans.backward, self._main, {"step": step})
        for bucket in spans.buckets:
            which: dict[str, int | str] = {"step": step, "bucket": f"{bucket.index} {bucket.name}"}
            outcome = bucket.outcome
            selected = (outcome.started - outcome.select_seconds, outcome.started)
            picked = {"numel": bucket.numel, "picked": bucket.picked}
            add("select", selected, self._background, {**which, **picked})
            sent = {"bytes_sent": bucket.bytes_sent}
            exchanged = (outcome.started, outcome.ended)
            add("communicate", exchanged, self._background, {**which, **sent})
            add("wait", bucket.waited, self._main, which)
            add("apply" if spans.kept else "discard", bucket.applied, self._main, which)


def rank_file(path: Path, rank: int) -> Path:
    """The file of one rank, beside that of the job."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.json'}")


def remove_earlier(path: Path) -> None:
    """Remove what an earlier job has left, which may have had other ranks."""
    path.unlink(missing_ok=True)
    pattern = rank_file(Path(glob.escape(path.name)), 0).name.replace(".rank0", ".rank[0-9]*")
    for left in path.parent.glob(pattern):
        left.unlink(missing_ok=True)


def replace_file(path: Path, events: Sequence[str]) -> None:
    """Write a JSON array; whoever reads the file finds the old one or the new one, whole."""
    aside = path.with_name(f"{path.name}.part")
    aside.write_text("[\n" + ",\n".join(events) + "\n]\n", encoding="utf-8")
    os.replace(aside, path)


def encode(events: Sequence[str]) -> torch.Tensor:
    """A message: uint8, compressed."""
    return torch.frombuffer(bytearray(zlib.compress("\n".join(events).encode())), dtype=torch.uint8)


def decode(message: torch.Tensor) -> list[str]:
    """What `encode` was given, not empty."""
    return zlib.decompress(message.numpy().tobytes()).decode().split("\n")


def clock_offset(comm: Communicator) -> float:
    """Seconds to add to this rank's clock (time.perf_counter) to get rank 0's. Collective.

    Exact to half a round trip: rank 0 is asked for its time, and the fastest answer counts.
    """
    nothing = torch.empty(0, dtype=torch.uint8)
    if comm.rank == 0:
        for rank in range(1, comm.size):
            for _ in range(ROUNDS):
                comm.recv(rank)
                now = torch.tensor([time.perf_counter()], dtype=torch.float64)
                comm.send(now.view(torch.uint8), rank)
        return 0.0
    answers = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        comm.send(nothing, 0)
        theirs = comm.recv(0).clone().view(torch.float64).item()
        end = time.perf_counter()
        answers.append((end - begin, theirs - (begin + end) / 2))
    return min(answers)[1]
