"""Where the ranks of a DDP model meet: what they settle before the first bucket, and work with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddl.comm import Communicator
from ddl.comm.nccl import WorkerStreams
from ddl.compressors import Compressor
from ddl.metrics.timeline import TimelineConfig, Track, open_track
from ddl.reduction.agreement import Agreement, ReducerConfig
from ddl.reduction.buckets import NamedParameter
from ddl.reduction.worker import Worker
from ddl.settings import Settings


@dataclass(frozen=True)
class Choices:
    """What the user has chosen for good; the density can change."""

    compressor: str
    collective: str | None
    wire: str | None
    winners_per_pick: float | None
    dense_below: int
    seed: int


class Room(NamedTuple):
    """What the worker thread works with, and the timeline, if there is one."""

    comm: Communicator
    agreement: Agreement
    worker: Worker
    streams: WorkerStreams
    track: Track | None


def meet(
    comm: Communicator,
    members: Sequence[NamedParameter],
    compressor: Compressor,
    choices: Choices,
    density: float,
) -> Room:
    """Settle with the other ranks how gradients travel. Collective.

    Args:
        comm: the ranks.
        members: the model's parameters, in order.
        compressor: how buckets are aggregated.
        choices: what else the user has chosen.
        density: fraction of entries to keep.

    Raises:
        DisagreementError: ranks differ in their parameters or settings.
        CommunicationError: not every rank takes part.
    """
    settings = Settings.from_environment()
    config = ReducerConfig(
        bucket_bytes=0,  # DDP's, which sees to it that ranks have the same buckets
        dense_below=choices.dense_below,
        backward_passes_per_step=1,
        unused_parameters="zero",
        density_warmup=(),
        seed=choices.seed,
        # In two levels a rank owes for a part of a bucket, and for another after a new cut.
        hierarchical=False,
        timeline=TimelineConfig.of(settings, None),
        links=settings.links,
    )
    own, control = comm.duplicate(), comm.duplicate()
    agreement = Agreement(own, control, compressor, config)
    agreement.reach([m for m in members if m.parameter.requires_grad], density)
    track = open_track(config.timeline, comm, control)
    worker = Worker(f"ddl-hook-{comm.rank}", agreement.cancel)
    return Room(own, agreement, worker, WorkerStreams(own), track)
