"""Pictures of the study of contraction: what selection leaves of each layer, and its kurtosis."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]
INCHES_PER_LAYER = 0.16
KURTOSIS_OF_NORMAL = 3.0


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """One picture for each task; a point is the median over steps and seeds.

    Panels: the share that selection leaves, and the share that it takes, which tells small
    densities apart, both beside the two bounds, and the kurtosis of the accumulated values. The
    first lines are whole buckets, the others layers, from the first on.

    Raises:
        ValueError: there is nothing to draw.
    """
    from matplotlib.figure import Figure  # not pyplot, which would choose a display

    if not rows:
        raise ValueError("no finished run, expected one or more to draw; run some first")
    folder.mkdir(parents=True, exist_ok=True)
    by_task: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_task[row["cell"]["task"]].append(row)
    paths = []
    for task, members in sorted(by_task.items()):
        names = _names(members)
        places = range(len(names))
        height = 2.5 + INCHES_PER_LAYER * len(names)
        figure = Figure(figsize=(16, height), layout="constrained")
        left, taken, kurtosis = figure.subplots(1, 3, sharey=True)
        for number, (label, runs) in enumerate(_by_label(members).items()):
            colour = f"C{number % 10}"
            for axis, complement in ((left, False), (taken, True)):
                for key, marker in (
                    ("contraction", "o"),
                    ("bound_topk", "|"),
                    ("bound_random", "x"),
                ):
                    values = medians(runs, names, key)
                    if complement:
                        values = [1.0 - value for value in values]
                    text = label if key == "contraction" else None
                    axis.plot(values, places, marker, color=colour, markersize=4, label=text)
            values = medians(runs, names, "kurtosis_accumulated")
            kurtosis.plot(values, places, "o", color=colour, markersize=4)
        left.set_title("left by selection; | (1 - k/d)², x 1 - k/d")
        left.legend(fontsize="x-small")
        taken.set_title("taken by selection: 1 - left")
        kurtosis.set_title("kurtosis of accumulated; -- normal")
        kurtosis.axvline(KURTOSIS_OF_NORMAL, linestyle="--", color="grey")
        for axis in (left, taken, kurtosis):
            axis.set_xscale("log")
            axis.grid(alpha=0.3)
        left.set_yticks(places, names, fontsize="xx-small")
        left.invert_yaxis()
        figure.suptitle(task)
        paths.append(folder / f"contraction-{task}.png")
        figure.savefig(paths[-1], dpi=100)
    return paths


def medians(runs: list[Row], names: list[str], key: str) -> list[float]:
    """One number for each name, the median over runs; NaN where no run has one."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for each in (*run["buckets"]["each"], *run["layers"]["each"]):
            if each[key] is not None:
                found[each["name"]].append(each[key])
    return [statistics.median(found[name]) if name in found else float("nan") for name in names]


def _names(rows: list[Row]) -> list[str]:
    """Buckets, then layers from the model's first to its last, which is sent first."""
    names: dict[str, None] = {}
    for row in rows:
        for part in (row["buckets"]["each"], row["layers"]["each"][::-1]):
            names.update(dict.fromkeys(each["name"] for each in part))
    return list(names)


def _by_label(rows: list[Row]) -> dict[str, list[Row]]:
    """The runs that differ in their seeds alone."""
    by_label: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        cell = row["cell"]
        label = f"{cell['compressor']} {cell['density']:g}, {cell['P']} workers, "
        label += f"{cell['epochs']} epochs of {cell['batch_size']}, lr {cell['lr']:g}"
        by_label[label].append(row)
    return dict(sorted(by_label.items()))
