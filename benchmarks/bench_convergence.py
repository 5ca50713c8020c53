# python benchmarks/bench_convergence.py --tasks resnet20 --ranks 4 16 --density 0.001 0.01
"""Does sparsified training converge, and at what cost in bytes? A grid of runs, and its pictures.

Cells are task x compressor x P x density x seed. Tasks: `resnet20` and `vgg` (the first 12,000
images of Fashion-MNIST for training, the first 2,000 of its test files for judging) and `lstm` (a
language model on 200,000 tokens of Python's standard library). `gtopk-exact` also runs at several
ratios of global to local density. Rivals: `none`, the dense average, and `powersgd-4`, PowerSGD of
rank 4. Every worker has batches of a fixed size, so that more workers take fewer steps; the
learning rate of images is P times --lr, rises in a tenth of the run, and falls along a cosine.

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
import math
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bench_arguments
import torch
from convergence_plot import draw_each
from convergence_run import CONTESTANTS, SPARSE, Cell, run
from convergence_tasks import RECIPES, TASKS, Data, Task
from tqdm import tqdm

from ddl import kernels
from ddl.perfmodel import costs
from ddl.wires import WIRES
from ddl.workloads.idx import FASHION_MNIST_DIR

QUICK = ("--tasks", "resnet20", "--compressors", "gtopk-exact", "--ranks", "2", "--epochs", "1")
QUICK_DATA = ("--train-images", "256", "--test-images", "64", "--density", "0.01")
SWEPT = "gtopk-exact"  # the contestant that has a global density of its own


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = bench_arguments.Parser(
        prog="bench_convergence.py",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def several(flag: str, default: list[Any], help: str, **more: Any) -> None:
        parser.add_argument(flag, nargs="+", default=default, help=help, **more)

    def one(flag: str, default: Any, type: Any, help: str) -> None:
        parser.add_argument(flag, default=default, type=type, help=help)

    positive = bench_arguments.positive_int
    ratio = bench_arguments.number(float, lambda value: value >= 1, "a number of 1 or more")
    rate = bench_arguments.number(float, lambda value: value > 0, "a number above 0")
    several("--tasks", ["resnet20"], "what is trained", choices=list(TASKS))
    several("--compressors", list(CONTESTANTS), "what is compared", choices=list(CONTESTANTS))
    several("--ranks", [4], "numbers of workers", type=positive, metavar="P")
    several("--density", [0.001], "fractions sent", type=bench_arguments.density)
    several("--global-ratio", [1.0], f"global / local density of {SWEPT}", type=ratio)
    several("--wire", ["plain"], "how entries travel", choices=list(WIRES))
    several("--seeds", [1], "of weights and order", type=bench_arguments.count)
    one("--epochs", 10, positive, "passes over the data")
    one("--batch-size", None, positive, "per worker; default 16 images, 4 streams of text")
    one("--lr", None, rate, "of one worker; default the task's")
    parser.add_argument(
        "--density-warmup", action="store_true", help="the published densities in 4 epochs"
    )
    one("--data-dir", FASHION_MNIST_DIR, Path, "folder of Fashion-MNIST")
    one("--train-images", Data.train_images, positive, "the first so many")
    one("--test-images", Data.test_images, positive, "the first so many")
    several("--text", [], "files for lstm instead of the standard library", type=Path)
    one("--train-tokens", Data.train_tokens, positive, "of the text")
    one("--held-out-tokens", Data.held_out_tokens, positive, "of the text for judging")
    one("--vocabulary", Data.words, positive, "most frequent words kept")
    one("--hidden", Data.hidden, positive, "width of lstm")
    one("--results", Path("logs/convergence.jsonl"), Path, "file of finished runs")
    one("--part", (1, 1), part, "I/N: of the runs to do, each N-th from the I-th")
    parser.add_argument(
        "--equal-bytes", action="store_true", help="lower the densities where ratios are above 1"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="DIR", help="draw the finished runs of these tasks and data"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs, run none")
    parser.add_argument("--quick", action="store_true", help="one small run; given flags win")
    args = parser.parse_args(arguments)
    if args.quick:
        given = sys.argv[1:] if arguments is None else arguments
        args = parser.parse_args([*QUICK, *QUICK_DATA, *given])
    args.parser = parser
    return args


def part(text: str) -> tuple[int, int]:
    """`I/N` as two numbers.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, got {text!r}")
    return int(number), int(parts)


def data_of(args: argparse.Namespace) -> Data:
    return Data(
        folder=args.data_dir,
        text=tuple(args.text),
        train_images=args.train_images,
        test_images=args.test_images,
        train_tokens=args.train_tokens,
        held_out_tokens=args.held_out_tokens,
        words=args.vocabulary,
        hidden=args.hidden,
    )


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
        rows = read_rows(args.results)
        done = {key_of(row["cell"], row["data"]) for row in rows}
        described = {name: describe(data, name) for name in tasks}
        waiting = [c for c in cells if key_of(asdict(c), described[c.task]) not in done]
        print(f"{len(cells)} runs, {len(cells) - len(waiting)} of them in {args.results} already")
        first, parts = args.part
        waiting = waiting[first - 1 :: parts]
        for number, cell in enumerate(waiting, start=1):
            if args.dry_run:
                print(json.dumps(asdict(cell)))
                continue
            row = run_cell(cell, tasks[cell.task], f"{number}/{len(waiting)}")
            append(args.results, {**row, "data": described[cell.task], **versions()})
            print(line_of(row), flush=True)
        if args.plot:
            rows = read_rows(args.results)
            rows = [row for row in rows if row["data"] == described.get(row["cell"]["task"])]
            for picture in draw_each(rows, args.plot):
                print(picture)
    except (ValueError, OSError) as error:
        args.parser.error(str(error))


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


def run_cell(cell: Cell, task: Task, number: str) -> dict[str, Any]:
    """One run, behind a progress bar where there is a terminal."""
    # One thread a rank: as many ranks as there are cores compute at a time.
    torch.set_num_threads(1)
    kernels.set_num_threads(1)
    steps = cell.epochs * task.steps(cell.P, cell.batch_size)
    title = f"{number} {cell.task} {cell.compressor} P={cell.P} density={cell.density:g}"
    with tqdm(total=steps, desc=title, unit="step", leave=False, disable=None) as bar:
        return run(cell, task, on_step=bar.update)


def describe(data: Data, task: str) -> dict[str, Any]:
    """What identifies the data of a run, besides its cell."""
    if task != "lstm":
        return {"train_images": data.train_images, "test_images": data.test_images}
    return {
        "text": [file.name for file in data.text],
        "train_tokens": data.train_tokens,
        "held_out_tokens": data.held_out_tokens,
        "words": data.words,
        "hidden": data.hidden,
    }


def key_of(cell: dict[str, Any], data: dict[str, Any]) -> str:
    """The same for equal runs."""
    return json.dumps([cell, data], sort_keys=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Finished runs; a line that was cut off by an interruption is none."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a line, on its own even where the last one was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_plain(row)) + "\n"
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        text = "\n" + text
    with path.open("ab", buffering=0) as file:  # one write, for other processes append, too
        file.write(text.encode())


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "machine": platform.machine()}


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


def _plain(value: Any) -> Any:
    """Numbers that are not finite become null; others keep seven digits."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None


if __name__ == "__main__":
    main()
