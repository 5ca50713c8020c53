"""What the ranks owe, by the names of parameters, to be kept and to be taken up again.

A rank's residual of a parameter is a *piece* of its entries: all of them or, in two levels, those
in this rank's shard of the bucket. What ranks owe counts by its sum over ranks, divided by P. So
when other ranks take it up,

* the entries that old rank i owes go to the (i mod n)-th of the n ranks that now own them, which in
  one level are all ranks;
* all of it is multiplied by the new P over the old, so that the average still owed is the same.

Where as many ranks own the same pieces as before, each gets its own back, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from ddl.reduction.reducer import Reducer

Range = tuple[int, int]  # entries of a bucket from the first number to below the second


class Piece(TypedDict):
    """Part of a parameter's residual."""

    begin: int  # its first entry
    values: Tensor  # float32 [length of the piece]
    channels_last: bool  # whether entries are counted in that order of memory


def owed(reducer: Reducer) -> dict[str, Piece]:
    """What this rank owes, by the names of parameters; shares memory with the residuals."""
    pieces: dict[str, Piece] = {}
    for bucket, aggregator in reducer.owing:
        if aggregator.residual is None:
            continue
        offset = 0
        for place, member in enumerate(bucket.members):
            values = bucket.part(aggregator.residual, place, aggregator.first)
            if values.numel():
                begin = max(0, aggregator.first - offset)
                pieces[member.name] = {
                    "begin": begin,
                    "values": values,
                    "channels_last": bucket.is_channels_last(place),
                }
            offset += member.parameter.numel()
    return pieces


def same_pieces(reducer: Reducer, pieces: Mapping[str, Piece]) -> bool:
    """Whether this rank owns just these pieces."""

    def layout(of: Mapping[str, Piece]) -> dict[str, tuple[int, int, bool]]:
        return {n: (p["begin"], p["values"].numel(), p["channels_last"]) for n, p in of.items()}

    return layout(owed(reducer)) == layout(pieces)


def ranges(reducer: Reducer) -> list[Range]:
    """What this rank owns of each bucket."""
    return [
        (a.first, a.first + (0 if a.residual is None else a.residual.numel()))
        for _, a in reducer.owing
    ]


def inherited(everyones: Sequence[Sequence[Range]], rank: int, P_before: int) -> list[list[int]]:
    """For each bucket, the old ranks whose debts this rank takes over.

    Args:
        everyones: `ranges` of every rank.
        rank: this one.
        P_before: how many ranks there were.
    """
    taken = []
    for index, (begin, end) in enumerate(everyones[rank]):
        owners = [other for other, theirs in enumerate(everyones) if theirs[index] == (begin, end)]
        mine = [i for i in range(P_before) if owners[i % len(owners)] == rank]
        taken.append(mine if end > begin else [])
    return taken


def give_back(reducer: Reducer, pieces: Mapping[str, Piece]) -> None:
    """Owe these pieces, to the bit, and nothing else; they are this rank's `same_pieces`."""
    for name, piece in owed(reducer).items():
        piece["values"].copy_(pieces[name]["values"])


def take_over(
    reducer: Reducer,
    shards: Mapping[int, Mapping[str, Piece]],
    old_ranks_of: Sequence[Sequence[int]],
    scale: float,
) -> None:
    """Owe what others owed, and nothing else.

    Args:
        reducer: of this rank.
        shards: the pieces of each old rank that this rank takes over from.
        old_ranks_of: each bucket; from `inherited`.
        scale: the new P over the old.
    """
    for (bucket, aggregator), old_ranks in zip(reducer.owing, old_ranks_of, strict=True):
        residual = aggregator.residual
        if residual is None:
            continue
        residual.zero_()
        offset = -aggregator.first  # of the parameter within the residual
        for place, member in enumerate(bucket.members):
            for old_rank in old_ranks:
                piece = shards[old_rank].get(member.name)
                if piece is not None:
                    begin, values = _in_order(
                        piece, member.parameter.shape, bucket.is_channels_last(place)
                    )
                    low = max(0, offset + begin)
                    high = min(residual.numel(), offset + begin + values.numel())
                    if high > low:
                        part = values[low - offset - begin : high - offset - begin]
                        residual[low:high] += (part * scale).to(residual.device)
            offset += member.parameter.numel()


def _in_order(piece: Piece, shape: torch.Size, channels_last: bool) -> tuple[int, Tensor]:
    """First entry and values of a piece, counted in the given order of memory."""
    begin, values = piece["begin"], piece["values"]
    if piece["channels_last"] == channels_last:
        return begin, values
    whole = torch.zeros(shape.numel())
    whole[begin : begin + values.numel()] = values
    N, C, H, W = shape
    if channels_last:
        return 0, whole.view(shape).permute(0, 2, 3, 1).reshape(-1)
    return 0, whole.view(N, H, W, C).permute(0, 3, 1, 2).reshape(-1)
