"""Names for the parameters of an optimizer, for messages and checkpoints."""

from __future__ import annotations

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
