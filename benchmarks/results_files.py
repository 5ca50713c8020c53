"""Tables of the results page, in Markdown, from files of lines that other benchmarks wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from results_tables import label, markdown

Row = dict[str, Any]
MS = 1e3
LARGE = 1000  # entries of a layer, of which a judgement of its shape means something
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


def slow_links(rows: Sequence[Row]) -> str:
    """Milliseconds of sparse aggregations where links are the limit, from bench_cluster.py."""
    found = {
        (row["algorithm"], row["wire"], row["hosts"]): row["median_ms"]
        for row in rows
        if row["kind"] == "collective"
    }
    rates = {row["hosts"]: row["rate"] for row in rows}
    names = dict.fromkeys((algorithm, wire) for algorithm, wire, _ in found)
    lines = [
        (
            f"{algorithm}{f', {wire}' if wire == 'compact' else ''}",
            *(_ms(found[algorithm, wire, hosts]) for hosts in sorted(rates)),
        )
        for algorithm, wire in sorted(names, key=lambda name: (name[1] == "compact", name))
    ]
    return markdown(
        ("aggregation, ms", *(f"{hosts} hosts, {rates[hosts]}/s" for hosts in sorted(rates))), lines
    )


def contraction(rows: Sequence[Row]) -> str:
    """What selection leaves, from bench_contraction.py; of layers, then of whole buckets."""
    lines = []
    for row in rows:
        cell, layers, buckets = row["cell"], row["layers"], row["buckets"]["each"]
        held = layers["held"]
        lines.append(
            (
                f"{cell['task']}, {label([row])}",
                str(held["judged"]),
                _percent(held["within_topk"]),
                str(held["bell_shaped"]),
                _bells_of_large(layers["each"]),
                _percent(held["bell_within_topk"]),
                _range(bucket["contraction"] for bucket in buckets),
                _range(bucket["bound_topk"] for bucket in buckets),
                _range(bucket["bound_random"] for bucket in buckets),
                _range(bucket["gaussian_ratio"] for bucket in buckets),
            )
        )
    header = (
        *("run", "samples of layers", "at or below (1-k/d)²", "bell-shaped"),
        *(f"above {LARGE} entries", "bell-shaped that are below"),
        *("bucket: left", "(1-k/d)²", "1-k/d", "a Gaussian's threshold selects, k"),
    )
    found = [
        f"* {row['cell']['task']}, {label([row])}, {worst['name']}, step "
        f"{worst['step']}: {worst['contraction']:.4f} left, bound {worst['bound_topk']:.4f}, "
        f"{'' if worst['bell_shaped'] else 'not '}bell-shaped"
        for row in rows
        for worst in row["layers"]["exceptions"] + row["buckets"]["exceptions"]
    ]
    listed = "Above (1-k/d)²: " + ("none." if not found else "\n\n" + "\n".join(found))
    return f"{markdown(header, lines)}\n\n{listed}"


def _bells_of_large(layers: Sequence[Row]) -> str:
    """In small layers the judgement refutes little."""
    large = [layer["held"] for layer in layers if layer["numel"] > LARGE]
    bells, judged = (sum(held[key] for held in large) for key in ("bell_shaped", "judged"))
    return f"{bells} of {judged}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _range(values: Iterable[float]) -> str:
    """Of the medians of several buckets."""
    low, *_, high = sorted([*values] * 2)
    return f"{low:.3f}" if low == high else f"{low:.3f} to {high:.3f}"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.{1 if milliseconds < 100 else 0}f}"


FILE_TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "advice": advice,
    "cluster": cluster,
    "slow-links": slow_links,
    "contraction": contraction,
}
