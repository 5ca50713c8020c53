"""Where diagnostics go: JSON lines, and TensorBoard where it is installed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

FILE_NAME = "diagnostics.jsonl"
SCALARS = ("contraction", "density", "overlap", "included", "residual_norm")


class Output:
    """The files of one watch."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """Make the folder if it is missing; lines of later steps in it are replaced.

        Args:
            directory: the folder.
            first_step: lines of earlier steps are kept: they are those of a run that is resumed.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        earlier = [record for record in read_records(directory) if record["step"] < first_step]
        self._lines = path.open("w", buffering=1, encoding="utf-8")
        for record in earlier:
            print(json.dumps(record), file=self._lines)
        self._events = _event_writer(directory, first_step)

    def write(self, record: dict[str, Any]) -> None:
        """One layer, or bucket, in one step."""
        print(json.dumps(_without_nan(record)), file=self._lines)
        if self._events is None:
            return
        layer, step = record["layer"] or f"bucket {record['bucket']}", record["step"]
        for key in SCALARS:
            self._events.add_scalar(f"{key}/{layer}", record[key], step)
        if record["age"] is not None:
            self._events.add_scalar(f"age_median/{layer}", record["age"]["median"], step)
        for name in ("gradient", "accumulated"):
            shape = record[name]
            self._events.add_scalar(f"kurtosis_{name}/{layer}", shape["kurtosis"], step)
            bound, bins = shape["bound"], len(shape["counts"])
            self._events.add_histogram_raw(
                f"{name}/{layer}",
                min=-bound,
                max=bound,
                num=sum(shape["counts"]),
                sum=0.0,
                sum_squares=shape["norm"] ** 2,
                bucket_limits=[bound * (2 * place / bins - 1) for place in range(1, bins + 1)],
                bucket_counts=shape["counts"],
                global_step=step,
            )

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        if self._events is not None:
            self._events.close()


def read_records(directory: Path) -> list[dict[str, Any]]:
    """The records in a folder, without a last one that is cut off; empty if there is no file."""
    path = directory / FILE_NAME
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def _without_nan(value: Any) -> Any:
    """None for what JSON cannot say: NaN and the infinities."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _event_writer(directory: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=first_step)
