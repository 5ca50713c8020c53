"""Save and load, with a word among all ranks after each part, so that a failure is everyone's."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ddl.checkpoint import files, residuals
from ddl.checkpoint.contents import Objects, common, own
from ddl.checkpoint.files import JOB, Manifest, shard
from ddl.checkpoint.loading import Loading
from ddl.collectives import messages
from ddl.comm import Communicator
from ddl.errors import DDLError, DisagreementError, NoCheckpointError
from ddl.state import doing
from ddl.world import communicator

logger = logging.getLogger(__name__)

T = TypeVar("T")
Named = Mapping[str, Any] | Any


@dataclass(frozen=True)
class Restored:
    """What a checkpoint says beside what it put into the objects.

    Attributes:
        path: the folder it was read from.
        P: number of ranks that wrote it.
        epoch, step, position, extra: as given to `save_checkpoint`.
    """

    path: Path
    P: int
    epoch: int
    step: int
    position: int
    extra: Any


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: Named,
    optimizer: Named,
    scheduler: Named | None = None,
    scaler: Named | None = None,
    hook: Named | None = None,
    epoch: int = 0,
    step: int = 0,
    position: int = 0,
    extra: Any = None,
    keep: int | None = None,
    comm: Communicator | None = None,
) -> Path:
    """Write a new checkpoint into a directory that all machines share. Collective.

    Between two steps: after `step()` and before the next `backward()`. A save that is killed leaves
    the checkpoints before it as they were.

    Args:
        directory: where the checkpoints of one run lie; made if missing.
        model: a module, or several by name. Parameters are saved as rank 0 has them.
        optimizer: distributed or plain, or several by name.
        scheduler: learning-rate schedulers, likewise; anything with a `state_dict()`.
        scaler: `torch.amp.GradScaler`, likewise.
        hook: `ddl.SparseHookState`, likewise: what it owes on each rank.
        epoch: where training stands, for `Restored`; the same on every rank, as the next two.
        step: steps taken.
        position: how much of the epoch's data is consumed, in a unit of the caller's. A number of
            examples over all ranks still means something on another number of ranks.
        extra: anything else of rank 0, made of numbers, strings, tensors and containers of them.
        keep: remove all but the newest so many checkpoints from the directory; None for none.
        comm: the ranks; default the job's.

    Returns:
        The new folder in `directory`.

    Raises:
        DDLError: on every rank, if any cannot save; names that rank and the reason.
        ValueError: an argument of the wrong type or range.
    """
    comm = communicator() if comm is None else comm
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1 or None, got {keep}")
    progress = (int(epoch), int(step), int(position))
    if min(progress) < 0:
        raise ValueError(f"epoch, step and position must be at least 0, got {progress}")
    objects = Objects.of(model, optimizer, scheduler, scaler, hook)
    with doing(comm, "ddl.save_checkpoint"):
        return _save(comm, Path(directory), objects, progress, extra, keep)


def _save(
    comm: Communicator,
    directory: Path,
    objects: Objects,
    progress: tuple[int, int, int],
    extra: Any,
    keep: int | None,
) -> Path:
    _check_between_steps(comm, objects, "save_checkpoint")
    told = messages.gather_objects(comm, progress)
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise DisagreementError(
                f"epoch, step, position: rank {rank} saves at {theirs}, expected {told[0]} as on "
                "rank 0; save on all ranks after the same step"
            )

    aside = _by_rank_0(comm, lambda: files.open_aside(directory).name)

    def write() -> dict[str, tuple[int, str]]:
        folder, name = directory / aside, shard(comm.rank)
        marks = {name: files.write(folder / name, own(objects, comm.rank))}
        if comm.rank == 0:
            marks[JOB] = files.write(folder / JOB, common(objects, extra))
        return marks

    try:
        marks = messages.gather_objects(comm, _on_all_ranks(comm, write))
    except DDLError:
        if comm.rank == 0:
            shutil.rmtree(directory / aside, ignore_errors=True)
        raise
    listed = {name: mark for mine in marks for name, mark in mine.items()}
    manifest = Manifest(comm.size, *progress, listed)
    name = _by_rank_0(comm, lambda: files.commit(directory / aside, manifest, keep).name)
    return directory / name


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Named,
    optimizer: Named,
    scheduler: Named | None = None,
    scaler: Named | None = None,
    hook: Named | None = None,
    comm: Communicator | None = None,
) -> Restored:
    """Bring objects to where a checkpoint has them. Collective.

    Between two steps. Objects are made as for a new run, the optimizer wrapped; what was unfrozen
    when the checkpoint was written is to be unfrozen already. The compressor may be another one
    than before. If the checkpoint is refused, nothing was changed.

    Args:
        path: a checkpoint, or a directory of them, of which the newest complete one is taken.
        model: as for `save_checkpoint`, with the same names; so are the next four.
        optimizer: its groups get the settings they had, such as learning rates.
        scheduler: see there.
        scaler: see there.
        hook: see there.
        comm: the ranks; default the job's.

    Returns:
        Where training stood.

    Raises:
        NoCheckpointError: on every rank: there is none, as before the first save.
        DDLError: on every rank, if any cannot load: a damaged checkpoint, one of another model or
            format; names file, got, expected and what to do.
    """
    comm = communicator() if comm is None else comm
    objects = Objects.of(model, optimizer, scheduler, scaler, hook)
    with doing(comm, "ddl.load_checkpoint"):
        return _load(comm, Path(path), objects)


def _load(comm: Communicator, path: Path, objects: Objects) -> Restored:
    _check_between_steps(comm, objects, "load_checkpoint")

    def choose() -> tuple[str, Manifest]:
        found = files.find(path)
        return os.path.relpath(found, path), files.read_manifest(found)

    name, manifest = _by_rank_0(comm, choose)
    folder = path / name
    for distributed in objects.distributed.values():
        distributed.adopt_new_parameters()
    own_ranges = {n: residuals.ranges(o.reducer) for n, o in objects.distributed.items()}
    everyones = messages.gather_objects(comm, own_ranges)
    ranges = {n: [theirs[n] for theirs in everyones] for n in own_ranges}
    loading = Loading(folder, manifest, comm, objects, ranges)
    _on_all_ranks(comm, loading.read_common)
    loading.unchanged = all(messages.gather_objects(comm, _on_all_ranks(comm, loading.is_own)))
    _on_all_ranks(comm, loading.read_shards)
    _on_all_ranks(comm, loading.apply)
    if comm.rank == 0:
        for note in loading.notes():
            logger.warning("%s: %s", folder, note)
        logger.info("%s: goes on at epoch %d, step %d", folder, manifest.epoch, manifest.step)
    progress = (manifest.epoch, manifest.step, manifest.position)
    return Restored(folder, manifest.P, *progress, loading.job["extra"])


# Among all ranks.


def _check_between_steps(comm: Communicator, objects: Objects, what: str) -> None:
    def check() -> None:
        for name, optimizer in objects.distributed.items():
            if not optimizer.between_steps:
                raise DDLError(
                    f"optimizer {name!r} has gradients that no step has applied, expected none; "
                    f"call its step() or zero_grad() before {what}()"
                )

    _on_all_ranks(comm, check)


def _on_all_ranks(comm: Communicator, action: Callable[[], T]) -> T:
    """This rank's result, once all ranks have theirs; if one fails, all raise, and none waits."""
    problem, cause, result = None, None, []
    try:
        result = [action()]
    except Exception as error:
        cause = error
        text = str(error) if isinstance(error, DDLError) else f"{type(error).__name__}: {error}"
        problem = text, isinstance(error, NoCheckpointError)
    for rank, told in enumerate(messages.gather_objects(comm, problem)):
        if told is not None:
            text, missing = told
            kind = NoCheckpointError if missing else DDLError
            raise kind(f"rank {rank} of {comm.size}: {text}") from cause
    return result[0]


def _by_rank_0(comm: Communicator, action: Callable[[], T]) -> T:
    """Rank 0's result on every rank."""
    result = _on_all_ranks(comm, lambda: action() if comm.rank == 0 else None)
    return messages.broadcast_object(comm, result)
