"""Buckets that DDP makes: where parameters lie in them, what aggregates them, what is under way.

Nothing here stays true for long: DDP makes its buckets anew after the first step of a run. What is
owed is therefore handed over by name, in the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl.aggregation.aggregator import Aggregator, Outcome
from ddl.errors import GradientError
from ddl.reduction.buckets import DTYPES, Bucket

PEEK = 64  # entries that nearly always tell a gradient from zeros


class Place(NamedTuple):
    """A parameter in a bucket.

    Attributes:
        name: of the parameter.
        offset: of its first entry.
        shape, stride: of its gradient.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of entries."""
        return torch.Size(self.shape).numel()

    @property
    def entries(self) -> slice:
        """In the flat tensor of the bucket."""
        return slice(self.offset, self.offset + self.numel)

    def view(self, flat: Tensor) -> Tensor:
        """A part of a flat tensor, shaped as the parameter."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


def places_of(bucket: Any, names_by_id: Mapping[int, str]) -> tuple[Place, ...]:
    """Where the parameters of a bucket are in its buffer.

    Args:
        bucket: torch.distributed.GradBucket.
        names_by_id: of all parameters of the model.

    Raises:
        ValueError: a parameter that is not among them, or of a type that cannot be handled.
        GradientError: a sparse gradient.
    """
    flat = bucket.buffer()
    parameters = bucket.parameters()
    names = [names_by_id.get(id(parameter)) for parameter in parameters]
    for name, parameter in zip(names, parameters, strict=True):
        if name is None:
            raise ValueError(
                f"bucket {bucket.index()} of DDP has a parameter of shape "
                f"{tuple(parameter.shape)} that the state does not know; give SparseHookState "
                "the model that DDP wraps"
            )
    what = ", ".join(str(name) for name in names)
    if flat.layout != torch.strided:
        raise GradientError(
            f"the gradient of {what} is sparse, expected a dense one; make the layer with "
            "sparse=False"
        )
    if flat.dtype not in DTYPES:
        raise ValueError(
            f"parameters {what} have gradients of {flat.dtype}, expected float32, bfloat16 or "
            "float16; convert the model, e.g. model.float()"
        )
    first = flat.storage_offset()
    return tuple(
        Place(str(name), view.storage_offset() - first, tuple(view.shape), _strides(parameter))
        for name, view, parameter in zip(names, bucket.gradients(), parameters, strict=True)
    )


class UnmovedBucket(Bucket):
    """A bucket whose flat tensor is DDP's: gradients stay where they are."""

    def __init__(self, index: int, flat: Tensor, dense: bool) -> None:
        """See `Bucket`; nothing is allocated or moved."""
        self.index, self.flat, self.dense = index, flat, dense
        self.members, self._views = (), []


class Cut:
    """What aggregates one bucket of DDP's: its small parameters whole, the others in part."""

    def __init__(
        self,
        places: Sequence[Place],
        flat: Tensor,
        dense_below: int,
        make: Callable[[Tensor, bool], Aggregator],
    ) -> None:
        """Owe nothing yet.

        Args:
            places: of the parameters.
            flat: [numel] such as will be aggregated.
            dense_below: parameters with fewer elements are small.
            make: an aggregator of tensors like the one given, whole or not.
        """
        self._large = [place for place in places if place.numel >= dense_below]
        small = [place.entries for place in places if place.numel < dense_below]
        self._main = make(flat, not self._large)
        self._small = small if self._large else []
        numel = sum(entries.stop - entries.start for entries in self._small)
        self._side = make(flat.new_empty(numel), True) if self._small else None
        self._side_flat: Tensor | None = None
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def begin(self, flat: Tensor, density: float) -> list[Outcome]:
        """Begin both. Collective; takes the small parameters' gradients out of `flat`."""
        outcomes = []
        if self._side is not None:
            self._side_flat = torch.cat([flat[entries] for entries in self._small])
            for entries in self._small:
                flat[entries] = 0
            outcomes.append(self._side.begin(self._side_flat, density))
        self._set_aside(flat)
        outcomes.append(self._main.begin(flat, density))
        return outcomes

    def _set_aside(self, flat: Tensor) -> None:
        """What is owed for parameters without a gradient on this rank waits; see the state."""
        residual = self._main.residual
        if residual is None:
            return
        for place in self._large:
            gradient, owed = flat[place.entries], residual[place.entries]
            if not (gradient[:PEEK].any() or gradient.any()) and owed.any():
                self._waiting.append((owed, owed.clone()))
                owed.zero_()

    def end(self, flat: Tensor, finite: bool) -> None:
        """Make `flat` the average if the step was finite, else NaN, and owe what was picked."""
        for aggregator, tensor in ((self._side, self._side_flat), (self._main, flat)):
            if aggregator is not None and tensor is not None:
                (aggregator.apply if finite else aggregator.owe)(tensor)
        if not finite:
            flat.fill_(float("nan"))
        elif self._side_flat is not None:
            sizes = [entries.stop - entries.start for entries in self._small]
            for entries, part in zip(self._small, self._side_flat.split(sizes), strict=True):
                flat[entries] = part
        for owed, waited in self._waiting:
            owed.add_(waited)
        self._waiting, self._side_flat = [], None

    def owed(self) -> dict[str, Tensor]:
        """Copies of what is owed, by name."""
        residual = self._main.residual
        if residual is None:
            return {}
        return {place.name: place.view(residual).clone() for place in self._large}

    def take_over(self, owed: dict[str, Tensor]) -> None:
        """Owe what is owed for these parameters, and remove it from `owed`."""
        residual = self._main.residual
        if residual is None:
            return
        for place in self._large:
            if place.name in owed:
                place.view(residual).copy_(owed.pop(place.name))


class Launch:
    """A bucket under way.

    Attributes:
        flat: the bucket's gradients.
        last: whether the step ends with it.
        label: of its messages.
        result: torch's future of `flat`, for DDP.
        cut, outcomes: what has begun.
    """

    def __init__(self, flat: Tensor, last: bool, label: int) -> None:
        """Nothing has begun."""
        self.flat, self.last, self.label = flat, last, label
        self.cut: Cut | None = None
        self.outcomes: list[Outcome] = []
        self._failure: BaseException | None = None
        devices: list[int | str | torch.device] = [] if flat.device.type == "cpu" else [flat.device]
        self._ready: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        # DDP, in C++, takes an exception that a future is set to for a tensor. An error of a
        # callback it raises, as a RuntimeError with the message.
        self.result = self._ready.then(self._checked)

    def _checked(self, ready: torch.futures.Future[Tensor]) -> Tensor:
        if self._failure is not None:
            raise self._failure
        return ready.value()

    def end(self, finite: bool) -> None:
        """The gradients become averages, or NaN."""
        if self.cut is not None:
            self.cut.end(self.flat, finite)

    def complete(self, failure: BaseException | None) -> None:
        """DDP can go on."""
        self._failure = failure
        self._ready.set_result(self.flat)


def in_short(places: Sequence[Place]) -> str:
    """Which parameters these are, for messages."""
    names = [place.name for place in places]
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Those of its gradient in DDP's bucket: its own if they leave no gaps, else the usual ones.

    `GradBucket.gradients()` has the usual ones in any case, and so mixes up channels-last weights.
    """
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return torch.empty(parameter.shape, device="meta").stride()
            expected *= size
    return parameter.stride()
