"""Stands for cupy.cuda.nccl where ranks are threads and devices are the CPU.

Transfers copy between the memory that their addresses name. As with NCCL, a send and the recv that
it meets must be of one length and type, a rank's collectives must be the same on every rank, and
what is not in one group runs one after the other: a send waits for its recv. A mistake that would
hang NCCL, all ranks waiting for each other, is an error here.

NCCL only enqueues. A transfer whose peer does not come within `patience` seconds is left behind as
NCCL leaves it: its stream is stuck, and no event behind it ever happens.
"""

import ctypes
import itertools
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch

from ddl.streams import HostEvent, HostStream

TYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    4: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}


class NcclError(RuntimeError):
    """What NCCL refuses."""


class FakeNccl:
    """One installation of NCCL: the functions of cupy.cuda.nccl, and the ranks that use them.

    Attributes:
        patience: seconds until a transfer counts as enqueued for ever.
        stuck: handles of streams that wait for a transfer that never ends.
        calls: what was called, in no particular order across ranks: (rank, name).
        asynchronous_error: what `check_async_error` raises, if anything.
    """

    NcclError = NcclError
    NCCL_SUM = 0
    available = True

    def __init__(self, patience=10.0):
        self.patience = patience
        self.stuck = set()
        self.calls = []
        self.asynchronous_error = None
        self._changed = threading.Condition()
        self._jobs = {}
        self._names = itertools.count()
        self._group = threading.local()

    def get_unique_id(self):
        return b"%0128d" % next(self._names)

    def NcclCommunicator(self, ndev, commId, rank):
        with self._changed:
            job = self._jobs.setdefault(commId, _Job(ndev))
            job.present.add(rank)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(job.present) == ndev, self.patience):
                raise NcclError(f"rank {rank}: only {len(job.present)} of {ndev} ranks came")
        return _FakeCommunicator(self, job, rank)

    def groupStart(self):
        self._group.operations = []
        self._group.depth = getattr(self._group, "depth", 0) + 1

    def groupEnd(self):
        self._group.depth -= 1
        self._run(self._group.operations)

    def make_stream(self, device):
        """A stream that gets stuck as a stream of CUDA would."""
        return FakeStream(self, device)

    def memory(self, pointer, count, kind):
        """The tensor that lies at an address."""
        dtype = TYPES[kind]
        size = count * torch.empty(0, dtype=dtype).element_size()
        if size == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer((ctypes.c_byte * size).from_address(pointer), dtype=dtype)

    def settle(self):
        """Wait for what has been enqueued on the device; nothing to do on the CPU."""

    def _add(self, operation):
        self.calls.append((operation.rank, operation.name))
        if getattr(self._group, "depth", 0):
            self._group.operations.append(operation)
        else:
            self._run([operation])

    def _run(self, operations):
        """All of a group, at once."""
        if not operations or operations[0].stream in self.stuck:
            return
        job, rank, stream = operations[0].job, operations[0].rank, operations[0].stream
        deadline = time.monotonic() + self.patience
        self.settle()
        with self._changed:
            job.check(rank)
            if any(operation.stream != stream for operation in operations):
                raise NcclError("one group on two streams")
            for operation in operations:
                job.post(operation)
            job.match()
            self.settle()
            job.waiting[rank] = operations
            self._changed.notify_all()
            try:
                while not all(operation.done for operation in operations):
                    job.check(rank)
                    if not self._changed.wait(deadline - time.monotonic()):
                        job.withdraw(operations)
                        self.stuck.add(stream)
                        return
            finally:
                del job.waiting[rank]
                self._changed.notify_all()


class _Job:
    """The ranks that share a unique id."""

    def __init__(self, size):
        self.size = size
        self.present = set()
        self.aborted = set()
        self.failure = None
        self.waiting = {}  # rank: its operations
        self.sends = defaultdict(deque)  # (source, dest): operations
        self.recvs = defaultdict(deque)
        self.meetings = defaultdict(dict)  # (place in a rank's collectives): rank: operation
        self.collectives = defaultdict(int)  # rank: how many so far

    def check(self, rank):
        """Raise what has gone wrong, if anything."""
        if rank in self.aborted:
            raise NcclError("aborted")
        if self.failure is None and self._deadlocked():
            waits = (
                f"rank {rank} in {', '.join(o.name for o in operations if not o.done)}"
                for rank, operations in sorted(self.waiting.items())
            )
            self.failure = f"deadlock: {'; '.join(waits)}"
        if self.failure is not None:
            raise NcclError(self.failure)

    def post(self, operation):
        """Let the other ranks know of an operation."""
        if operation.name == "send":
            self.sends[operation.rank, operation.peer].append(operation)
        elif operation.name == "recv":
            self.recvs[operation.peer, operation.rank].append(operation)
        else:
            place = self.collectives[operation.rank]
            self.collectives[operation.rank] += 1
            self.meetings[place][operation.rank] = operation

    def withdraw(self, operations):
        """Forget operations, whose memory may soon be gone."""
        for queues in (self.sends, self.recvs):
            for pair, posted in queues.items():
                queues[pair] = deque(each for each in posted if each not in operations)
        for meeting in self.meetings.values():
            for rank in [rank for rank, each in meeting.items() if each in operations]:
                del meeting[rank]

    def match(self):
        """Do what both or all ranks have come to."""
        for pair in list(self.sends):
            while self.sends[pair] and self.recvs[pair]:
                self._transfer(self.sends[pair].popleft(), self.recvs[pair].popleft())
        for place, meeting in list(self.meetings.items()):
            if len(meeting) == self.size:
                self._meet([meeting[rank] for rank in range(self.size)])
                del self.meetings[place]

    def _transfer(self, send, recv):
        if (send.count, send.kind) != (recv.count, recv.kind):
            self.failure = (
                f"rank {send.rank} sends {send.count} of type {send.kind}, rank {recv.rank} "
                f"expects {recv.count} of type {recv.kind}"
            )
            return
        recv.received.copy_(send.sent)
        send.done = recv.done = True

    def _meet(self, operations):
        described = {(each.name, each.count, each.kind) for each in operations}
        if len(described) > 1:
            self.failure = f"ranks meet in different collectives: {sorted(described)}"
            return
        sent = [operation.sent for operation in operations]
        if operations[0].name == "allReduce":
            total = sent[0].clone()
            for part in sent[1:]:
                total += part
            results = [total] * self.size
        else:
            results = [torch.cat(sent)] * self.size
        for operation, result in zip(operations, results, strict=True):
            operation.received.copy_(result)
            operation.done = True

    def _deadlocked(self):
        """Whether every rank waits, and none only to be woken."""
        return len(self.waiting) == self.size and not any(
            all(operation.done for operation in operations) for operations in self.waiting.values()
        )


@dataclass(eq=False)
class _Operation:
    job: _Job
    rank: int
    name: str
    count: int
    kind: int
    stream: int
    sent: torch.Tensor | None = None
    received: torch.Tensor | None = None
    peer: int | None = None
    done: bool = field(default=False, init=False)


class _FakeCommunicator:
    """One rank's handle."""

    def __init__(self, nccl, job, rank):
        self._nccl, self._job, self._rank = nccl, job, rank
        self._streams = set()
        self._ended = False

    def send(self, sendbuf, count, datatype, peer, stream):
        sent = self._nccl.memory(sendbuf, count, datatype)
        self._add("send", count, datatype, stream, sent=sent, peer=peer)

    def recv(self, recvbuf, count, datatype, peer, stream):
        received = self._nccl.memory(recvbuf, count, datatype)
        self._add("recv", count, datatype, stream, received=received, peer=peer)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        sent = self._nccl.memory(sendbuf, count, datatype)
        received = self._nccl.memory(recvbuf, count * self._job.size, datatype)
        self._add("allGather", count, datatype, stream, sent=sent, received=received)

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        sent = self._nccl.memory(sendbuf, count, datatype)
        received = self._nccl.memory(recvbuf, count, datatype)
        self._add("allReduce", count, datatype, stream, sent=sent, received=received)

    def check_async_error(self):
        if self._nccl.asynchronous_error is not None:
            raise NcclError(self._nccl.asynchronous_error)

    def abort(self):
        self._nccl.calls.append((self._rank, "abort"))
        with self._nccl._changed:
            self._ended = True
            self._nccl.stuck -= self._streams
            self._job.aborted.add(self._rank)
            self._nccl._changed.notify_all()

    def destroy(self):
        self._nccl.calls.append((self._rank, "destroy"))
        self._ended = True

    def _add(self, name, count, kind, stream, **more):
        if self._ended:
            raise NcclError("invalid argument: the communicator is destroyed")
        self._streams.add(stream)
        operation = _Operation(self._job, self._rank, name, count, kind, stream, **more)
        self._nccl._add(operation)


class FakeStream(HostStream):
    """A stream of the CPU that stops where a transfer never ends."""

    def __init__(self, nccl, device):
        super().__init__(device)
        self.handle = next(nccl._names)
        self._nccl = nccl

    def mark(self, *, timed=False):
        return FakeEvent(self._nccl, self.handle)


class FakeEvent(HostEvent):
    """Never happens behind a transfer that never ends."""

    def __init__(self, nccl, handle):
        super().__init__()
        self._nccl, self._handle = nccl, handle
        self._behind = handle in nccl.stuck

    def query(self):
        return not self._behind
