"""Buckets under way: the outcome to come, and whether somebody changes the gradient meanwhile."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from ddl.aggregator import Outcome

GLANCE = 32  # entries that nearly always tell whether a gradient was changed


class Launch:
    """A bucket under way.

    Attributes:
        future: its outcome to come.
        after: a glance at its gradient when that was there.
    """

    future: Future[Outcome]

    def __init__(self, version: int, before: Tensor | None) -> None:
        """Remember how the gradient looks.

        Args:
            version: torch's count of changes.
            before: a glance, if the worker leaves the gradient as it is.
        """
        self._version = version
        self._before = before
        self.after: Tensor | None = None

    def shows_change(self, flat: Tensor) -> bool:
        """Whether somebody else has changed the gradient; needs the outcome."""
        if flat._version != self._version:
            return True
        now = glance(flat)
        return any(
            known is not None and not torch.equal(known, now)
            for known in (self._before, self.after)
        )


def glance(flat: Tensor) -> Tensor:
    """The bits of some entries: torch does not count changes by `grad.data` or by a GradScaler."""
    some = flat.detach()[:: max(1, flat.numel() // GLANCE)].clone()
    return some.view(torch.int16 if flat.element_size() == 2 else torch.int32)
