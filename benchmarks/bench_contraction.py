# python benchmarks/bench_contraction.py --tasks resnet20 vgg lstm --plot pictures
"""Does top-k leave as little of a gradient as its theory promises? A study of real training.

Shi et al., arXiv 1911.08772, Theorem 1: of a vector u of d entries whose squares, sorted, make a
convex curve below the straight line from the largest to zero, top-k leaves at most (1 - k/d)^2 of
||u||^2, where random-k leaves 1 - k/d on average; and accumulated gradients are said to be so,
bell-shaped. Here the tasks of bench_convergence.py are trained, rank 0 is watched by
`ddl.diagnostics`, and both statements are held against what it sees, every --every steps.

Each is judged twice: for each bucket as a whole, from which entries are selected, and for each
layer, with the k that was picked in it: the picks of a bucket that lie in a layer are that layer's
largest entries, so that the theorem speaks of them, too. (Not with `randomk`, which is a control.)
Samples of which nothing was picked, or all, are counted and not judged.

A sample is bell-shaped if it does not refute the theorem's own condition, of which neither k nor
what is left is a part. The condition says that the distribution function of u^2 is concave from
zero on: small values are the most frequent, and the larger the rarer. The sample refutes it if its
distribution function is further from a concave one than that of independent draws from any such
distribution is in 5 % of cases (`ddl/diagnostics/bells.py`). Zeros do not count. Small layers
refute little: of 10 entries half must be out of place; of more than 8,192, 2 %. So "bell-shaped"
means no more than not refuted.

Every finished run is one line of --results, and is not run again. `gaussian_ratio` is how many
entries the unbounded threshold of Gaussian-k would have selected, over those that were.

    python benchmarks/bench_contraction.py --quick          # one small run, in seconds
    python benchmarks/bench_contraction.py --dry-run        # what would be run
    taskset -c 0 python benchmarks/bench_contraction.py     # ResNet-20, three runs of a minute each
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import convergence_arguments
from contraction_plot import draw
from contraction_summary import summarise
from convergence_arguments import data_of
from convergence_rows import (
    INTERRUPTED,
    append,
    describe,
    make_writable,
    read_rows,
    still_to_run,
    versions,
)
from convergence_run import SPARSE, Cell, run_behind_bar
from convergence_tasks import RECIPES, TASKS, Task

from ddl import flags
from ddl.diagnostics import Diagnostics
from ddl.diagnostics.output import read_records

COMPARED = ("topk", "gtopk-exact", "gaussiank")
QUICK = ("--tasks", "resnet20", "--compressors", "topk", "--ranks", "2", "--epochs", "1")
QUICK_DATA = ("--train-images", "256", "--test-images", "64", "--every", "4")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = convergence_arguments.Parser("bench_contraction.py", __doc__, list(SPARSE))
    parser.one("--every", 25, flags.positive_int, "steps from one sample to the next")
    parser.set_defaults(
        compressors=list(COMPARED),
        density=[0.01],
        epochs=4,
        batch_size=8,
        train_images=2_000,
        test_images=1_000,
        train_tokens=100_000,
        held_out_tokens=10_000,
        results=Path("logs/contraction.jsonl"),
    )
    return parser.read(arguments, (*QUICK, *QUICK_DATA))


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    data = data_of(args)
    try:
        tasks = {name: TASKS[name](data) for name in args.tasks}
        cells = grid(args)
        if not args.dry_run:
            make_writable(args.results)
        described = {name: {**describe(data, name), "every": args.every} for name in tasks}
        for number, cell in still_to_run(cells, described, args.results, args.part):
            if args.dry_run:
                print(json.dumps(asdict(cell)))
                continue
            row = watched_run(cell, tasks[cell.task], args.every, number)
            append(args.results, {**row, "data": described[cell.task], **versions()})
            print(text_of(row), flush=True)
        if args.plot:
            rows = read_rows(args.results)
            rows = [row for row in rows if row["data"] == described.get(row["cell"]["task"])]
            for picture in draw(rows, args.plot):
                print(picture)
    except (ValueError, OSError) as error:
        args.parser.error(str(error))
    except KeyboardInterrupt:
        args.parser.exit(130, INTERRUPTED)


def grid(args: argparse.Namespace) -> list[Cell]:
    """The runs that were asked for, each once; entries travel as they are."""
    cells = [
        Cell(
            task=name,
            compressor=compressor,
            P=P,
            density=density,
            global_ratio=1.0,
            seed=seed,
            batch_size=args.batch_size,
            epochs=args.epochs,
            lr=(args.lr or RECIPES[name].lr) * (P if RECIPES[name].scales else 1),
            density_warmup=False,
            wire="plain",
        )
        for name in args.tasks
        for seed in args.seeds
        for P in args.ranks
        for compressor in args.compressors
        for density in args.density
    ]
    return list(dict.fromkeys(cells))


def watched_run(cell: Cell, task: Task, every: int, number: str) -> dict[str, Any]:
    """One run, and what rank 0 has seen; see `contraction_summary.summarise`."""
    with TemporaryDirectory() as directory:

        def watch(optimizer: Any) -> Diagnostics:
            return Diagnostics(optimizer, every=every, directory=directory, whole_buckets=True)

        row = run_behind_bar(cell, task, number, watch)
        records = read_records(Path(directory))
    kept = ("cell", "steps", "train_loss", "val_loss", "val_accuracy", "ranks_agree", "seconds")
    return {**{key: row[key] for key in kept}, **summarise(records)}


def text_of(row: dict[str, Any]) -> str:
    """What is printed of a finished run."""
    cell = row["cell"]
    lines = [
        f"{cell['task']} {cell['compressor']} P={cell['P']} density={cell['density']:g} "
        f"seed={cell['seed']}: {row['steps']} steps, accuracy {100 * row['val_accuracy']:.2f} %, "
        f"{row['seconds']:.0f} s{'' if row['ranks_agree'] else '; RANKS DIFFER'}"
    ]
    for bucket in row["buckets"]["each"]:
        left, bounds = bucket["contraction"], (bucket["bound_topk"], bucket["bound_random"])
        lines.append(
            f"  {bucket['name']}: left {left:.4f}, bounds {bounds[0]:.4f} and {bounds[1]:.4f}, "
            f"kurtosis {_number(bucket['kurtosis_accumulated'])}, Gaussian-k's threshold selects "
            f"{_number(bucket['gaussian_ratio'])} k (medians)"
        )
    for part in ("buckets", "layers"):
        held = row[part]["held"]
        lines.append(
            f"  {part}: of {held['judged']} samples {_percent(held['within_topk'])} within "
            f"(1 - k/d)^2 and {_percent(held['within_random'])} within 1 - k/d; of the "
            f"{held['bell_shaped']} bell-shaped ones {_percent(held['bell_within_topk'])} and "
            f"{_percent(held['bell_within_random'])}"
        )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2f} %"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    main()
