"""Samples: fixed entries of a layer that stand for all of it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

LARGEST = 2**18  # shapes need no more entries than this, and ages and bells fewer


@lru_cache(maxsize=4)  # a layer asks several times, and so do others of its size
def places(numel: int, largest: int) -> Tensor:
    """One entry of each so many in a row, the same in every call; all where they are few.

    Which one of a row is drawn: every so-manyth would fall in step with the layout of a layer, and
    of a 3 x 3 kernel see one column only, or one weight.

    Args:
        numel: of the layer.
        largest: LARGEST at most.

    Returns:
        int64 [at most `largest`], ascending; not to be changed.
    """
    stride = row_length(numel, largest)
    begins = torch.arange(0, numel, stride)
    lengths = (numel - begins).clamp(max=stride)
    return begins + (_draws()[: len(begins)] * lengths).long()


def row_length(numel: int, largest: int) -> int:
    """Of how many entries in a row one is taken."""
    return max(1, -(-numel // largest))


def sample(values: Tensor, largest: int) -> Tensor:
    """The values [any number] at `places`, or all of them, which are not copied then."""
    if values.numel() <= largest:
        return values
    return values[places(values.numel(), largest).to(values.device)]


@lru_cache(maxsize=1)
def _draws() -> Tensor:
    """float64 [LARGEST], from 0 to below 1 by more than a product with a length can round."""
    generator = torch.Generator().manual_seed(20190114)
    return torch.rand(LARGEST, generator=generator).double()
