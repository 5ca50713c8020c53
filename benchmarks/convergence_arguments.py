"""Flags of benchmarks that train the tasks of the convergence benchmark, cell by cell of a grid."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convergence_tasks import TASKS, Data

from ddl import flags
from ddl.workloads.idx import FASHION_MNIST_DIR


class Parser(flags.Parser):
    """Knows what such benchmarks have in common: the grid, the recipe, the data, the results."""

    def __init__(self, prog: str, doc: str | None, compressors: Sequence[str]) -> None:
        """Take the common flags.

        Args:
            prog: name of the program.
            doc: its docstring, whose first line is its description.
            compressors: the contestants.
        """
        super().__init__(
            prog=prog,
            description=(doc or "").partition("\n")[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        several, one, positive = self.several, self.one, flags.positive_int
        rate = flags.number(float, lambda value: value > 0, "a number above 0")
        several("--tasks", ["resnet20"], "what is trained", choices=list(TASKS))
        several("--compressors", list(compressors), "what is compared", choices=list(compressors))
        several("--ranks", [4], "numbers of workers", type=positive, metavar="P")
        several("--density", [0.001], "fractions sent", type=flags.density)
        several("--seeds", [1], "of weights and order", type=flags.count)
        one("--epochs", 10, positive, "passes over the data")
        one("--batch-size", None, positive, "per worker; default 16 images, 4 streams of text")
        one("--lr", None, rate, "of one worker; default the task's")
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
        self.add_argument(
            "--plot",
            type=Path,
            metavar="DIR",
            help="draw the finished runs of these tasks and data",
        )
        self.add_argument("--dry-run", action="store_true", help="list the runs, run none")
        self.add_argument("--quick", action="store_true", help="one small run; given flags win")

    def several(self, flag: str, default: list[Any], help: str, **more: Any) -> None:
        """Take a flag with one or more values."""
        self.add_argument(flag, nargs="+", default=default, help=help, **more)

    def one(self, flag: str, default: Any, type: Any, help: str) -> None:
        """Take a flag with one value."""
        self.add_argument(flag, default=default, type=type, help=help)

    def read(self, arguments: list[str] | None, quick: Sequence[str]) -> argparse.Namespace:
        """Parse; `quick` are the flags that --quick stands for."""
        args = self.parse_args(arguments)
        if args.quick:
            given = sys.argv[1:] if arguments is None else arguments
            args = self.parse_args([*quick, *given])
        args.parser = self
        return args


def data_of(args: argparse.Namespace) -> Data:
    """The data that was asked for."""
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


def part(text: str) -> tuple[int, int]:
    """`I/N` as two numbers.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, got {text!r}")
    return int(number), int(parts)
