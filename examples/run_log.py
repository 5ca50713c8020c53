"""What rank 0 tells of a run: metrics.jsonl, TensorBoard events, summary.json, a progress bar."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from arguments import BadInput, one_line
from tqdm import tqdm


class RunLog:
    """The files of one run. On the ranks that write nothing `folder` is None."""

    def __init__(self, folder: Path | None) -> None:
        """Makes the folder if it is missing, and starts its metrics.jsonl anew.

        Raises:
            BadInput: the folder cannot be written.
        """
        self.folder = folder
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._lines = None
        self._events = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = (folder / "metrics.jsonl").open("w", buffering=1, encoding="utf-8")
        except OSError as error:
            raise BadInput(
                f"cannot write into --log-dir {folder}: {one_line(error)}; choose another folder"
            ) from error
        self._events = _event_writer(folder)

    def progress(self, batches: Iterable, description: str) -> Iterable:
        """The same batches, behind a progress bar if this rank has a terminal."""
        # tqdm's None means: only where stderr is a terminal.
        silent = None if self.folder is not None else True
        return tqdm(batches, desc=description, unit="batch", leave=False, disable=silent)

    def record(
        self,
        step: int,
        epoch: int,
        values: dict[str, float | None],
        lists: dict[str, list[float]] | None = None,
    ) -> None:
        """Writes one line, and adds the values to the averages of the run, but not the lists."""
        clean = {key: _json_number(value) for key, value in values.items()}
        for key, value in clean.items():
            if value is not None:
                self._sums[key] += value
                self._counts[key] += 1
        if self._lines is not None:
            line = {"step": step, "epoch": epoch, **clean, **(lists or {})}
            print(json.dumps(line), file=self._lines)
        if self._events is not None:
            for key, value in clean.items():
                if value is not None:
                    self._events.add_scalar(key, value, step)

    def mean(self, key: str) -> float:
        """The mean over all recorded steps in which the value existed; NaN if there is none."""
        return self._sums[key] / self._counts[key] if self._counts[key] else math.nan

    def finish(self, summary: dict[str, Any]) -> str:
        """Closes the files, writes summary.json, and returns its only line."""
        text = json.dumps({key: _json_number(value) for key, value in summary.items()})
        if self._lines is not None:
            self._lines.close()
        if self._events is not None:
            self._events.close()
        if self.folder is not None:
            # Written aside, then renamed: whoever finds summary.json finds all of it.
            aside = self.folder / "summary.json.part"
            aside.write_text(text + "\n", encoding="utf-8")
            os.replace(aside, self.folder / "summary.json")
        return text


def continued(folder: Path, step: int) -> RunLog:
    """The log of a run that is resumed: it keeps what the folder's says until a step.

    Raises:
        BadInput: the folder cannot be written.
    """
    records = _records_until(step, folder / "metrics.jsonl")
    log = RunLog(folder)
    for record in records:
        lists = {key: value for key, value in record.items() if isinstance(value, list)}
        values = {key: value for key, value in record.items() if key not in lists}
        log.record(values.pop("step"), values.pop("epoch"), values, lists)
    return log


def _records_until(step: int, path: Path) -> list[dict[str, Any]]:
    """The lines of an interrupted run's metrics.jsonl up to a step; the last may be cut off."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record["step"] <= step:
            records.append(record)
    return records


def _json_number(value: Any) -> Any:
    """None for what JSON cannot say: NaN and the infinities."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _event_writer(folder: Path) -> Any:
    """A TensorBoard writer, or None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    # purge_step: a second run in the same folder replaces the curves of the first.
    return SummaryWriter(str(folder), purge_step=0)
