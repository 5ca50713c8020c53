"""Hooks on parameters: how autograd tells a reducer that a gradient has been accumulated."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from ddl.reduction.buckets import NamedParameter


class Listener(Protocol):
    """Who is told of gradients."""

    def on_gradient(self, index: int, place: int) -> None:
        """The parameter at `place` of bucket `index` has its gradient; must not block."""


class GradientHook:
    """Tells a listener of a parameter's gradient; does not keep the listener alive."""

    def __init__(self, listener: Listener, index: int, place: int) -> None:
        """Tell `listener` of the parameter at `place` of bucket `index`."""
        self._listener: Callable[[], Listener | None] = weakref.ref(listener)
        self._index, self._place = index, place

    @property
    def alive(self) -> bool:
        """Whether there is still somebody to tell."""
        return self._listener() is not None

    def __call__(self, parameter: nn.Parameter) -> None:
        """Autograd has accumulated the gradient of `parameter`."""
        listener = self._listener()
        if listener is not None:
            listener.on_gradient(self._index, self._place)


def listen(listener: Listener, parameter: nn.Parameter, index: int, place: int) -> Any:
    """Tell `listener` of every gradient of a parameter; returns a handle with `remove()`."""
    return parameter.register_post_accumulate_grad_hook(GradientHook(listener, index, place))


def check_unclaimed(member: NamedParameter) -> None:
    """Refuse a parameter whose gradient is already a view of another listener's bucket.

    Raises:
        ValueError: it is; names the parameter.
    """
    hooks = getattr(member.parameter, "_post_accumulate_grad_hooks", None) or {}
    if any(isinstance(hook, GradientHook) and hook.alive for hook in hooks.values()):
        raise ValueError(
            f"parameter {member.name!r} belongs to another DistributedOptimizer, expected each "
            "parameter in one; close() the other first, or leave the parameter out of one"
        )
