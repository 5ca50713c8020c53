"""The files of finished runs: one line each, by which a run is known and not run again."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from convergence_run import Cell
from convergence_tasks import Data

INTERRUPTED = "\ninterrupted; finished runs are kept, and the same command goes on after them\n"


def describe(data: Data, task: str) -> dict[str, Any]:
    """What identifies the data of a run, besides its cell.

    The standard library's text is not read for it: it is taken to be the same.
    """
    if task != "lstm":
        return {"train_images": data.train_images, "test_images": data.test_images}
    return {
        "text": [f"{file.name} {_digest(file)}" for file in data.text],
        "train_tokens": data.train_tokens,
        "held_out_tokens": data.held_out_tokens,
        "words": data.words,
        "hidden": data.hidden,
    }


def still_to_run(
    cells: list[Cell], data: dict[str, dict[str, Any]], path: Path, part: tuple[int, int]
) -> Iterator[tuple[str, Cell]]:
    """Of the cells those that are not finished, and of these this process' part; says how many.

    What another process has finished meanwhile is left out.

    Args:
        cells: of the grid.
        data: by task, what identifies a run besides its cell.
        path: of the finished runs.
        part: I of N processes that share the work, from 1 on.

    Yields:
        Which of how many it is, for people, and the cell.
    """

    def waits(cell: Cell) -> bool:
        return key_of(asdict(cell), data[cell.task]) not in done

    done = finished(path)
    waiting = sum(map(waits, cells))
    print(f"{len(cells)} runs, {len(cells) - waiting} of them in {path} already")
    first, parts = part
    # Of all, finished or not, so that processes that start one after the other miss none.
    mine = [cell for cell in cells[first - 1 :: parts] if waits(cell)]
    for number, cell in enumerate(mine, start=1):
        done = finished(path)
        if waits(cell):
            yield f"{number}/{len(mine)}", cell


def finished(path: Path) -> set[str]:
    """What identifies the finished runs; see `key_of`."""
    return {key_of(row["cell"], row["data"]) for row in read_rows(path)}


def key_of(cell: dict[str, Any], data: dict[str, Any]) -> str:
    """The same for equal runs."""
    return json.dumps([cell, data], sort_keys=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Finished runs; a line that was cut off by an interruption is none.

    Raises:
        ValueError: the file has lines of something else.
    """
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not _is_run(row):
            raise ValueError(
                f"{path} has a line that is not a finished run ({line[:40]}), expected those of "
                "this benchmark; give another file of --results"
            )
        rows.append(row)
    return rows


def make_writable(path: Path) -> None:
    """Make the file and its folder, before hours of work and not after them.

    Raises:
        ValueError: that is impossible.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ValueError(
            f"cannot write --results {path}: {error.strerror}; choose another file"
        ) from error


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a line to a file, on its own even where the last one was cut off."""
    text = json.dumps(_plain(row)) + "\n"
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        text = "\n" + text
    with path.open("ab", buffering=0) as file:  # one write, for other processes append, too
        file.write(text.encode())


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "machine": platform.machine()}


def _is_run(row: Any) -> bool:
    known = isinstance(row, dict) and isinstance(row.get("data"), dict)
    cell = row.get("cell") if known else None
    return isinstance(cell, dict) and {field.name for field in fields(Cell)} <= cell.keys()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """Numbers that are not finite become null; others keep seven digits."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None
