"""Buckets: groups of parameters whose gradients lie in one flat tensor and travel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddl.errors import GradientError
from ddl.sparse import LARGEST_NUMEL

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class NamedParameter:
    """A parameter and the name by which messages and checkpoints know it."""

    name: str
    parameter: nn.Parameter


class Bucket:
    """Some parameters, and the flat tensor of which their gradients are views.

    Attributes:
        index: position in the order of launches.
        members: the parameters, in the order of their places in `flat`.
        flat: [numel] gradient, in the parameters' dtype and on their device.
        dense: whether the bucket is to be aggregated whole, whatever the compressor.
    """

    def __init__(self, index: int, members: Sequence[NamedParameter], dense: bool) -> None:
        """Allocate `flat`, take in gradients that exist, and make every gradient a view of it."""
        self.index = index
        self.members = tuple(members)
        self.dense = dense
        first = members[0].parameter
        numel = sum(member.parameter.numel() for member in members)
        self.flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
        self._views: list[Tensor] = []
        offset = 0
        for member in members:
            self._views.append(_view_like(self.flat, offset, member.parameter))
            offset += member.parameter.numel()
        for place in range(len(members)):
            self.absorb(place)

    def absorb(self, place: int) -> None:
        """Bring the gradient of the parameter at `place` into `flat`, if it is not there yet.

        Autograd allocates a new tensor after `zero_grad(set_to_none=True)`. A parameter without a
        gradient counts as one whose gradient is zero.

        Raises:
            GradientError: the parameter was moved or converted since the bucket was made.
        """
        parameter, view = self.members[place].parameter, self._views[place]
        # model.to() converts parameters and gradients in place, and takes views out of `flat`.
        if parameter.dtype != self.flat.dtype or parameter.device != self.flat.device:
            raise GradientError(
                f"parameter {self.members[place].name!r} is {parameter.dtype} on "
                f"{parameter.device}, expected {self.flat.dtype} on {self.flat.device} as when it "
                "was wrapped; call model.to() before ddl.DistributedOptimizer()"
            )
        grad = parameter.grad
        if grad is view:
            return
        with torch.no_grad():  # autograd may be recording: backward(create_graph=True)
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.to_dense() if grad.layout != torch.strided else grad)
        parameter.grad = view

    def first_detached(self) -> str | None:
        """Name of a parameter whose gradient is no longer a view of `flat`, if there is one."""
        for member, view in zip(self.members, self._views, strict=True):
            if member.parameter.grad is not view:
                return member.name
        return None

    def part(self, tensor: Tensor, place: int, first: int = 0) -> Tensor:
        """The entries that belong to one parameter, of a tensor of the bucket's from `first` on."""
        begin = self._views[place].storage_offset() - first
        return tensor[max(0, begin) : max(0, begin + self._views[place].numel())]

    def is_channels_last(self, place: int) -> bool:
        """Whether the entries of a parameter lie in that order in `flat`."""
        return not self._views[place].is_contiguous()

    def __str__(self) -> str:
        """For messages: the bucket's number and what is in it."""
        names = [member.name for member in self.members]
        what = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        return f"bucket {self.index} ({what})"


def _view_like(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """The part of `flat` from `offset`, with the shape and, where it is dense, the strides."""
    channels_last = parameter.dim() == 4 and parameter.is_contiguous(
        memory_format=torch.channels_last
    )
    if channels_last and not parameter.is_contiguous():
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


def make_buckets(
    members: Sequence[NamedParameter],
    bucket_bytes: int,
    dense_below: int,
    first_index: int = 0,
) -> list[Bucket]:
    """Group parameters in reverse order, which is about the order of their gradients.

    Args:
        members: the trainable parameters, in the order of the forward pass.
        bucket_bytes: a bucket is full when one more parameter would exceed this; a larger
            parameter gets a bucket of its own.
        dense_below: parameters with fewer elements are kept dense, in buckets of their own.
        first_index: of the first bucket.

    Returns:
        The buckets in the order in which they are launched, the same on every rank.

    Raises:
        ValueError: a parameter of a type or size that cannot be handled; names it.
    """
    groups: list[list[NamedParameter]] = []
    open_groups: dict[tuple[torch.dtype, torch.device, bool], list[NamedParameter]] = {}
    for member in members:
        _check(member)
    for member in reversed(members):
        parameter = member.parameter
        kind = (parameter.dtype, parameter.device, parameter.numel() < dense_below)
        group = open_groups.get(kind)
        if group is None or _bytes([*group, member]) > bucket_bytes:
            group = open_groups[kind] = []
            groups.append(group)
        group.append(member)
    # A dense group may collect parameters from the whole model: launch a group when its last
    # gradient is due, not its first.
    due = {id(member.parameter): -place for place, member in enumerate(members)}
    groups.sort(key=lambda group: due[id(group[-1].parameter)])
    return [
        Bucket(index, group, dense=group[0].parameter.numel() < dense_below)
        for index, group in enumerate(groups, start=first_index)
    ]


def _bytes(group: Sequence[NamedParameter]) -> int:
    return sum(m.parameter.numel() * m.parameter.element_size() for m in group)


def _check(member: NamedParameter) -> None:
    parameter = member.parameter
    if parameter.dtype not in DTYPES:
        raise ValueError(
            f"parameter {member.name!r} has dtype {parameter.dtype}, expected float32, bfloat16 or "
            "float16; convert the model, e.g. model.float()"
        )
    if parameter.numel() > LARGEST_NUMEL:
        raise ValueError(
            f"parameter {member.name!r} has {parameter.numel()} elements, expected at most "
            f"{LARGEST_NUMEL}, because indices travel as int32; split it"
        )
