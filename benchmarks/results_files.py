"""Tables of the results page, in Markdown, from files of lines that other benchmarks wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from results_tables import markdown

Row = dict[str, Any]
MS = 1e3
# Aggregations that the page compares, by algorithm and format.
SHOWN = (
    ("mpi-dense", "plain"),
    ("all-gather", "plain"),
    ("butterfly", "plain"),
    ("exact", "plain"),
    ("auto", "plain"),
    ("auto", "compact"),
)

HOOKS = {"plain": "no hook", "fp16": "its fp16 hook", "powersgd": "its PowerSGD hook, rank 4"}


def advice(rows: Sequence[Row]) -> str:
    """Predictions of `python -m ddl.advise --verify --json` beside what was measured."""
    lines = []
    for row in rows:
        predictions = {label: p for label, p in row["predictions"].items() if "error" in p}
        advisable = {label: p for label, p in predictions.items() if label != "randomk"}
        fastest = min(p["measured_seconds"] for p in advisable.values())
        chosen = row["recommendation"]["by_prediction"]
        dense = predictions["none"]
        errors = [p["error"] for p in predictions.values()]
        best = advisable[chosen]
        lines.append(
            (
                f"{row['workers']} workers, {rate(row['links'])}",
                f"{MS * dense['seconds']:.0f}, {MS * dense['measured_seconds']:.0f}",
                f"`{chosen}`",
                f"{MS * best['seconds']:.0f}, {MS * best['measured_seconds']:.0f}",
                f"{best['measured_seconds'] / fastest - 1:.1%}",
                f"{min(errors):+.0%} to {max(errors):+.0%}",
            )
        )
    header = (
        *("where", "dense, ms (predicted, measured)", "recommended by prediction"),
        *("its step, ms", "over the fastest measured", "errors, all seven"),
    )
    return markdown(header, lines)


def rate(links: Row) -> str:
    """In megabytes a second, as measured."""
    return f"{1e-6 / links['beta_seconds_per_byte']:.0f} MB/s"


def cluster(rows: Sequence[Row]) -> str:
    """Aggregation on emulated hosts, from bench_cluster.py."""
    collectives = [row for row in rows if row["kind"] == "collective"]
    lines = []
    for hosts in sorted({row["hosts"] for row in collectives}):
        here = {
            (r["algorithm"], r["wire"] or "plain"): r for r in collectives if r["hosts"] == hosts
        }
        auto = here["auto", "plain"]["median_ms"]
        lines += [
            (
                f"{hosts} hosts, {algorithm}{'' if wire == 'plain' else f', {wire}'}",
                _ms(row["median_ms"]),
                f"{row['bytes_per_rank'] / 1e3:.0f}",
                f"{row['median_ms'] / auto:.1f}",
            )
            for algorithm, wire in SHOWN
            if (row := here.get((algorithm, wire)))
        ]
        lines += [
            (
                f"{hosts} hosts, torch DDP, {HOOKS[row['hook']]}",
                _ms(row["median_ms"]),
                f"{row['link_bytes'] / 1e3:.0f}",
                f"{row['median_ms'] / auto:.1f}",
            )
            for row in rows
            if row["kind"] == "ddp" and row["hosts"] == hosts
        ]
    return markdown(("aggregation", "ms", "KB a rank", "times auto"), lines)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.{1 if milliseconds < 100 else 0}f}"


FILE_TABLES: dict[str, Callable[[Sequence[Row]], str]] = {"advice": advice, "cluster": cluster}
