"""An optimizer in words: names for its parameters, and what else ranks must have in common."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from ddl.reduction.buckets import NamedParameter


def named(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None
) -> list[NamedParameter]:
    """The optimizer's parameters with their names, in the order of the names.

    Raises:
        ValueError: a name given twice, or a parameter without a name.
    """
    unnamed = {id(member.parameter): member for member in owned(optimizer)}
    if named_parameters is None:
        return list(unnamed.values())
    try:
        pairs = [(str(name), parameter) for name, parameter in named_parameters]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            "named_parameters must be pairs of name and parameter, got something else; pass "
            "model.named_parameters()"
        ) from error
    counts = Counter(name for name, _ in pairs)
    for name, count in counts.items():
        if count > 1:
            raise ValueError(
                f"named_parameters has {name!r} {count} times, expected distinct names; with "
                "several models give each a prefix"
            )
    members = {id(p): NamedParameter(name, p) for name, p in pairs if id(p) in unnamed}
    for key, member in unnamed.items():
        if key not in members:
            raise ValueError(
                f"the optimizer's parameter {member.name} of shape "
                f"{tuple(member.parameter.shape)} is not in named_parameters; pass the "
                "named_parameters() of every model it optimizes, or none at all"
            )
    return list(members.values())


def owned(optimizer: Optimizer) -> list[NamedParameter]:
    """An optimizer's parameters, named by their place in it."""
    return [
        NamedParameter(f"group{g}.{place}", parameter)
        for g, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]


def settings_of(optimizer: Optimizer) -> dict[str, object]:
    """Its class, and what is said in its groups, by names for messages."""
    settings: dict[str, object] = {"optimizer": type(optimizer).__name__}
    for g, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if value is None or isinstance(value, (bool, int, float, str, tuple)):
                settings[f"{name} of group {g}"] = value
    return settings


def mark_of(optimizer: Optimizer) -> int:
    """A number that depends on the learning rates and weight decays, the same in every process."""
    rates = [
        (value if isinstance(value, (int, float)) else None)
        for group in optimizer.param_groups
        for value in (group.get("lr"), group.get("weight_decay"))
    ]
    return zlib.crc32(repr(rates).encode())
