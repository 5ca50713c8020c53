"""An optimizer around another one, the same to schedulers and checkpoints."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ddl.errors import DDLError


class Wrapper(Optimizer):
    """Shares the wrapped optimizer's `param_groups` and `state`, and has all that it has."""

    # The wrapped optimizer may take the scaler's word for it (fused ones do); the scaler would not
    # reach it through this wrapper, so it must unscale the gradients itself.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: Optimizer) -> None:
        """Wrap an optimizer."""
        self._inner: Optimizer | None = None
        super().__init__(optimizer.param_groups, optimizer.defaults)  # for torch's own hooks
        self._inner = optimizer

    # The base class assigns these in its constructor, before there is a wrapped optimizer.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's own list."""
        return self._own_groups if self._inner is None else self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._inner is None:
            self._own_groups = groups
        else:
            self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's own state."""
        return {} if self._inner is None else self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._inner is not None:
            self._inner.state = state

    def __getattr__(self, name: str) -> Any:
        """What the wrapped optimizer has besides."""
        inner = self.__dict__.get("_inner")
        if inner is None:
            raise AttributeError(name)
        return getattr(inner, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer."""
        if self._inner is None:
            super().add_param_group(param_group)
        else:
            self._inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self._wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer."""
        self._wrapped.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: a copy could not share the ranks' messages."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, expected its state_dict(); copy "
            "that and load it into the copy's own optimizer"
        )

    @property
    def kind(self) -> str:
        """The class of the wrapped optimizer."""
        return type(self._wrapped).__name__

    @property
    def _wrapped(self) -> Optimizer:
        if self._inner is None:
            raise DDLError("the optimizer is used before its constructor has ended")
        return self._inner
