"""Aggregators whose gradients, picks and messages stay on the device from begin to end.

The algorithm is that of aggregator.py, and so are its results, to the bit. What differs is who
waits: everything from the first kernel to the last is enqueued on the communication stream, whose
host thread waits once, at the end, for a report of a few numbers. Until then nothing on the host
depends on what the device has found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ddl import kernels, streams
from ddl.aggregation.aggregator import Aggregator, Outcome
from ddl.aggregation.device_selectors import DeviceSelector, LaunchedRandomK, launched
from ddl.collectives import Collective, aligned, allgather, device, device_gtopk, gtopk
from ddl.collectives.by_size import BySize
from ddl.collectives.device import DeviceCollected, DeviceCollective, Padded
from ddl.comm import Communicator
from ddl.comm.base import out_of_step
from ddl.comm.nccl import NcclCommunicator
from ddl.compressors import Compressor
from ddl.density import entries
from ddl.errors import DDLError
from ddl.kernels import CudaOperations
from ddl.kernels.launch import COUNT, REPORT_SIZE, Picks, Workspace
from ddl.streams import Event, Marks
from ddl.wires import PLAIN

logger = logging.getLogger(__name__)

# Collectives without an entry (the tree) go through the host.
DEVICE_COLLECTIVES: Mapping[Collective, DeviceCollective] = MappingProxyType(
    {
        allgather.all_gather: device.all_gather,
        aligned.all_reduce: device.aligned_all_reduce,
        gtopk.butterfly: device_gtopk.butterfly,
    }
)


class DevicePath:
    """Makes the aggregators of buckets that never leave a device."""

    def __init__(
        self, comm: NcclCommunicator, compressor: Compressor, operations: CudaOperations
    ) -> None:
        """See `device_path`."""
        self._comm = comm
        self._compressor = compressor
        self._operations = operations

    def connect(self) -> None:
        """Join the devices now, not with the first gradient. Collective.

        Raises:
            CommunicationError: NCCL refuses, or not every rank joins in time.
        """
        self._comm.connect()

    def aggregator(self, numel: int, seed: int, *, whole: bool) -> Aggregator:
        """A new aggregator.

        Args:
            numel: length of the bucket, which lives on the communicator's device.
            seed: of this bucket, the same on every rank.
            whole: whether the bucket is aggregated whole, whatever the compressor.

        Raises:
            ValueError: the compressor has no form that stays on the device.
        """
        if whole or self._compressor.make_selector is None:
            return DeviceDenseAggregator(self._comm)
        form = _device_form(self._compressor, seed)
        if form is None:
            raise ValueError(_without_form(self._compressor))
        ratio = self._compressor.winners_per_pick or 1.0  # no form of it is exact
        return DeviceAggregator(self._comm, numel, *form, self._operations, ratio)


def device_path(
    comm: Communicator,
    compressor: Compressor,
    devices: Sequence[torch.device],
    *,
    plain_feedback: bool = True,
) -> DevicePath | None:
    """How gradients can stay on the device; None where they go through the host.

    Where one would expect them to stay, the log says why they do not.

    Args:
        comm: the ranks; they need NCCL between them.
        compressor: how buckets are aggregated.
        devices: of the parameters; all have to be the communicator's.
        plain_feedback: whether there is error feedback, without momentum correction.
    """
    if not isinstance(comm, NcclCommunicator):
        return None
    elsewhere = sorted({str(device) for device in devices if device != comm.device})
    if elsewhere == ["cpu"]:
        return None  # nothing is staged
    reason = None
    if elsewhere:
        reason = (
            f"parameters lie on {', '.join(elsewhere)}, expected {comm.device}, the device of "
            f"rank {comm.rank} that NCCL has joined; move the model there"
        )
    elif compressor.make_selector is not None and _device_form(compressor, 0) is None:
        reason = _without_form(compressor)
    elif not plain_feedback:
        reason = "momentum correction, or no error feedback, has no form that stays on the device"
    operations = kernels.device_operations(comm.device)
    if reason is None and operations is not None:
        return DevicePath(comm, compressor, operations)
    logger.log(
        logging.WARNING if comm.rank == 0 or elsewhere else logging.DEBUG,
        "gradients are staged through host memory: %s",
        reason or f"there are no kernels for {comm.device}",
    )
    return None


def _device_form(
    compressor: Compressor, seed: int
) -> tuple[DeviceSelector, DeviceCollective] | None:
    if compressor.make_selector is None or compressor.make_collective is None:
        return None
    if compressor.wire is not PLAIN:
        return None
    selector = launched(compressor.make_selector(seed))
    collective = compressor.make_collective()
    if isinstance(collective, BySize):  # its exact form works on the host
        collective = gtopk.butterfly
    collect = DEVICE_COLLECTIVES.get(collective)
    return None if selector is None or collect is None else (selector, collect)


def _without_form(compressor: Compressor) -> str:
    return (
        f"compressor {compressor.name!r} with collective {compressor.collective_name!r} and wire "
        f"{compressor.wire.name!r} has no form that stays on the device"
    )


class DeviceAggregator:
    """Select, collect, repay, without leaving the device. See `Aggregator`."""

    first = 0
    velocity = None

    def __init__(
        self,
        comm: NcclCommunicator,
        numel: int,
        selector: DeviceSelector,
        collect: DeviceCollective,
        operations: CudaOperations,
        winners_per_pick: float = 1.0,
    ) -> None:
        """Owe nothing yet.

        Args:
            comm: the ranks; this aggregator uses it only within `begin`.
            numel: length of the bucket, which lives on the communicator's device.
            selector: of this bucket.
            collect: the collective.
            operations: of the communicator's device.
            winners_per_pick: see `Compressor`.
        """
        self._comm = comm
        self._selector = selector
        self.draws = selector.draws if isinstance(selector, LaunchedRandomK) else None
        self._collect = collect
        self._winners_per_pick = winners_per_pick
        self._operations = operations
        self._workspace = Workspace(comm.device)
        self._size = _size_of(comm)
        self._run = _Run(comm)
        self._begun: _Begun | None = None
        self.residual = torch.zeros(numel, dtype=torch.float32, device=comm.device)

    def begin(self, flat: Tensor, density: float, loss_scale: float = 1.0) -> Outcome:
        """See `Aggregator.begin`."""
        run, operations = self._run, self._operations
        k = entries(flat.numel(), density)
        winners = entries(flat.numel(), min(1.0, density * self._winners_per_pick))
        with run.enqueue():
            picks = self._selector.launch(
                operations, flat, self.residual, k, 1.0 / loss_scale, self._workspace
            )
            run.mark()
            collected = self._collect(self._comm, operations, picks, winners, self._workspace)
            run.mark()
            self._give_back_dropped(picks, collected)
            total = collected.total
            average = Padded(total.indices, (total.values / self._size) * loss_scale)
            overflowing = ~torch.isfinite(average.values.to(flat.dtype))
            overflows = overflowing.sum(0, keepdim=True, dtype=torch.int32)
            run.report(picks.report, collected.finite, overflows, collected.labels)
        words = run.result("the gradients of the other ranks")
        _check_labels(self._comm, collected.peers, words[REPORT_SIZE + 2 :])
        self._selector.learn(k, picks, words[:REPORT_SIZE])
        all_finite, overflow_count = words[REPORT_SIZE : REPORT_SIZE + 2]
        finite = bool(all_finite) and overflow_count == 0
        self._begun = _Begun(average, picks, collected.included, overflowing, finite, loss_scale)
        return run.outcome(finite, picked=words[COUNT])

    def apply(self, flat: Tensor) -> None:
        """See `Aggregator.apply`."""
        average = self._take_begun().average
        self._operations.scatter(flat, average.indices, average.values, 1.0)

    def owe(self, flat: Tensor) -> None:
        """See `Aggregator.owe`."""
        begun = self._take_begun()
        picks = begun.picks
        owed = ~_occur_in(picks.indices, begun.average.indices, begun.overflowing)
        if begun.included is not None:
            owed &= begun.included
        self._operations.give_back(self.residual, picks.indices, picks.values, owed)
        if not begun.finite:
            flat.fill_(float("nan"))

    def discard(self, flat: Tensor) -> None:
        """See `Aggregator.discard`."""
        begun = self._take_begun()
        picks = begun.picks
        self._operations.give_back(self.residual, picks.indices, picks.values, begun.included)
        gradient = torch.nan_to_num(flat.float(), nan=0.0, posinf=0.0, neginf=0.0)
        self.residual.sub_(gradient, alpha=1.0 / begun.loss_scale)

    def _give_back_dropped(self, picks: Picks, collected: DeviceCollected) -> None:
        if collected.included is not None:
            dropped = ~collected.included
            self._operations.give_back(self.residual, picks.indices, picks.values, dropped)

    def _take_begun(self) -> _Begun:
        begun, self._begun = self._begun, None
        if begun is None:
            raise DDLError(
                "nothing has begun, expected one begin() before each apply, owe, discard"
            )
        return begun


class _Begun(NamedTuple):
    """What `begin` leaves for the second half."""

    average: Padded  # times the loss scale
    picks: Picks
    included: Tensor | None  # bool [capacity of the picks]: which of them the average contains
    overflowing: Tensor  # bool [capacity of the average]: what the gradient's dtype cannot hold
    finite: bool
    loss_scale: float


class DeviceDenseAggregator:
    """The plain average without leaving the device. See `DenseAggregator`."""

    first = 0
    draws = None
    velocity = None

    def __init__(self, comm: NcclCommunicator) -> None:
        """`comm`: the ranks; used only within `begin`."""
        self._comm = comm
        self._size = _size_of(comm)
        self._run = _Run(comm)

    @property
    def residual(self) -> None:
        """See `Aggregator.residual`."""
        return None

    def begin(self, flat: Tensor, density: float, loss_scale: float = 1.0) -> Outcome:
        """See `Aggregator.begin`; neither `density` nor `loss_scale` is used."""
        run = self._run
        with run.enqueue():
            run.mark()  # nothing to select
            if self._comm.size > 1:
                # Before the sum, because half-precision sums overflow where their average does not.
                flat.div_(self._size)
            nothing_to_say = torch.ones(1, dtype=torch.int32, device=flat.device)
            _, labels = device.all_reduce_(self._comm, flat, nothing_to_say)
            run.mark()
            finite = torch.isfinite(flat).all().to(torch.int32).view(1)
            run.report(finite, labels)
        words = run.result("the gradients of the other ranks")
        _check_labels(self._comm, range(self._comm.size), words[1:])
        return run.outcome(bool(words[0]), picked=flat.numel())

    def apply(self, flat: Tensor) -> None:
        """See `Aggregator.apply`."""

    def owe(self, flat: Tensor) -> None:
        """See `Aggregator.owe`; a dense gradient of a skipped step is dropped."""

    def discard(self, flat: Tensor) -> None:
        """See `Aggregator.discard`."""


class _Run:
    """One `begin` after the other: what is enqueued, when it ran, and the report at its end."""

    def __init__(self, comm: NcclCommunicator) -> None:
        self._comm = comm
        self._marks: list[Event] = []  # begin of selection, of communication, its end, the end
        self._bytes_before = 0
        self._report = streams.host_buffer(0, torch.int32, comm.device)

    @contextmanager
    def enqueue(self) -> Iterator[None]:
        """Run what the block enqueues on the communication stream, behind the caller's work."""
        stream = self._comm.stream
        caller: Marks = {}
        stream.mark_caller(caller)
        self._marks = []
        self._bytes_before = self._comm.bytes_sent
        with stream.current():
            stream.follow(caller.values())
            self.mark()
            yield
            self.mark()

    def mark(self) -> None:
        """Note on the device when the next part begins."""
        self._marks.append(self._comm.stream.mark(timed=True))

    def report(self, *parts: Tensor) -> None:
        """Copy a few int32 numbers to the host, as the last thing within the block."""
        numbers = torch.cat(parts)
        if self._report.numel() != numbers.numel():
            device = self._comm.device
            self._report = streams.host_buffer(numbers.numel(), torch.int32, device)
        self._report.copy_(numbers, non_blocking=True)

    def result(self, what: str) -> list[int]:
        """Wait for the device, once, and return the reported numbers."""
        self._comm.wait(self._marks[-1], what)
        return self._report.tolist()

    def outcome(self, finite: bool, picked: int) -> Outcome:
        """The outcome, with the device's times on the host's clock."""
        now = time.perf_counter()
        begun, started, ended, done = self._marks
        end = now - ended.seconds_until(done)
        return Outcome(
            finite=finite,
            picked=picked,
            select_seconds=begun.seconds_until(started),
            started=end - started.seconds_until(ended),
            ended=end,
            bytes_sent=self._comm.bytes_sent - self._bytes_before,
        )


def _size_of(comm: NcclCommunicator) -> Tensor:
    """P on the device. By a number on the host CUDA multiplies with its rounded reciprocal."""
    return torch.full((), comm.size, dtype=torch.float32, device=comm.device)


def _occur_in(indices: Tensor, others: Tensor, marked: Tensor) -> Tensor:
    """Which of `indices` occur among the `marked` ones of `others`, both int32 and ascending."""
    if others.numel() == 0:
        return torch.zeros_like(indices, dtype=torch.bool)
    place = torch.searchsorted(others, indices).clamp(max=others.numel() - 1)
    return (others[place] == indices) & marked[place]


def _check_labels(comm: NcclCommunicator, peers: Sequence[int], labels: Sequence[int]) -> None:
    """Refuse a sum of different buckets or steps."""
    for peer, label in zip(peers, labels, strict=True):
        if label != comm.label:
            raise out_of_step(comm, peer, label)
