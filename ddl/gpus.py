"""Which GPU each rank has, and whether NCCL can join them.

NCCL wants a GPU for every rank, and no GPU twice. All ranks decide alike: either all use it, or
none does and messages are staged through host memory as they are without GPUs.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ddl import streams
from ddl.collectives import messages
from ddl.comm import Communicator
from ddl.comm.nccl import NcclCommunicator, load_nccl
from ddl.errors import DDLError
from ddl.streams import Stream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """What a rank tells the others.

    Attributes:
        place: of the GPU in the world, the same for two ranks that share it; None without a GPU.
        refusal: why this rank cannot use NCCL; None if it can.
    """

    place: tuple[str, str] | None
    refusal: str | None


def own_device(local_rank: int) -> torch.device | None:
    """The GPU that a rank is expected to use; None where torch finds none.

    It is the current one if the program has chosen another than the first, else the one with the
    number of the rank on its host.
    """
    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    chosen = torch.cuda.current_device()
    return torch.device("cuda", chosen if chosen else local_rank % count)


def join_gpus(
    host: Communicator,
    wanted: bool,
    *,
    device: torch.device | None,
    load: Callable[[], Any] = load_nccl,
    make_stream: Callable[[torch.device], Stream] = streams.make_stream,
) -> Communicator:
    """NCCL between the ranks' GPUs, where every rank has one to itself. Collective.

    Where ranks have GPUs and cannot be joined, the log says once why. A single rank has nobody to
    be joined with.

    Args:
        host: the ranks; the result uses it.
        wanted: False keeps NCCL out, if only on one rank.
        device: this rank's GPU, see `own_device`.
        load: returns the module `cupy.cuda.nccl`.
        make_stream: makes communication streams.

    Returns:
        A communicator with transfers between devices, else `host` itself; the same kind everywhere.
    """
    if host.size == 1:
        return host
    nccl, mine = None, Gpu(None, "no GPU")
    if device is not None:
        mine = Gpu(_place(device), None if wanted else "DDL_NCCL=0")
        if wanted:
            try:
                nccl = load()
            except DDLError as error:
                mine = Gpu(mine.place, str(error))
    talk = host.duplicate()  # what is said here is not the job's own traffic
    gpus: list[Gpu] = messages.gather_objects(talk, mine)
    reason = _reason(gpus)
    if reason is None and device is not None:
        failure = _trial(NcclCommunicator(talk, device, nccl, make_stream))
        failures = messages.gather_objects(talk, failure)
        reason = next((failure for failure in failures if failure is not None), None)
    talk.close()
    if reason is None and device is not None:
        return NcclCommunicator(host, device, nccl, make_stream)
    if all(gpu.place is None for gpu in gpus):
        return host
    logger.log(
        logging.WARNING if host.rank == 0 and wanted else logging.DEBUG,
        "no NCCL between GPUs: %s; messages are staged through host memory instead",
        reason,
    )
    return host


def _place(device: torch.device) -> tuple[str, str]:
    """Host and number of a GPU, the latter independent of CUDA_VISIBLE_DEVICES."""
    if device.type != "cuda":
        return socket.gethostname(), str(device)
    properties = torch.cuda.get_device_properties(device)
    bus = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    number = getattr(properties, "uuid", None) or (bus if None not in bus else None)
    return socket.gethostname(), str(device if number is None else number)


def _reason(gpus: list[Gpu]) -> str | None:
    """Why these cannot be joined, None if they can."""
    for rank, gpu in enumerate(gpus):
        if gpu.refusal is not None:
            return f"rank {rank}: {gpu.refusal}"
    first: dict[Any, int] = {}
    for rank, gpu in enumerate(gpus):
        other = first.setdefault(gpu.place, rank)
        if other != rank:
            return f"ranks {other} and {rank} share a GPU, expected one for each"
    return None


def _trial(joined: NcclCommunicator) -> str | None:
    """Add up ones by NCCL, and disconnect; what went wrong, or None."""
    try:
        joined.connect()
        with joined.stream.current():
            ones = torch.ones(1, dtype=torch.int32, device=joined.device)
            joined.all_reduce_(ones)
            joined.wait(joined.stream.mark(), "a first sum by NCCL")
        joined.disconnect()
        total = int(ones)
        return None if total == joined.size else f"NCCL adds {joined.size} ones up to {total}"
    except (DDLError, RuntimeError) as error:
        return str(error)
