"""The handwritten digits that come with scikit-learn: real data, without a download."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def read_digits() -> tuple[Tensor, Tensor]:
    """Read the 1,797 digits, which are sorted by writer.

    Returns:
        uint8 [1797, 8, 8], from 0 to 255, and int64 [1797].

    Raises:
        ValueError: scikit-learn is not installed, or lacks them.
    """
    # scikit-learn ships them as a table; importing it would cost every rank 50 MB and a second.
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ValueError(
            "the digits need scikit-learn, which is not installed; run: pip install scikit-learn"
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise ValueError(
            f"{path} is missing from scikit-learn, expected its handwritten digits; "
            "run: pip install --force-reinstall scikit-learn"
        )
    with gzip.open(path, "rt") as lines:
        table = torch.from_numpy(np.loadtxt(lines, delimiter=","))
    grey_levels = table[:, :64].reshape(-1, 8, 8) * (255 / 16)  # they come as 0 to 16
    return grey_levels.round().to(torch.uint8), table[:, 64].long()
