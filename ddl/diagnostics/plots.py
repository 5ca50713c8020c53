"""A picture of what was recorded: six panels over the layers with most entries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddl.diagnostics.output import read_records

MOST_LAYERS = 6
PICTURE_NAME = "diagnostics.png"

Record = dict[str, Any]


def plot(directory: str | Path) -> Path:
    """Draw the records in a folder.

    Returns:
        The picture, `diagnostics.png` in the same folder.

    Raises:
        ValueError: the folder has no records.
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # not pyplot, which would choose a display

    directory = Path(directory)
    layers = _largest_layers(read_records(directory))
    if not layers:
        raise ValueError(
            f"{directory} has no records of diagnostics, expected diagnostics.jsonl; give the "
            "directory of a run with ddl.diagnostics.Diagnostics"
        )
    figure = Figure(figsize=(15, 8), layout="constrained")
    axes = figure.subplots(2, 3)
    curves: list[tuple[Any, str, Callable[[Record], float | None]]] = [
        (axes[0, 1], "residual norm", lambda record: record["residual_norm"]),
        (axes[0, 2], "median age [steps]", lambda record: (record["age"] or {}).get("median")),
        (axes[1, 1], "kurtosis of accumulated", lambda record: record["accumulated"]["kurtosis"]),
        (axes[1, 2], "overlap of local and global picks", lambda record: record["overlap"]),
    ]
    for number, (layer, records) in enumerate(layers.items()):
        colour, steps = f"C{number}", [record["step"] for record in records]
        for style, key in (("-", "contraction"), ("--", "bound_random"), (":", "bound_topk")):
            values = [record[key] for record in records]
            label = layer if key == "contraction" else None
            axes[0, 0].plot(steps, values, style, color=colour, label=label)
        for axis, _, value_of in curves:
            axis.plot(steps, [_number(value_of(record)) for record in records], color=colour)
        shape = records[-1]["accumulated"]
        bins = len(shape["counts"])
        places = [8.0 * (place + 0.5) / bins - 4.0 for place in range(bins)]
        axes[1, 0].plot(places, [max(0.5, count) for count in shape["counts"]], color=colour)
    axes[0, 0].set_title("left by selection: measured; -- 1 - k/d; ·· (1 - k/d)²")
    axes[0, 0].legend(fontsize="x-small")
    axes[1, 0].set_title("accumulated at the last sample, in standard deviations")
    axes[1, 0].set_yscale("log")
    for axis, title, _ in curves:
        axis.set_title(title)
    for axis in axes.flat:
        if axis is not axes[1, 0]:
            axis.set_xlabel("step")
    path = directory / PICTURE_NAME
    figure.savefig(path, dpi=100)
    return path


def _largest_layers(records: list[Record]) -> dict[str, list[Record]]:
    by_layer: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record["layer"] is not None:
            by_layer[record["layer"]].append(record)
    largest = sorted(by_layer, key=lambda layer: (-by_layer[layer][0]["numel"], layer))
    return {layer: by_layer[layer] for layer in largest[:MOST_LAYERS]}


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
