"""What command lines have in common: numbers in ranges, files, and what is wrong in one line, once.

Used by `python -m ddl.advise`, the examples and the benchmarks.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ddl.world import MPI_VARIABLES

PLOT_FORMATS = (".png", ".pdf", ".svg")


class Parser(argparse.ArgumentParser):
    """Ends in one line and status 2; of a job's ranks only the first speaks."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong."""
        line = f"{self.prog}: {' '.join(message.split())}; --help lists all flags\n"
        self.exit(2, line if is_first_rank() else None)

    def print_help(self, file: Any = None) -> None:
        """Print the help, once."""
        if is_first_rank():
            super().print_help(file)


def is_first_rank() -> bool:
    """Whether this is the first process of its job, or the only one; known before it is joined."""
    # A torchrun that an MPI launcher has started hands its variables on; its own are newer.
    names = ("RANK",) if "TORCHELASTIC_RUN_ID" in os.environ else (*MPI_VARIABLES, "RANK")
    return all(os.environ.get(name, "0") == "0" for name in names)


def number(
    kind: type[int] | type[float], condition: Callable[[Any], bool], expected: str
) -> Callable[[str], Any]:
    """Make an argparse type: a finite int or float that fulfils the condition.

    Args:
        kind: what the text is read as.
        condition: of the number.
        expected: the condition in words.
    """

    def parse(text: str) -> Any:
        try:
            value = kind(text)
            good = math.isfinite(value) and condition(value)
        except (ValueError, OverflowError):
            good = False
        if not good:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
        return value

    return parse


positive_int = number(int, lambda value: value >= 1, "a whole number of 1 or more")
count = number(int, lambda value: value >= 0, "a whole number of 0 or more")
positive_float = number(float, lambda value: value > 0, "a number above 0")
at_least_one = number(float, lambda value: value >= 1, "a number of 1 or more")
not_negative = number(float, lambda value: value >= 0, "a number of 0 or more")
density = number(
    float,
    lambda value: 0 < value <= 1,
    "a density in (0, 1]; it is the fraction of entries kept, not a percentage",
)


def output_file(text: str) -> Path:
    """A file whose folder exists."""
    path = Path(text)
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it first")
    return path


def plot_file(text: str) -> Path:
    """A file of a format that can be drawn."""
    path = output_file(text)
    if path.suffix not in PLOT_FORMATS:
        raise argparse.ArgumentTypeError(
            f"got {text}, expected a name in {', '.join(PLOT_FORMATS)}"
        )
    return path
