"""Local gradient clipping: each rank clips its own gradient before it joins what is owed.

Deep Gradient Compression (Lin et al., arXiv 1712.01887, Section 3.2): with the threshold t for the
norm of the average, each of P ranks clips its part of the average, 1/P of its own gradient, to
t / sqrt(P), since the sum of P independent vectors is sqrt(P) times as long as one of them. For the
gradient itself that is t sqrt(P). Clipping the average afterwards, as usual, would see a few
delayed entries instead of a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddl.streams import Marks, Stream

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def clip_(flats: Sequence[Tensor], threshold: float, P: int, loss_scale: float) -> float:
    """Scale one rank's gradient down to a norm of threshold * sqrt(P), if it is longer.

    Args:
        flats: all of the gradient, in parts: float32, bfloat16 or float16; changed in place, unless
            the norm is not finite.
        threshold: of the Euclidean norm of the average gradient, t.
        P: number of ranks.
        loss_scale: the gradient comes multiplied by this.

    Returns:
        The norm before, of the gradient without its scale.
    """
    norms = [float(torch.linalg.vector_norm(flat, dtype=torch.float32)) for flat in flats]
    norm = math.hypot(*norms) / loss_scale
    factor = threshold * math.sqrt(P) / (norm + EPSILON)
    if math.isfinite(norm) and factor < 1:
        for flat in flats:
            flat.mul_(factor)
    return norm


def clip_later(
    flats: Sequence[Tensor],
    waits: Sequence[tuple[Stream, Marks]],
    threshold: float,
    P: int,
) -> Callable[[float], None]:
    """A task that clips one rank's gradient, given the loss scale, on whatever thread runs it.

    Args:
        flats: see `clip_`.
        waits: a stream for each, and the marks that it has to follow first.
        threshold: see there.
        P: see there.
    """

    def clip(loss_scale: float) -> None:
        for stream, marks in waits:
            stream.follow(marks.values())
        clip_(flats, threshold, P, loss_scale)

    return clip
