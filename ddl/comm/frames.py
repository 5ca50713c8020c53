"""Several messages as one: their lengths (int64 each), then their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def join(messages: Sequence[Tensor]) -> Tensor:
    """One uint8 message that holds `messages`; costs 8 bytes each."""
    lengths = torch.tensor([message.numel() for message in messages], dtype=torch.int64)
    return torch.cat([lengths.view(torch.uint8), *messages])


def split(frame: Tensor, count: int) -> list[Tensor]:
    """The `count` messages that `join` put into `frame`, as views of it.

    Raises:
        ValueError: the frame holds something else.
    """
    lengths = frame[: 8 * count].clone().view(torch.int64).tolist()
    if 8 * count + sum(lengths) != frame.numel():
        raise ValueError(
            f"a frame of {count} messages must hold {8 * count} + {sum(lengths)} bytes, got "
            f"{frame.numel()}; are all ranks running the same version and model?"
        )
    return list(torch.split(frame[8 * count :], lengths))
