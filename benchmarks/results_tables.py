"""Tables of the results page, in Markdown, from finished runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from convergence_run import CONTESTANTS, DENSE

Row = dict[str, Any]
Runs = list[Row]
COMMON = ("task", "P", "batch_size", "epochs", "lr")  # of all the runs in a table
SHARE = 0.9  # of dense's final accuracy, that bytes are counted to


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    rule = ("---", *("---:",) * (len(header) - 1))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines))


def by_contestant(rows: Sequence[Row]) -> list[Runs]:
    """The runs that differ in their seeds alone, in the order of CONTESTANTS and densities.

    Raises:
        ValueError: runs that a table cannot compare, since they are of other tasks or sizes.
    """
    common = {tuple(row["cell"][key] for key in COMMON) for row in rows}
    if len(common) != 1:
        raise ValueError(f"runs of several {', '.join(COMMON)} in one table: {sorted(common)}")
    groups: dict[tuple[Any, ...], Runs] = {}
    for row in rows:
        cell = row["cell"]
        place = CONTESTANTS.index(cell["compressor"])
        key = (place, -cell["density"], cell["density_warmup"], cell["wire"], cell["global_ratio"])
        groups.setdefault(key, []).append(row)
    return [groups[key] for key in sorted(groups)]


def label(runs: Runs) -> str:
    """What distinguishes these runs from others of the same table, but for their density."""
    cell = runs[0]["cell"]
    text = f"`{cell['compressor']}`"
    if cell["wire"] != "plain":
        text += f", {cell['wire']}"
    if cell["compressor"] == "gtopk-exact":
        ratio = cell["global_ratio"]
        text += f", {ratio:g} winner{'s' if ratio > 1 else ''} a pick"
    return text


def density(runs: Runs) -> str:
    """In full where it is a density."""
    cell = runs[0]["cell"]
    if cell["density"] == 1:
        return ""
    return f"{cell['density']:g}{' after warm-up' if cell['density_warmup'] else ''}"


def over_seeds(values: Sequence[float], digits: int) -> str:
    """Mean and, in brackets, the sample's standard deviation."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ({statistics.stdev(values):.{digits}f})" if len(values) > 1 else mean


def accuracy(rows: Sequence[Row]) -> str:
    """Test accuracy at the end, and bytes."""
    groups = by_contestant(rows)
    dense = next(runs for runs in groups if runs[0]["cell"]["compressor"] == DENSE)
    lines = [
        (
            label(runs),
            density(runs),
            str(len(runs)),
            over_seeds([100 * run["val_accuracy"] for run in runs], 2),
            against(runs, dense, lambda difference: f"{100 * difference:+.2f}", "val_accuracy"),
            f"{_mean(runs, 'train_loss'):.3f}",
            f"{_mean(runs, 'bytes_per_step') / 1e3:.1f}",
            f"{_mean(dense, 'bytes_per_step') / _mean(runs, 'bytes_per_step'):.1f}",
        )
        for runs in groups
    ]
    header = (
        *(
            "compressor",
            "density",
            "seeds",
            "test accuracy, %",
            "against dense of the same seeds, points",
        ),
        *("training loss", "KB a step", "times fewer bytes"),
    )
    return markdown(header, lines)


def perplexity(rows: Sequence[Row]) -> str:
    """Perplexity of held-out text at the end, and bytes."""
    groups = by_contestant(rows)
    dense = next(runs for runs in groups if runs[0]["cell"]["compressor"] == DENSE)
    lines = [
        (
            label(runs),
            density(runs),
            str(len(runs)),
            over_seeds([math.exp(run["val_loss"]) for run in runs], 2),
            against(runs, dense, lambda rise: f"{100 * math.expm1(rise):+.1f}", "val_loss"),
            f"{_mean(runs, 'bytes_per_step') / 1e3:.1f}",
            f"{_mean(dense, 'bytes_per_step') / _mean(runs, 'bytes_per_step'):.1f}",
        )
        for runs in groups
    ]
    header = (
        *("compressor", "density", "seeds", "perplexity", "against dense, %"),
        *("KB a step", "times fewer bytes"),
    )
    return markdown(header, lines)


def bytes_to_accuracy(rows: Sequence[Row]) -> str:
    """Bytes a rank sends until 90 % of dense's final accuracy is seen for the first time."""
    groups = by_contestant(rows)
    dense = next(runs for runs in groups if runs[0]["cell"]["compressor"] == DENSE)
    target = SHARE * statistics.fmean(last_between(run) for run in dense)
    reference = _mean_reached(dense, target, "bytes")
    lines = []
    for runs in groups:
        steps, sent = (_mean_reached(runs, target, what) for what in ("step", "bytes"))
        known = math.isfinite(sent)
        lines.append(
            (
                label(runs),
                density(runs),
                str(len(runs)),
                f"{steps:.0f}" if known else "not reached",
                f"{sent / 1e6:.2f}" if known else "",
                f"1/{reference / sent:.1f}" if known and runs != dense else "",
                f"{100 * _mean(runs, 'val_accuracy'):.2f}",
            )
        )
    header = (
        "compressor",
        "density",
        "seeds",
        "steps",
        "MB sent by a rank",
        "of dense's",
        "at the end, %",
    )
    return f"Accuracy to reach: {100 * target:.2f} %.\n\n{markdown(header, lines)}"


def reached(run: Row, target: float, what: str) -> float:
    """Steps or bytes until an accuracy is seen; infinity if it never is."""
    seen = (point[what] for point in run["validations"] if point["accuracy"] >= target)
    return next(seen, math.inf)


def last_between(run: Row) -> float:
    """Accuracy on the part that is judged in between, in the last tenth of a run.

    At the very end all is judged, which need not be as easy as that part.
    """
    return run["validations"][-2]["accuracy"]


def against(runs: Runs, dense: Runs, written: Callable[[float], str], key: str) -> str:
    """The mean difference between runs of the same seeds, those that both have.

    Their number is said where it is not that of the runs.
    """
    if runs == dense:
        return ""
    reference = {run["cell"]["seed"]: run[key] for run in dense}
    differences = [
        run[key] - reference[run["cell"]["seed"]]
        for run in runs
        if run["cell"]["seed"] in reference
    ]
    text = written(statistics.fmean(differences))
    if len(differences) == len(runs):
        return text
    return f"{text} ({len(differences)} seed{'s' if len(differences) > 1 else ''})"


def _mean_reached(runs: Runs, target: float, what: str) -> float:
    return statistics.fmean(reached(run, target, what) for run in runs)


def _mean(runs: Runs, key: str) -> float:
    return statistics.fmean(run[key] for run in runs)


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "accuracy": accuracy,
    "bytes": bytes_to_accuracy,
    "perplexity": perplexity,
}
