"""Pictures of the convergence benchmark: loss and accuracy, against steps and against bytes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PANELS = (
    ("curve", "loss", "step", "training loss, running mean"),
    ("curve", "loss", "bytes", "training loss, running mean"),
    ("validations", "accuracy", "step", "validation accuracy"),
    ("validations", "accuracy", "bytes", "validation accuracy"),
)
SMOOTHED = 5  # points of a training curve, of 100 at most


def draw_each(rows: list[Row], folder: Path) -> list[Path]:
    """One picture for each task and number of ranks, called by them.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not rows:
        raise ValueError("no finished run, expected one or more to draw; run some first")
    pictures: defaultdict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        pictures[row["cell"]["task"], row["cell"]["P"]].append(row)
    return [
        draw(members, folder / f"{task}-P{P}.png")
        for (task, P), members in sorted(pictures.items())
    ]


def draw(rows: list[Row], path: Path, dpi: int = 100) -> Path:
    """Loss and accuracy of runs of one task; a curve is the mean over seeds."""
    from matplotlib.figure import Figure  # not pyplot, which would choose a display

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(13, 9), layout="constrained")
    for axis, (series, value, against, title) in zip(
        figure.subplots(2, 2).flat, PANELS, strict=True
    ):
        for number, (label, runs) in enumerate(_by_label(rows).items()):
            places, values = mean_curve([run[series] for run in runs], value, against)
            if series == "curve":
                values = running_mean(values, SMOOTHED)
            style = ("-", "--", ":")[number // 10 % 3]
            axis.plot(places, values, style, color=f"C{number % 10}", label=label)
        axis.set_xlabel("step" if against == "step" else "bytes sent by a rank")
        axis.set_title(title)
        if against == "bytes" and any(row["bytes_per_step"] for row in rows):
            axis.set_xscale("log")
        axis.legend(fontsize="x-small")
    cell = rows[0]["cell"]
    figure.suptitle(f"{cell['task']}, {cell['P']} workers")
    figure.savefig(path, dpi=dpi)
    return path


def mean_curve(
    runs: list[list[dict[str, float | None]]], value: str, against: str
) -> tuple[list[float], list[float]]:
    """Places and values of several runs' curves, averaged point by point.

    A run that ended early ends the curve; where a value is not a number there is a gap.
    """
    places, values = [], []
    for points in zip(*runs, strict=False):
        numbers = [point[value] for point in points]
        known = [number for number in numbers if number is not None]
        complete = len(known) == len(numbers)
        places.append(sum(float(point[against] or 0) for point in points) / len(points))
        values.append(sum(known) / len(known) if complete else float("nan"))
    return places, values


def running_mean(values: list[float], width: int) -> list[float]:
    """Each value's mean with those before it, `width` at most."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _by_label(rows: list[Row]) -> dict[str, list[Row]]:
    """The runs that differ in their seeds alone; a label names what differs in a picture."""
    by_label: defaultdict[str, list[Row]] = defaultdict(list)
    recipes = {_recipe(row["cell"]) for row in rows}
    for row in rows:
        cell = row["cell"]
        label = cell["compressor"]
        if cell["density"] != 1:
            label += f" {cell['density']:g}"
        if cell["global_ratio"] != 1:
            label += f" x{cell['global_ratio']:g}"
        if cell["density_warmup"]:
            label += " warm-up"
        if cell["wire"] != "plain":
            label += f" {cell['wire']}"
        if len(recipes) > 1:
            label += _recipe(cell)
        by_label[label].append(row)
    return dict(sorted(by_label.items()))


def _recipe(cell: dict[str, Any]) -> str:
    return f", {cell['epochs']} epochs of {cell['batch_size']}, lr {cell['lr']:g}"
