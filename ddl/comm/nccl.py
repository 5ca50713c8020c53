"""Ranks with a GPU each, joined by NCCL: tensors go from device to device, messages by the host.

Two planes, of the same ranks:

1. *Messages* between hosts go through another communicator (MPI, threads), as they do without
   NCCL. So every collective of ddl.collectives runs here too.
2. *Transfers* between devices are enqueued on one communication stream and return at once; sizes
   are known to both sides beforehand. Whoever needs the result enqueues its own work on the same
   stream, or waits for an event by `wait`, which has the deadline.

NCCL enqueues; it does not tell when a peer never comes. So `wait` polls, asks NCCL for errors, and
at the deadline ends NCCL's kernels, which would otherwise hold the device for ever.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from ddl import streams
from ddl.comm import polling
from ddl.comm.base import Communicator
from ddl.errors import CommunicationError, DeadlineError
from ddl.streams import Event, Stream

# Between two looks at the device, which has nothing to do until the host enqueues the next bucket.
LONGEST_SLEEP = 100e-6
# How long the end of a broken communicator may take before it is left to itself.
PATIENCE_SECONDS = 5.0

# ncclDataType_t; older CuPy lacks a name for bfloat16.
_TYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}


def load_nccl() -> Any:
    """Import cupy.cuda.nccl.

    Raises:
        CommunicationError: no CuPy, or a CuPy that finds no NCCL; names the cure.
    """
    try:
        from cupy.cuda import nccl
    except Exception as error:  # a CuPy of another CUDA fails in many ways
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CommunicationError(
            f"CuPy was not found ({first_line}), expected the one of this CUDA: "
            "pip install 'ddl[cuda13]', or 'ddl[cuda12]'"
        ) from error
    if not nccl.available:
        raise CommunicationError(
            "CuPy finds no NCCL library, expected libnccl.so.2; pip install nvidia-nccl-cu13, or "
            "nvidia-nccl-cu12"
        )
    return nccl


class NcclCommunicator(Communicator):
    """One rank of a job whose ranks have a GPU each.

    NCCL itself is joined with the first transfer, or by `connect`; a communicator that is only used
    for messages costs no memory on the device.

    Attributes:
        device: this rank's.
        stream: where all transfers run.
    """

    def __init__(
        self,
        host: Communicator,
        device: torch.device,
        nccl: Any,
        make_stream: Callable[[torch.device], Stream] = streams.make_stream,
    ) -> None:
        """Wrap a communicator that nothing else uses.

        Args:
            host: carries the messages.
            device: a CUDA device that no other rank uses.
            nccl: the module `cupy.cuda.nccl`, see `load_nccl`, or one with the same functions.
            make_stream: makes the communication stream.
        """
        local = (host.local_rank, host.local_size)
        super().__init__(host.rank, host.size, host.timeout, local)
        self._split_from(host, range(host.size))
        self.device = device
        self.stream = make_stream(device)
        self._host = host
        self._nccl = nccl
        self._make_stream = make_stream
        self._handle: Any = None
        self._broken = False
        self._cancelled = False

    # Messages.

    def _exchange(
        self, message: Tensor | None, dest: int | None, source: int | None
    ) -> Tensor | None:
        self._host.label, self._host.doing = self.label, self.doing
        return self._host._exchange(message, dest, source)

    def split(self, color: int, key: int) -> NcclCommunicator:
        """See `Communicator.split`."""
        return self._over(self._host.split(color, key))

    def duplicate(self) -> NcclCommunicator:
        """See `Communicator.duplicate`."""
        return self._over(self._host.duplicate())

    def _over(self, host: Communicator) -> NcclCommunicator:
        return NcclCommunicator(host, self.device, self._nccl, self._make_stream)

    def waiting(self) -> str | None:
        """See `Communicator.waiting`."""
        self._host.waits_for = self.waits_for
        return self._host.waiting()

    # Transfers.

    def connect(self) -> None:
        """Join the ranks' devices, unless they are joined already. Collective.

        Raises:
            CommunicationError: NCCL refuses.
            DeadlineError: a rank did not join in time.
        """
        if self.size == 1 or self._handle is not None:
            return
        if self._broken:
            raise self._ended()
        unique_id = self._share_id()
        self._handle = self._bounded(
            lambda: self._nccl.NcclCommunicator(self.size, unique_id, self.rank)
        )

    def exchange(
        self, sent: Tensor | None, dest: int, received: Tensor | None, source: int
    ) -> None:
        """Send a tensor to one rank and receive one from another, at once.

        Args:
            sent: contiguous, on `device`; unchanged until the stream has come past this call. None
                sends nothing.
            dest: the rank that receives `sent`, with a tensor of the same length and dtype.
            received: contiguous, on `device`, overwritten; None receives nothing.
            source: the rank that sends to `received`.

        Raises:
            CommunicationError: NCCL refuses.
        """
        outgoing = None if sent is None else self._described(sent)
        incoming = None if received is None else self._described(received)
        with self._group("an exchange") as handle:
            if outgoing is not None:
                handle.send(*outgoing, dest, self.stream.handle)
            if incoming is not None:
                handle.recv(*incoming, source, self.stream.handle)
        self.bytes_sent += 0 if sent is None else sent.numel() * sent.element_size()

    def all_gather(self, part: Tensor, whole: Tensor) -> None:
        """Bring the tensors of all ranks together, in rank order; a rank sends P - 1 times its own.

        Args:
            part: contiguous, on `device`, of the same length and dtype on every rank.
            whole: contiguous, on `device`, P times as long, overwritten.

        Raises:
            CommunicationError: NCCL refuses.
        """
        if whole.numel() != self.size * part.numel():
            raise ValueError(
                f"whole must have {self.size} times the {part.numel()} elements of part, got "
                f"{whole.numel()}"
            )
        if self.size == 1:
            whole.copy_(part)
            return
        outgoing, count, kind = self._described(part)
        incoming, _, _ = self._described(whole)
        with self._group("an all-gather") as handle:
            handle.allGather(outgoing, incoming, count, kind, self.stream.handle)
        self.bytes_sent += (self.size - 1) * part.numel() * part.element_size()

    def all_reduce_(self, *tensors: Tensor) -> None:
        """Replace tensors by their sums over ranks, in one go; the same bits on every rank.

        Bytes are counted as a ring sends them, 2 (P-1)/P of the tensors'.

        Args:
            tensors: contiguous, on `device`, each of the same length and dtype on every rank;
                float32, bfloat16, float16 or int32. Sums are in their dtype.

        Raises:
            CommunicationError: NCCL refuses.
        """
        if self.size == 1:
            return
        described = [self._described(tensor) for tensor in tensors]
        with self._group("an all-reduce") as handle:
            for pointer, count, kind in described:
                handle.allReduce(
                    pointer, pointer, count, kind, self._nccl.NCCL_SUM, self.stream.handle
                )
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.bytes_sent += 2 * (self.size - 1) * size // self.size

    def wait(self, event: Event, what: str) -> None:
        """Wait on the host until the device has come to an event; the thread sleeps meanwhile.

        Args:
            event: of the communication stream.
            what: it is that is waited for, for the error's message.

        Raises:
            DeadlineError: not within `timeout` seconds; no transfer is possible afterwards.
            CommunicationError: NCCL reports an error, or another thread cancelled the wait.
        """

        def poll() -> bool | None:
            if event.query():
                return True
            handle = self._handle  # another thread may end it
            if handle is not None:
                with self._funnel(what):
                    handle.check_async_error()
            return None

        try:
            polling.wait(
                poll,
                f"rank {self.rank} of {self.size} waits for {what}",
                self.timeout,
                cancelled=lambda: self._cancelled,
                longest_sleep=LONGEST_SLEEP,
            )
        except CommunicationError:
            self._end()
            raise

    def cancel(self) -> None:
        """See `Communicator.cancel`."""
        self._cancelled = True
        self._host.cancel()
        self._end()

    def disconnect(self) -> None:
        """Free what NCCL holds on the device, until the next transfer joins anew. Collective."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.destroy()

    def close(self) -> None:
        """See `Communicator.close`."""
        self.disconnect()
        self._host.close()

    def abort(self, reason: str, status: int = 1) -> NoReturn:
        """See `Communicator.abort`."""
        self._host.abort(reason, status)

    # What the above is made of.

    def _share_id(self) -> Any:
        """NCCL's name for this group of ranks: drawn on rank 0, sent to the others as a message."""
        if self.rank:
            unique_id, refusal = pickle.loads(self.recv(0).numpy().tobytes())
        else:
            unique_id, refusal = None, None
            try:
                unique_id = self._nccl.get_unique_id()
            except Exception as error:  # the others wait for a word
                refusal = str(error)
            message = torch.frombuffer(
                bytearray(pickle.dumps((unique_id, refusal))), dtype=torch.uint8
            )
            for dest in range(1, self.size):
                self.send(message, dest)
        if refusal is not None:
            raise CommunicationError(f"NCCL does not start on rank 0: {refusal}")
        return unique_id

    def _bounded(self, action: Callable[[], Any]) -> Any:
        """Do what NCCL does not return from before all ranks have come, with the deadline."""
        outcomes: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def act() -> None:
            try:
                with self.stream.current():  # the device belongs to the thread, too
                    outcomes.put((action(), None))
            except BaseException as error:  # carried over to the waiting thread
                outcomes.put((None, error))

        threading.Thread(target=act, name=f"ddl-nccl-{self.rank}", daemon=True).start()
        try:
            result, error = outcomes.get(timeout=min(self.timeout, threading.TIMEOUT_MAX))
        except queue.Empty:
            self._broken = True
            raise DeadlineError(
                f"rank {self.rank} of {self.size} joins NCCL: not every rank within "
                f"{self.timeout:g} s; is one stalled, or is a network interface the wrong one? "
                "NCCL_DEBUG=INFO shows where NCCL stands"
            ) from None
        if error is not None:
            with self._funnel("to join"):
                raise error
        return result

    @contextmanager
    def _group(self, what: str) -> Iterator[Any]:
        """Transfers on NCCL's handle within the block are enqueued as one at its end."""
        self.connect()
        handle = self._handle  # another thread may end it
        if handle is None:
            raise self._ended()
        with self._funnel(what):
            self._nccl.groupStart()
            try:
                yield handle
            finally:
                self._nccl.groupEnd()

    @contextmanager
    def _funnel(self, what: str) -> Iterator[None]:
        try:
            yield
        except (self._nccl.NcclError, KeyError) as error:  # KeyError: a code that CuPy lacks
            said = "cancelled" if self._cancelled else error
            raise CommunicationError(
                f"rank {self.rank} of {self.size}, NCCL, {what}: {said}; look for the first rank "
                "that failed, or set NCCL_DEBUG=INFO"
            ) from error

    def _described(self, tensor: Tensor) -> tuple[int, int, int]:
        """Address, length and type of a tensor, as NCCL wants them."""
        if tensor.device != self.device or not tensor.is_contiguous():
            raise ValueError(
                f"a transfer takes contiguous tensors on {self.device}, got one on "
                f"{tensor.device} with strides {tensor.stride()}; move it, or use .contiguous()"
            )
        if tensor.dtype not in _TYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TYPES)
            raise ValueError(f"a transfer takes {known}, got {tensor.dtype}; view it as int32")
        return tensor.data_ptr(), tensor.numel(), _TYPES[tensor.dtype]

    def _ended(self) -> CommunicationError:
        return CommunicationError(
            f"rank {self.rank} of {self.size}: no transfer is possible, because NCCL was ended "
            "after an earlier failure, or the rank has no peers; look for the first error"
        )

    def _end(self) -> None:
        """End NCCL's kernels, and whatever call another thread is in."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        self._broken = True
        # On a thread of its own, because the end of a broken communicator has been seen to hang.
        ending = threading.Thread(target=handle.abort, name="ddl-nccl-end", daemon=True)
        ending.start()
        ending.join(PATIENCE_SECONDS)


class WorkerStreams(dict[torch.device, Stream]):
    """The streams of a thread that uses a communicator, by device; made when first asked for."""

    def __init__(self, comm: Communicator) -> None:
        """On the device of an NCCL communicator its stream is the thread's."""
        super().__init__()
        if isinstance(comm, NcclCommunicator):
            self[comm.device] = comm.stream

    def __missing__(self, device: torch.device) -> Stream:
        """A new stream."""
        stream = self[device] = streams.make_stream(device)
        return stream
