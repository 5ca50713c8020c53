# python benchmarks/bench_convergence.py --tasks resnet20 --ranks 4 16 --density 0.001 0.01
"""Does sparsified training converge, and at what cost in bytes? A grid of runs, and its pictures.

Cells are task x compressor x P x density x seed. Tasks: `resnet20` and `vgg` (the first 12,000
images of Fashion-MNIST for training, the first 2,000 of its test files for judging) and `lstm` (a
language model on 200,000 tokens of Python's standard library). `gtopk-exact` keeps the engine's
number of winners a pick, or several by --global-ratio. Rivals: `none`, the dense average, and
`powersgd-4`, PowerSGD of rank 4. Every worker has batches of a fixed size, so that more workers
take fewer steps; the learning rate of images is P times --lr, rises in a tenth of the run, and
falls along a cosine.

Ranks are threads of this process, so P may be 32 on a laptop. Every finished run is one line of
--results, and is not run again: a grid that was interrupted is started anew by the same command.
Several processes may share the work, and the file: --part 1/2 and --part 2/2, each on its own core
by taskset, are faster than one process on both. Bytes are those a rank sends, on average over
ranks. With --equal-bytes larger ratios have smaller densities, by the formula of what is sent.

    python benchmarks/bench_convergence.py --quick              # one small run, in seconds
    python benchmarks/bench_convergence.py --dry-run --ranks 32 # what would be run
    python benchmarks/bench_convergence.py --compressors none gtopk-exact --global-ratio 1 4
    python benchmarks/bench_convergence.py --dry-run --plot pictures # of what is finished
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict
from typing import Any

import convergence_arguments
from convergence_arguments import data_of
from convergence_plot import draw_each
from convergence_rows import (
    INTERRUPTED,
    append,
    describe,
    key_of,
    make_writable,
    read_rows,
    still_to_run,
    versions,
)
from convergence_run import CONTESTANTS, SPARSE, Cell, run_behind_bar
from convergence_tasks import RECIPES, TASKS

from ddl import flags
from ddl.compressors import EXACT_RATIO
from ddl.perfmodel import costs
from ddl.wires import WIRES

QUICK = ("--tasks", "resnet20", "--compressors", "gtopk-exact", "--ranks", "2", "--epochs", "1")
QUICK_DATA = ("--train-images", "256", "--test-images", "64", "--density", "0.01")
SWEPT = "gtopk-exact"  # the contestant that has a global density of its own


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = convergence_arguments.Parser("bench_convergence.py", __doc__, CONTESTANTS)
    ratio = flags.number(float, lambda value: value >= 1, "a number of 1 or more")
    published = f"global / local density of {SWEPT}; 1 is the published one"
    parser.several("--global-ratio", [EXACT_RATIO], published, type=ratio)
    parser.several("--wire", ["plain"], "how entries travel", choices=list(WIRES))
    parser.add_argument(
        "--density-warmup", action="store_true", help="the published densities in 4 epochs"
    )
    parser.add_argument(
        "--equal-bytes", action="store_true", help="lower the densities where ratios are above 1"
    )
    args = parser.read(arguments, (*QUICK, *QUICK_DATA))
    if args.equal_bytes and args.density_warmup:
        parser.error(
            "--equal-bytes with --density-warmup, whose densities are the same for all ratios, "
            "expected one of them; leave one out"
        )
    return args


def keys(arguments: list[str]) -> list[str]:
    """What identifies the runs of a command, in its order; needs no data."""
    args = parse(arguments)
    data = data_of(args)
    return [key_of(asdict(cell), describe(data, cell.task)) for cell in grid(args)]


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    data = data_of(args)
    try:
        tasks = {name: TASKS[name](data) for name in args.tasks}
        cells = grid(args)
        if not args.dry_run:
            make_writable(args.results)
        described = {name: describe(data, name) for name in tasks}
        for number, cell in still_to_run(cells, described, args.results, args.part):
            if args.dry_run:
                print(json.dumps(asdict(cell)))
                continue
            row = run_behind_bar(cell, tasks[cell.task], number)
            append(args.results, {**row, "data": described[cell.task], **versions()})
            print(line_of(row), flush=True)
        if args.plot:
            rows = read_rows(args.results)
            rows = [row for row in rows if row["data"] == described.get(row["cell"]["task"])]
            for picture in draw_each(rows, args.plot):
                print(picture)
    except (ValueError, OSError) as error:
        args.parser.error(str(error))
    except KeyboardInterrupt:
        args.parser.exit(130, INTERRUPTED)


def grid(args: argparse.Namespace) -> list[Cell]:
    """The runs that were asked for, each once; dense ones have no densities to vary."""
    cells: dict[Cell, None] = {}
    axes = (
        *(args.tasks, args.seeds, args.ranks, args.compressors, args.density),
        *(args.global_ratio, args.wire),
    )
    for name, seed, P, compressor, density, ratio, wire in itertools.product(*axes):
        recipe = RECIPES[name]
        lr = (args.lr or recipe.lr) * (P if recipe.scales else 1)
        sparse = compressor in SPARSE
        if compressor != SWEPT:
            ratio = 1.0
        if args.equal_bytes:
            density *= costs.exact(P, 1).sent_bytes / costs.exact(P, 1, winners=ratio).sent_bytes
        cell = Cell(
            task=name,
            compressor=compressor,
            P=P,
            density=float(f"{density:.4g}") if sparse else 1.0,
            global_ratio=ratio,
            seed=seed,
            batch_size=args.batch_size or recipe.batch_size,
            epochs=args.epochs,
            lr=lr,
            density_warmup=args.density_warmup and sparse,
            wire=wire if sparse and compressor != "randomk" else "plain",
        )
        cells[cell] = None
    return list(cells)


def line_of(row: dict[str, Any]) -> str:
    """What is printed of a finished run."""
    cell = row["cell"]
    rate = next(key for key in row if key.startswith("seconds_per_1000_"))
    return (
        f"{cell['task']} {cell['compressor']} P={cell['P']} density={cell['density']:g} "
        f"ratio={cell['global_ratio']:g} wire={cell['wire']} seed={cell['seed']}: "
        f"{row['steps']} steps, "
        f"train loss {row['train_loss']:.4f}, val loss {row['val_loss']:.4f}, "
        f"accuracy {100 * row['val_accuracy']:.2f} %, {row['bytes_per_step']:.0f} bytes a step, "
        f"{row['seconds']:.0f} s, {row[rate]:.2f} s per 1000 {rate.rpartition('_')[2]}"
        f"{'' if row['ranks_agree'] else '; RANKS DIFFER'}"
    )


if __name__ == "__main__":
    main()
