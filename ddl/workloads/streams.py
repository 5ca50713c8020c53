"""A text as parallel streams, for truncated back-propagation through time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

IGNORED = -100  # torch.nn.functional.cross_entropy leaves targets of this value out


def rank_streams(tokens: Tensor, rank: int, P: int, streams: int) -> Tensor:
    """The part of a text that one rank trains on: contiguous, and as long as every other rank's.

    Args:
        tokens: int64 [number of tokens].
        rank: of the part.
        P: number of parts.
        streams: how many streams to cut the part into.

    Returns:
        int64 [length, streams]; each column goes on where the one before it ends. What does not
        fill a column is left out.

    Raises:
        ValueError: there are fewer than two tokens a stream.
    """
    length = len(tokens) // P // streams
    if length < 2:
        raise ValueError(
            f"{len(tokens)} training tokens for {P} ranks of {streams} streams, expected at least "
            f"{2 * P * streams}; use fewer ranks, a smaller batch, or more text"
        )
    part = tokens[rank * length * streams : (rank + 1) * length * streams]
    return part.view(streams, length).t().contiguous()


def windows(streams: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, each int64 [at most `length`, N]: a word and the one that follows it."""
    for start in range(0, len(streams) - 1, length):
        end = min(start + length, len(streams) - 1)
        yield streams[start:end], streams[start + 1 : end + 1]


def judged_columns(tokens: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """A text to be judged, in columns: every token but the first is a target exactly once.

    Args:
        tokens: int64 [number of tokens].
        columns: how many; a column's first word is predicted from the one before it alone.

    Returns:
        Inputs and targets, int64 [length, columns]; targets are IGNORED where a column ended.
    """
    length = -(-(len(tokens) - 1) // columns)
    missing = length * columns - (len(tokens) - 1)
    inputs = torch.cat([tokens[:-1], tokens.new_zeros(missing)])
    targets = torch.cat([tokens[1:], tokens.new_full((missing,), IGNORED)])
    shape = (columns, length)
    return inputs.view(shape).t().contiguous(), targets.view(shape).t().contiguous()
