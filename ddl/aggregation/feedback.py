"""Error feedback: what was not applied is owed, and goes into a later step."""

from __future__ import annotations

import torch
from torch import Tensor

from ddl import kernels
from ddl.sparse import SparseVector


class ErrorFeedback:
    """The residual of one bucket on one rank.

    Attributes:
        residual: float32 [numel], in the units of the unscaled gradient. Selectors accumulate the
            gradient into it and take out what they pick.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        """Owe nothing."""
        self.residual: Tensor = torch.zeros(numel, dtype=torch.float32, device=device)

    def owe(self, picks: SparseVector) -> None:
        """Take back entries that were picked and not applied."""
        if picks.count:
            kernels.give_back(self.residual, picks.indices, picks.values)
