"""Two drawings: throughput over the number of workers, and the timeline of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddl.advise.advice import Advice
from ddl.advise.arguments import BadInput
from ddl.advise.predictions import Prediction, predict
from ddl.advise.situation import Situation

COLOURS = {
    "read": "0.8",
    "forward": "tab:blue",
    "backward": "tab:cyan",
    "select": "tab:orange",
    "communicate": "tab:red",
    "apply": "tab:olive",
    "update": "tab:green",
}
FARTHEST = 64  # workers, at least


def load_matplotlib() -> Any:
    """The module `matplotlib.pyplot`, without a display.

    Raises:
        BadInput: it is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise BadInput(
            "--plot needs matplotlib, which was not found; pip install matplotlib, or leave out "
            "--plot"
        ) from error
    return pyplot


def draw(
    situation: Situation, predictions: Sequence[Prediction], advice: Advice, file: Path
) -> None:
    """Draw into a file.

    Raises:
        BadInput: no matplotlib.
    """
    pyplot = load_matplotlib()
    figure, (curves, bars) = pyplot.subplots(2, 1, figsize=(9, 9), constrained_layout=True)
    counts = [1]
    while counts[-1] < max(FARTHEST, situation.P):
        counts.append(2 * counts[-1])
    for p in predictions:
        rates = [predict(situation, p.candidate, P).images_per_second for P in counts]
        curves.plot(counts, rates, marker="o", markersize=3, label=p.candidate.label)
    alone = situation.profile.batch / situation.profile.alone()
    curves.plot(counts, [P * alone for P in counts], "k:", label="without aggregation")
    curves.axvline(situation.P, color="0.8", zorder=0)
    curves.set(xscale="log", yscale="log", xlabel="workers", ylabel="images a second")
    curves.set_title(f"{situation.model}, {situation.profile.batch} images a worker, predicted")
    curves.legend()

    shown = [p for p in predictions if p is advice.best or p.candidate.is_dense]
    names = []
    for p in shown:
        for resource in ("compute", "worker"):
            names.append(f"{p.candidate.label}\n{resource}")
            for span in p.iteration.spans:
                if span.task.resource == resource:
                    bars.barh(
                        len(names) - 1,
                        1e3 * (span.end - span.start),
                        left=1e3 * span.start,
                        color=COLOURS[span.task.name.split()[0]],
                        edgecolor="white",
                        linewidth=0.3,
                    )
    bars.set_yticks(range(len(names)), names)
    bars.invert_yaxis()
    bars.set(xlabel="milliseconds", title=f"a step on {situation.P} workers, predicted")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    bars.legend(handles, list(COLOURS), ncols=len(COLOURS), fontsize="small", loc="lower right")
    figure.savefig(file)
    pyplot.close(figure)
