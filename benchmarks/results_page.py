# python benchmarks/results_page.py
"""Write the tables and pictures of docs/results.md from finished runs in benchmarks/results.

A table stands between `<!-- NAME of GRID ... -->` and `<!-- end -->`, where NAME is one of TABLES
and GRID one of GRIDS (results_grids.py) or a file of benchmarks/results; the text around them is
written by hand. With --check nothing is written, and what would change is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_convergence
import results_grids
from convergence_plot import draw
from convergence_rows import key_of, read_rows
from results_files import FILE_TABLES
from results_tables import TABLES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
PICTURES = ROOT / "docs" / "pictures"
DPI = 70  # pages are read on screens, and pictures are kept in the repository
BLOCK = re.compile(r"<!-- (?P<name>\S+) of (?P<of>[^>]+?) -->\n.*?<!-- end -->", re.DOTALL)
MARKER = re.compile(r"<!--(?! end -->)")


def runs_of(grid: str) -> list[dict[str, Any]]:
    """The finished runs of a grid.

    Raises:
        ValueError: some are missing; says how to make them.
    """
    wanted = bench_convergence.keys(results_grids.flags(grid))
    finished = {
        key_of(row["cell"], row["data"]): row for row in read_rows(results_grids.CONVERGENCE)
    }
    missing = [key for key in wanted if key not in finished]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(wanted)} runs of {grid} are not in "
            f"{results_grids.CONVERGENCE}; run: {results_grids.command(grid)}"
        )
    return [finished[key] for key in wanted]


def table(name: str, sources: Sequence[str]) -> str:
    """A block of the page, without its markers.

    Raises:
        ValueError: there is no such table or source, or runs are missing.
    """
    if name in FILE_TABLES:
        (source,) = sources
        path = results_grids.FOLDER / source
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            return FILE_TABLES[name]([json.loads(line) for line in lines])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path} has other lines than the table {name} expects: {error!r}; run what makes "
                "them again"
            ) from error
    if name not in TABLES:
        raise ValueError(f"no table {name}, expected one of {', '.join([*TABLES, *FILE_TABLES])}")
    # Grids may have runs in common.
    rows = {key_of(row["cell"], row["data"]): row for grid in sources for row in runs_of(grid)}
    commands = "\n".join(f"    {results_grids.command(source)}" for source in sources)
    return f"{TABLES[name](list(rows.values()))}\n\n{commands}"


def written(text: str) -> str:
    """The page with its tables as the files of runs say.

    Raises:
        ValueError: a marker is not one, or see `table`.
    """
    blocks, begun = len(BLOCK.findall(text)), len(MARKER.findall(text))
    if not blocks == begun == text.count("<!-- end -->"):
        raise ValueError(
            f"{blocks} tables in {begun} comments of {PAGE}, expected each comment alone on its "
            "line as <!-- NAME of GRID ... --> and after its table <!-- end -->"
        )

    def block(match: re.Match[str]) -> str:
        name, of = match["name"], match["of"]
        return f"<!-- {name} of {of} -->\n\n{table(name, of.split())}\n\n<!-- end -->"

    return BLOCK.sub(block, text)


def pictures(text: str) -> list[Path]:
    """Draw those that the page shows; a picture is called as its grid, or its grids joined by +."""
    drawn = []
    for name in dict.fromkeys(re.findall(r"\]\(pictures/([^)]+)\.png\)", text)):
        rows = [row for grid in name.split("+") for row in runs_of(grid)]
        drawn.append(draw(rows, PICTURES / f"{name}.png", DPI))
    return drawn


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="results_page.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing; say what would change")
    args = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    try:
        new = written(old)
        if args.check:
            if new != old:
                raise ValueError(
                    f"{PAGE} is not what the runs say; run python benchmarks/{parser.prog}"
                )
            return
        PAGE.write_text(new, encoding="utf-8")
        for picture in pictures(new):
            print(picture)
    except (ValueError, OSError) as error:
        print(f"results_page.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
