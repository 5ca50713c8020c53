"""Loss scaling: what a GradScaler multiplies the loss by, so that half-precision gradients survive.

Gradients come scaled and must be averages, still scaled, when the scaler divides them. So

1. *Read.* The scale is read once a step, by whoever aggregates first; residuals are kept without.
2. *Hold.* Before the scaler divides an optimizer's gradients, in `unscale_` or in its `step`, the
   optimizer waits until they are averages.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Protocol

from ddl.errors import GradientError


class GradScaler(Protocol):
    """As `torch.amp.GradScaler`."""

    def get_scale(self) -> float:
        """What losses are multiplied by; 1 if it is switched off."""

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of an optimizer."""


class LossScale:
    """The scale of one step, read once."""

    def __init__(self, scaler: GradScaler | None) -> None:
        """`scaler`: whose scale; None for losses that are not scaled."""
        self._scaler = scaler
        self._value: float | None = None

    def forget(self) -> None:
        """The next gradients may have another scale."""
        self._value = None

    def use(self, scale: float) -> None:
        """The gradients of this step have another rank's scale."""
        self._value = scale

    def read(self) -> float:
        """The scale; on a GPU this waits for the current stream.

        Raises:
            GradientError: it is not a positive number.
        """
        if self._value is None:
            scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
            if not (math.isfinite(scale) and scale > 0):
                raise GradientError(
                    f"the scaler's scale is {scale}, expected a positive number; has every step "
                    "overflowed? look for the layer whose gradients are not finite"
                )
            self._value = scale
        return self._value


class Synchronizing(Protocol):
    """An optimizer that can wait for its averages."""

    def synchronize(self) -> bool:
        """Wait."""


def hold(scaler: GradScaler, optimizer: Synchronizing) -> None:
    """Make `scaler` wait for the averages of `optimizer` before it divides them.

    Its `unscale_`, which its `step` calls as well, is replaced on this one object. The optimizer is
    not kept alive.
    """
    unscale = scaler.unscale_
    held = weakref.ref(optimizer)

    def unscale_(given: Any) -> None:
        ours = held()
        if ours is not None and given is ours:
            ours.synchronize()
        unscale(given)

    scaler.unscale_ = unscale_  # type: ignore[method-assign, assignment]


def check_scaler(scaler: Any) -> None:
    """Refuse what is no GradScaler.

    Raises:
        ValueError: it is none.
    """
    if scaler is not None and not (hasattr(scaler, "get_scale") and hasattr(scaler, "unscale_")):
        raise ValueError(
            f"scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}"
        )
