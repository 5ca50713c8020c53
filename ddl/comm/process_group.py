"""Ranks as processes under torchrun, or wherever torch.distributed runs, through gloo.

1. Each communicator has a gloo group of its own, so threads that use two of them never meet, and
   one that is cancelled takes no other with it. The default group of torch.distributed is neither
   made nor used: only its store, where the ranks of a new group find each other.
2. A message is a frame of label, length and first bytes. A longer one has a second part, for which
   the receiver then has the room: two journeys, which only pay where bytes decide, not latency.
3. Gloo sends nothing before the receiver has asked for it. So the next frame of a rank is asked for
   as soon as the last one is here, which saves half a round trip per message.

Waiting costs no processor time: gloo's own thread sleeps until the network has something.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ddl.comm.base import Communicator, out_of_step
from ddl.comm.job_store import Job
from ddl.comm.polling import STALLED
from ddl.comm.suspects import REMEDY
from ddl.errors import CommunicationError, DeadlineError

HEADER_BYTES = 16  # label and length, int64 each

# Bytes of a message that travel in its first frame. They are copied on both sides, which takes
# 10-20 us; asking for a second part takes a round trip, 50-200 us on Ethernet.
INLINE_BYTES = 256 * 1024

MESSAGES, CANCELLATIONS = 0, 1  # gloo's tags; nobody ever sends a cancellation

LONGEST_SECONDS = 1e8  # what gloo's clocks can add up


def load_distributed() -> Any:
    """Import torch.distributed and check that it has gloo.

    Returns:
        The module `torch.distributed`.

    Raises:
        CommunicationError: this torch was built without it.
    """
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        raise CommunicationError(
            "this torch was built without gloo, expected torch.distributed with gloo; install a "
            "torch wheel of pytorch.org or PyPI, or use mpirun"
        )
    return torch.distributed


class _Standing(NamedTuple):
    """A frame that has been asked for: where it will be, and gloo's handle."""

    frame: Tensor
    work: Any


class ProcessGroupCommunicator(Communicator):
    """One process of a job that torchrun, or another launcher of torch.distributed, started."""

    def __init__(
        self,
        job: Job,
        name: str,
        members: tuple[int, int],
        timeout: float,
        local: tuple[int, int] | None = None,
    ) -> None:
        """Meet the other ranks of a group. Collective over them.

        Args:
            job: what is shared with other communicators.
            name: of the group; no other group of the job ever has it.
            members: this rank, and their number.
            timeout: see `Communicator`.
            local: rank and size on this host, if others exist.
        """
        rank, size = members
        super().__init__(rank, size, timeout, local)
        self._job = job
        self._key = name
        self._splits = 0
        self._cancelled = False
        self._standing: dict[int, _Standing] = {}
        self._sending: list[tuple[Any, int]] = []
        self._outgoing = torch.empty(HEADER_BYTES + INLINE_BYTES, dtype=torch.uint8)
        self._group: Any = None
        dist = load_distributed()
        begun = time.monotonic()
        try:
            store = dist.PrefixStore(name, job.store)
            self._group = dist.ProcessGroupGloo(store, rank, size, _duration(timeout))
        except RuntimeError as error:
            what = "to meet the other ranks"
            cure = (
                "is one stalled, or does gloo use the wrong network interface? GLOO_SOCKET_IFNAME "
                "names the right one"
            )
            raise self._failed(what, begun, None, cure) from error

    @classmethod
    def world(cls, timeout: float) -> ProcessGroupCommunicator:
        """All processes of torch.distributed's default group, or else of the environment.

        Raises:
            CommunicationError: the environment names no job, or see `join`.
            DeadlineError: not every rank came in time.
        """
        dist = load_distributed()
        begun = time.monotonic()
        try:
            store, rank, size = _find_job(dist, timeout)
        except (RuntimeError, ValueError) as error:
            waited = time.monotonic() - begun
            kind = DeadlineError if waited > timeout else CommunicationError
            raise kind(
                f"no job of torch.distributed could be joined within {waited:.0f} s "
                f"({_first_line(error)}); start with torchrun --nproc-per-node N, or call "
                "torch.distributed.init_process_group first"
            ) from error
        return cls.join(store, rank, size, timeout, os.environ)

    @classmethod
    def join(
        cls, store: Any, rank: int, size: int, timeout: float, environ: Mapping[str, str]
    ) -> ProcessGroupCommunicator:
        """The ranks that share a store of torch.distributed. Collective.

        Args:
            store: the same for all ranks; left as it is, but for keys that begin with "ddl/".
            rank: this worker, 0..size-1.
            size: number of workers.
            timeout: see `Communicator`.
            environ: what torchrun sets. Without LOCAL_RANK and LOCAL_WORLD_SIZE hosts are told by
                their names.

        Raises:
            CommunicationError: ranks disagree on their hosts.
            DeadlineError: not every rank came in time.
        """
        joined = store.add(f"ddl/joined/{rank}", 1)  # a job can be left and joined again
        job = Job(
            load_distributed().PrefixStore(f"ddl/{joined}", store),
            outlives=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            host=_number_of_host(),
        )
        comm = cls(job, "world", (rank, size), timeout)
        mine = [int(environ.get(name, -1)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        told = comm._gather_numbers(job.host, *mine, os.getpid())
        places = local_places([row[:3] for row in told])
        job.neighbours.extend(process for host, _, _, process in told if host == job.host)
        comm.local_rank, comm.local_size = places[rank]
        return comm

    def _exchange(
        self, message: Tensor | None, dest: int | None, source: int | None
    ) -> Tensor | None:
        self._finish_sends()  # of an exchange that ended in an error
        if message is not None and dest is not None:
            self._begin_send(message, dest)
        received = None if source is None else self._receive(source)
        self._finish_sends()
        return received

    def _begin_send(self, message: Tensor, dest: int) -> None:
        inline = min(message.numel(), INLINE_BYTES)
        frame = self._outgoing[: HEADER_BYTES + inline]
        frame[:HEADER_BYTES] = torch.tensor([self.label, message.numel()]).view(torch.uint8)
        frame[HEADER_BYTES:] = message[:inline]
        for part in (frame, message[inline:]) if inline < message.numel() else (frame,):
            self._sending.append((self._post("send", part, dest), dest))

    def _finish_sends(self) -> None:
        while self._sending:
            work, dest = self._sending[0]
            self._wait(work, f"for {self._name(dest)} to take a message", dest)
            del self._sending[0]

    def _receive(self, source: int) -> Tensor:
        what = f"for a message of {self._name(source)}"
        standing = self._standing.pop(source, None)
        frame, work = standing or self._ask(torch.empty_like(self._outgoing), source)
        self._wait(work, what, source)
        label, length = frame[:HEADER_BYTES].view(torch.int64).tolist()
        received = torch.empty(length, dtype=torch.uint8)
        inline = min(length, INLINE_BYTES)
        received[:inline] = frame[HEADER_BYTES : HEADER_BYTES + inline]
        rest = self._post("recv", received[inline:], source) if inline < length else None
        try:
            self._standing[source] = self._ask(frame, source)
        except CommunicationError:
            pass  # a rank may leave after its last message; who waits for another is told then
        if rest is not None:
            self._wait(rest, what, source)
        if label != self.label:
            raise out_of_step(self, source, label)
        return received

    def _ask(self, frame: Tensor, source: int) -> _Standing:
        return _Standing(frame, self._post("recv", frame, source))

    def _post(self, verb: str, part: Tensor, peer: int) -> Any:
        """Start to send or receive, and return gloo's handle."""
        begun = time.monotonic()
        if self._group is None:
            raise CommunicationError(f"{self.who}: closed")
        try:
            return getattr(self._group, verb)([part], peer, MESSAGES)
        except RuntimeError as error:
            raise self._failed("to begin a message", begun, peer) from error

    def _name(self, peer: int | None) -> str:
        return "a rank" if peer is None else f"rank {self.job_ranks[peer]}"

    def _wait(self, work: Any, what: str, peer: int) -> None:
        begun = time.monotonic()
        try:
            work.wait(_duration(self.timeout))
        except RuntimeError as error:
            raise self._failed(what, begun, peer) from error

    def _failed(
        self,
        what: str,
        begun: float,
        peer: int | None,
        cure: str | None = None,
    ) -> CommunicationError:
        """What gloo's RuntimeError means. After any of them the whole group is out of use."""
        who = f"{self.who} waits {what}"
        if self._cancelled:
            return CommunicationError(f"{who}: cancelled")
        if time.monotonic() - begun > self.timeout - 1e-3:  # gloo counts milliseconds
            if cure is None and peer is not None:
                me = self.job_ranks[self.rank]
                cure = self._job.suspicion(me, self.job_ranks[peer], self.doing)
            return DeadlineError(f"{who}: nothing within {self.timeout:g} s; {cure or STALLED}")
        first = self._job.first_failure()
        return CommunicationError(
            f"{who}: {self._name(peer)} is gone; "
            + (
                f"the first to end was {first}"
                if first
                else f"look for the first rank that failed; {REMEDY}"
            )
        )

    def split(self, color: int, key: int) -> ProcessGroupCommunicator:
        """See `Communicator.split`."""
        self._splits += 1
        table = self._gather_numbers(color, key, self._job.host)
        members = sorted(
            (key, rank, host) for rank, (other, key, host) in enumerate(table) if other == color
        )
        ranks = [rank for _, rank, _ in members]
        neighbours = [rank for _, rank, host in members if host == self._job.host]
        group = ProcessGroupCommunicator(
            self._job,
            f"{self._key}/{self._splits}.{color}",
            (ranks.index(self.rank), len(ranks)),
            self.timeout,
            (neighbours.index(self.rank), len(neighbours)),
        )
        group._split_from(self, ranks)
        return group

    def _gather_numbers(self, *numbers: int) -> list[list[int]]:
        """The numbers of every rank, in rank order; each round doubles what a rank knows of."""
        known = {self.rank: list(numbers)}
        distance = 1
        while distance < self.size:
            rows = torch.tensor([[rank, *row] for rank, row in known.items()])
            self._begin_send(rows.flatten().view(torch.uint8), (self.rank + distance) % self.size)
            received = self._receive((self.rank - distance) % self.size)
            self._finish_sends()
            rows = received.view(torch.int64).view(-1, 1 + len(numbers))
            known.update((rank, row) for rank, *row in rows.tolist())
            distance *= 2
        return [known[rank] for rank in range(self.size)]

    def cancel(self) -> None:
        """See `Communicator.cancel`."""
        self._cancelled = True
        group = self._group
        if group is None:
            return
        # Gloo ends all waits of a group when one of them has timed out.
        for peer in set(range(self.size)) - {self.rank}:
            try:
                group.recv([torch.empty(1)], peer, CANCELLATIONS).wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass  # as intended; a rank that is gone does not end the waits for the others

    def close(self) -> None:
        """See `Communicator.close`."""
        self._standing.clear()
        self._sending.clear()
        self._group = None

    def abort(self, reason: str, status: int = 1) -> NoReturn:
        """See `Communicator.abort`.

        The end of this process closes its connections, so that ranks which wait for it end too;
        torchrun ends the others.
        """
        failure = f"{self.who}: {reason}"
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            print(f"ddl: {failure}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        self._job.announce(failure)
        for process in self._job.neighbours:
            # One that is stopped would not end when torchrun asks it to.
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGCONT)
        os._exit(status)  # sys.exit would only end this thread


def local_places(ranks: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Rank and size on its host, for each rank of a job.

    Args:
        ranks: a number for the host, LOCAL_RANK and LOCAL_WORLD_SIZE, -1 where they are not set.

    Raises:
        CommunicationError: some ranks have a LOCAL_RANK and some not, or two have the same.
    """
    given = [local_rank >= 0 for _, local_rank, _ in ranks]
    if any(given) and not all(given):
        raise CommunicationError(
            f"rank {given.index(True)} has a LOCAL_RANK, rank {given.index(False)} has none; set "
            "it for all ranks, as torchrun does, or for none"
        )
    sizes = Counter(host for host, _, _ in ranks)
    seen: dict[tuple[int, int], int] = {}
    places = []
    for rank, (host, local_rank, local_size) in enumerate(ranks):
        if not any(given):
            local_rank, local_size = sum(ranks[other][0] == host for other in range(rank)), -1
        other = seen.setdefault((host, local_rank), rank)
        if other != rank:
            raise CommunicationError(
                f"ranks {other} and {rank} are on the same host with the same LOCAL_RANK, "
                f"{local_rank}; unset it, or let torchrun set it"
            )
        places.append((local_rank, sizes[host] if local_size < 0 else local_size))
    return places


def _find_job(dist: Any, timeout: float) -> tuple[Any, int, int]:
    """Store, rank and size."""
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        if store is None:  # of torch's own MPI
            raise RuntimeError("its default group has no store")
        return store, dist.get_rank(), dist.get_world_size()
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://", timeout=_duration(timeout)))


def _number_of_host() -> int:
    """The same for all processes of a machine. Hosts in containers may share a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{platform.node()} {boot.read_text() if boot.exists() else ''}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")


def _duration(seconds: float) -> timedelta:
    """For gloo, to which 0 means its own default."""
    return timedelta(seconds=min(max(seconds, 1e-3), LONGEST_SECONDS))


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
