"""Streams and events of a device, and what stands for them on the CPU.

On a GPU the host only enqueues work. A stream runs its work in order, and work on two streams is
ordered by events: a mark on the one, for which the other waits on the device. On the CPU work is
done when it is called, so that its stand-ins have nothing to order; they let the same code run.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A place in the work of a stream."""

    def query(self) -> bool:
        """Whether the device has come to it; never waits."""

    def seconds_until(self, later: Any) -> float:
        """Time between two timed events that the device has come to."""


# The last work on each stream that has written something, by the stream's handle.
Marks = dict[int, Event]


class Stream(ABC):
    """A queue of work on one device.

    Attributes:
        device: where it runs.
        handle: address of the stream, as libraries beside torch want it.
    """

    device: torch.device
    handle: int

    @abstractmethod
    def current(self) -> AbstractContextManager[Any]:
        """Make it the current stream of this thread within a block."""

    @abstractmethod
    def follow(self, events: Iterable[Any]) -> None:
        """Let what is enqueued from now on wait for events, on the device."""

    @abstractmethod
    def mark(self, *, timed: bool = False) -> Event:
        """An event behind what has been enqueued so far; a `timed` one knows when it was."""

    @abstractmethod
    def mark_caller(self, marks: Marks) -> Marks:
        """Note in `marks`, and return, how far the stream has come that this thread now uses."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait on the host until all that has been enqueued is done."""


class CudaEvent:
    """An event of CUDA."""

    def __init__(self, timed: bool = False) -> None:
        """Not recorded yet."""
        self.event = torch.cuda.Event(enable_timing=timed)

    def query(self) -> bool:
        """See `Event.query`."""
        return self.event.query()

    def seconds_until(self, later: CudaEvent) -> float:
        """See `Event.seconds_until`."""
        return self.event.elapsed_time(later.event) / 1e3


class CudaStream(Stream):
    """A stream of CUDA beside torch's default one."""

    def __init__(self, device: torch.device) -> None:
        """A new stream on a CUDA device."""
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self.handle = self._stream.cuda_stream

    def current(self) -> AbstractContextManager[Any]:
        """See `Stream.current`; the device becomes current too."""
        return torch.cuda.stream(self._stream)

    def follow(self, events: Iterable[CudaEvent]) -> None:
        """See `Stream.follow`."""
        for event in events:
            self._stream.wait_event(event.event)

    def mark(self, *, timed: bool = False) -> CudaEvent:
        """See `Stream.mark`."""
        mark = CudaEvent(timed)
        mark.event.record(self._stream)
        return mark

    def mark_caller(self, marks: dict[int, Any]) -> Marks:
        """See `Stream.mark_caller`."""
        caller = torch.cuda.current_stream(self.device)
        mark = marks.get(caller.cuda_stream)
        if mark is None:
            mark = marks[caller.cuda_stream] = CudaEvent()
        mark.event.record(caller)
        return marks

    def synchronize(self) -> None:
        """See `Stream.synchronize`."""
        self._stream.synchronize()


class HostEvent:
    """A moment on the CPU."""

    def __init__(self) -> None:
        """Now."""
        self.at = time.perf_counter()

    def query(self) -> bool:
        """Work on the CPU is done when it is called."""
        return True

    def seconds_until(self, later: HostEvent) -> float:
        """See `Event.seconds_until`."""
        return later.at - self.at


class HostStream(Stream):
    """The stand-in for a stream on the CPU."""

    def __init__(self, device: torch.device) -> None:
        """`device`: the CPU."""
        self.device = device
        self.handle = id(self)

    def current(self) -> AbstractContextManager[Any]:
        """Nothing changes."""
        return nullcontext()

    def follow(self, events: Iterable[Any]) -> None:
        """What was called before is done."""

    def mark(self, *, timed: bool = False) -> HostEvent:
        """See `Stream.mark`."""
        return HostEvent()

    def mark_caller(self, marks: Marks) -> Marks:
        """What was called before is done."""
        return marks

    def synchronize(self) -> None:
        """What was called before is done."""


def make_stream(device: torch.device) -> Stream:
    """A new stream on a device."""
    return CudaStream(device) if device.type == "cuda" else HostStream(device)


def host_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor [numel] on the CPU that `device` can be copied to without waiting; undefined."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on a device, copied on the current stream; the host does not wait for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A tensor on the CPU: itself if it is there, else a copy; waits for the current stream only.

    The copy lies in pinned memory, which a GPU fills several times as fast as ordinary memory.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host
