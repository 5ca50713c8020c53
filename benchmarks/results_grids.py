"""The runs that docs/results.md tells of, as flags of bench_convergence.py.

A table of the page shows the runs of one grid, or of some; the same flags run what is missing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

FOLDER = Path(__file__).parent / "results"
CONVERGENCE = FOLDER / "convergence.jsonl"

GRIDS: Mapping[str, str] = MappingProxyType({})


def flags(name: str) -> list[str]:
    """What to give to bench_convergence.py, its --results apart."""
    return shlex.split(GRIDS[name])


def command(name: str) -> str:
    """What to type for the runs of a grid."""
    return f"python benchmarks/bench_convergence.py {GRIDS[name]}"
