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

_IMAGES = "--train-images 4000 --test-images 10000 --epochs 18"
_RESNET4 = f"--tasks resnet20 --ranks 4 {_IMAGES} --batch-size 8 --lr 0.005"
# Batches of 4, for with 8 there would be 558 steps, too few for any sparse compressor.
_RESNET16 = f"--tasks resnet20 --ranks 16 {_IMAGES} --batch-size 4 --lr 0.0025"
_VGG = f"--tasks vgg --ranks 16 {_IMAGES} --batch-size 8 --lr 0.002"
_VGG32 = f"--tasks vgg --ranks 32 {_IMAGES} --batch-size 4 --lr 0.001"
_SPARSE = "topk gtopk-exact gtopk-butterfly gaussiank"
_WARM = "--density 0.01 --density-warmup"

GRIDS: Mapping[str, str] = MappingProxyType(
    {
        "resnet20-P4": (
            f"{_RESNET4} --compressors none {_SPARSE} {_WARM} --global-ratio 1 2 --seeds 1 2 3"
        ),
        "resnet20-P4-sparser": (
            f"{_RESNET4} --compressors {_SPARSE} --density 0.001 --density-warmup "
            "--global-ratio 1 2 --seeds 1 2 3"
        ),
        "resnet20-P4-bytes": (
            f"{_RESNET4} --compressors none powersgd-4 gtopk-exact --density 0.01 0.001 "
            "--global-ratio 1 2 --wire compact"
        ),
        "resnet20-P16": (
            f"{_RESNET16} --compressors none gtopk-exact {_WARM} --global-ratio 2 4 --seeds 1 2 3"
        ),
        "resnet20-P16-butterfly": (
            f"{_RESNET16} --compressors gtopk-butterfly {_WARM} --seeds 1 2 3"
        ),
        "resnet20-P16-ratio": f"{_RESNET16} --compressors gtopk-exact {_WARM} --global-ratio 1",
        "vgg-P16": (
            f"{_VGG} --compressors none gtopk-exact --density 0.01 --global-ratio 1 2 4 "
            "--equal-bytes --seeds 1 2 3"
        ),
        "vgg-P16-ratio": (
            f"{_VGG} --compressors gtopk-exact --density 0.01 --global-ratio 8 --equal-bytes"
        ),
        "vgg-P32": f"{_VGG32} --compressors none {_SPARSE} --density 0.01 --global-ratio 1 2",
        "lstm-P4": (
            f"--tasks lstm --ranks 4 --epochs 6 --compressors none {_SPARSE} --density 0.005 "
            "--density-warmup --global-ratio 1 2"
        ),
    }
)


def flags(name: str) -> list[str]:
    """What to give to bench_convergence.py, its --results apart.

    Raises:
        ValueError: there is no such grid.
    """
    if name not in GRIDS:
        raise ValueError(f"no grid {name}, expected one of {', '.join(GRIDS)}")
    return shlex.split(GRIDS[name])


def command(name: str) -> str:
    """What to type for the runs of a grid that are missing, in the root of the repository."""
    results = "benchmarks/results/convergence.jsonl"
    return f"python benchmarks/bench_convergence.py {GRIDS[name]} --results {results}"
