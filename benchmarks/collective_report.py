"""Rows of bench_collectives as a table on screen and as a chart."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

# Column, its title and its format.
COLUMNS = (
    ("algorithm", "algorithm", "<20"),
    ("wire", "wire", "<12"),
    ("P", "P", ">3"),
    ("numel", "numel", ">10"),
    ("density", "density", ">7g"),
    ("correlation", "corr", ">4g"),
    ("count", "count", ">9"),
    ("median_ms", "median ms", ">9.2f"),
    ("p20_ms", "p20", ">8.2f"),
    ("p80_ms", "p80", ">8.2f"),
    ("algbw_MBps", "algbw", ">7.1f"),
    ("busbw_MBps", "busbw MB/s", ">10.1f"),
    ("bytes_per_rank", "bytes/rank", ">11.0f"),
    ("rounds", "rounds", ">6"),
    ("cpu_ms", "cpu ms", ">7.2f"),
    ("recall", "recall", ">6.4f"),
    ("lost_share", "lost", ">6.4f"),
    ("lost_mass", "lost mass", ">9.2e"),
    ("waiting_cpu", "waiting", ">7.3f"),
)


def machine() -> dict[str, Any]:
    """Versions and hardware, for every row."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    return {"torch": torch.__version__, "cpu": name, "cores": os.cpu_count()}


def header(columns: tuple[tuple[str, str, str], ...] = COLUMNS) -> str:
    """Return the titles of a table."""
    return " ".join(f"{title:{form[0]}{_width(form)}}" for _, title, form in columns)


def line(row: dict[str, Any], columns: tuple[tuple[str, str, str], ...] = COLUMNS) -> str:
    """Return one row of a table; - where there is no value."""
    cells = []
    for name, _, form in columns:
        value = row.get(name)
        if name == "algorithm" and row.get("chosen"):
            value = f"{value} ({row['chosen']})"
        cells.append(f"{'-':{form[0]}{_width(form)}}" if value is None else f"{value:{form}}")
    return " ".join(cells)


def _width(form: str) -> int:
    return int("".join(c for c in form.split(".")[0] if c.isdigit()))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw time over P or numel where they vary, else the time of every row.

    Args:
        rows: at least one.
        path: where the chart is written; its suffix decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = ["algorithm", "wire", "P", "numel", "density", "correlation"]
    varying = [n for n in names if n == "algorithm" or len({row[n] for row in rows}) > 1]
    axis = next((n for n in ("P", "numel", "density") if n in varying), None)
    if axis is not None:
        figure, axes = pyplot.subplots(figsize=(8, 5))
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            lines.setdefault(_label(row, [n for n in varying if n != axis]), []).append(row)
        for label, points in lines.items():
            points.sort(key=lambda row: row[axis])
            axes.plot(
                [r[axis] for r in points], [r["median_ms"] for r in points], "o-", label=label
            )
        axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="ms")
        axes.legend(fontsize="small")
        axes.grid(True, which="both", alpha=0.3)
    else:
        figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.3 * len(rows)))
        labels = [_label(row, varying) for row in rows]
        times = [row["median_ms"] for row in rows]
        errors = [
            [row["median_ms"] - row["p20_ms"] for row in rows],
            [row["p80_ms"] - row["median_ms"] for row in rows],
        ]
        axes.barh(labels, times, xerr=errors)
        axes.set_xscale("log")
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(f"{rows[0]['numel']:,} entries, {rows[0]['P']} ranks")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _label(row: dict[str, Any], names: list[str]) -> str:
    return " ".join(str(row[name]) for name in names if row[name] is not None)
