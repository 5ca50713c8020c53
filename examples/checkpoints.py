"""Checkpoints of a training script: what --checkpoint-dir saves and --resume goes on from."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from arguments import BadInput, one_line

import ddl
from ddl.checkpoint import Restored

KEPT = 2


class Checkpoints:
    """Saves a run where its arguments say so, and restores it.

    Attributes:
        objects: what `ddl.save_checkpoint` takes by these names: model, optimizer, scheduler.
    """

    def __init__(self, args: Namespace, lasting: Mapping[str, Any], **objects: Any) -> None:
        """For one run.

        Args:
            args: with those of `arguments.add_checkpoints`.
            lasting: what a run must be resumed with as it was begun, by name.
            objects: see the class.

        Raises:
            BadInput: the folder cannot be written.
        """
        if args.checkpoint_dir is not None and not args.resume:
            check_writable(args.checkpoint_dir)
        self.objects = objects
        self._args = args
        self._lasting = {name: str(value) for name, value in lasting.items()}

    @property
    def wanted(self) -> bool:
        """Whether `save` does anything."""
        return self._args.checkpoint_dir is not None

    def due(self, step: int, last_step: int) -> bool:
        """Whether to save after this step, one within an epoch."""
        every = self._args.checkpoint_every
        return self.wanted and (step == last_step or bool(every and step % every == 0))

    def save(self, epoch: int, step: int, position: int, **values: Any) -> None:
        """Writes a checkpoint, if they are wanted. Collective.

        Args:
            epoch: the one to go on in.
            step: steps taken.
            position: how much of the epoch all ranks together have seen.
            values: whatever else `resume` is to return; rank 0's are kept.
        """
        if self.wanted:
            ddl.save_checkpoint(
                self._args.checkpoint_dir,
                **self.objects,
                epoch=epoch,
                step=step,
                position=position,
                extra={"lasting": self._lasting, "values": values},
                keep=KEPT,
            )

    def resume(self) -> tuple[Restored, dict[str, Any]]:
        """Brings the objects to where the newest checkpoint has them. Collective.

        Returns:
            Where training stood, and the values that were saved.

        Raises:
            BadInput: there is no checkpoint, or it is one of another run.
        """
        try:
            restored = ddl.load_checkpoint(self._args.checkpoint_dir, **self.objects)
        except ddl.DDLError as error:
            raise BadInput(f"--resume: {one_line(error)}") from error
        for name, value in restored.extra["lasting"].items():
            now = self._lasting.get(name)
            if now != value:
                raise BadInput(
                    f"--resume with {name} {now}, expected {value} as in {restored.path}; "
                    "give the same, or leave --resume out"
                )
        return restored, restored.extra["values"]


def check_writable(folder: Path) -> None:
    """Makes the folder, and a file that is gone at once.

    Raises:
        BadInput: that is impossible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(
            f"cannot write into --checkpoint-dir {folder}: {one_line(error)}; choose another folder"
        ) from error


def check_goes_on(restored: Restored, step: int, last_step: int) -> None:
    """Whether a run has steps left.

    Raises:
        BadInput: it ended where it was saved.
    """
    if step >= last_step:
        raise BadInput(
            f"--resume: {restored.path} is at step {step}, expected one before step {last_step}, "
            "where the run ends; raise --epochs or --max-steps"
        )
