"""Rows of bench_kernels as a table on screen and as a chart."""

from pathlib import Path
from typing import Any

# Column, its title and its format.
COLUMNS = (
    ("op", "op", "<20"),
    ("device", "device", "<6"),
    ("dtype", "dtype", "<8"),
    ("numel", "numel", ">11,"),
    ("density", "density", ">7g"),
    ("distribution", "distribution", "<12"),
    ("threads", "thr", ">3"),
    ("prediction", "predict", "<7"),
    ("median_ms", "median ms", ">9.3f"),
    ("p20_ms", "p20", ">9.3f"),
    ("p80_ms", "p80", ">9.3f"),
    ("floor_ms", "floor ms", ">9.3f"),
    ("ratio_to_floor", "ratio", ">6.2f"),
    ("roof_percent", "roof %", ">6.1f"),
    ("gigabytes_per_second", "GB/s", ">6.1f"),
    ("rival_ms", "rival ms", ">9.2f"),
    ("speedup", "x", ">6.1f"),
    ("slow_path_rate", "slow", ">5.3f"),
    ("count_over_k", "count/k", ">7.3f"),
)


def _width(form: str) -> int:
    return int("".join(c for c in form.split(".")[0] if c.isdigit()))


def header() -> str:
    """Return the titles of the table."""
    return " ".join(f"{title:{form[0]}{_width(form)}}" for _, title, form in COLUMNS)


def line(row: dict[str, Any]) -> str:
    """Return one row of the table; - where there is no value."""
    cells = []
    for name, _, form in COLUMNS:
        value = row.get(name)
        cells.append(f"{'-':{form[0]}{_width(form)}}" if value is None else f"{value:{form}}")
    return " ".join(cells)


def _label(row: dict[str, Any], names: list[str]) -> str:
    return " ".join(str(row[name]) for name in names if row[name] is not None)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw time per element over numel, or the ratio to the floor of every row.

    Args:
        rows: at least one.
        path: where the chart is written; its suffix decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = ["op", "device", "dtype", "density", "distribution", "threads", "prediction"]
    varying = [n for n in names if n == "op" or len({row[n] for row in rows}) > 1]
    if len({row["numel"] for row in rows}) > 1:
        figure, axes = pyplot.subplots(figsize=(8, 5))
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            lines.setdefault(_label(row, varying), []).append(row)
        for label, points in lines.items():
            points.sort(key=lambda row: row["numel"])
            numels = [row["numel"] for row in points]
            drawn = axes.plot(numels, [r["ns_per_element"] for r in points], "o-", label=label)
            floors = [r["floor_ms"] * 1e6 / r["numel"] for r in points]
            axes.plot(numels, floors, "--", color=drawn[0].get_color(), alpha=0.5)
        axes.set(xscale="log", yscale="log", xlabel="entries", ylabel="ns per entry")
        axes.set_title("time per entry (dashed: floor)")
        axes.legend(fontsize="small")
        axes.grid(True, which="both", alpha=0.3)
    else:
        figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.3 * len(rows)))
        axes.barh([_label(row, varying) for row in rows], [row["ratio_to_floor"] for row in rows])
        axes.axvline(1.0, color="black", linewidth=1)
        axes.invert_yaxis()
        axes.set_xlabel("time / floor")
        axes.set_title(f"{rows[0]['numel']:,} entries")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
