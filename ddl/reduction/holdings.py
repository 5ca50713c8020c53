"""What a reducer holds: buckets, what aggregates each, and the hooks on their parameters."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from ddl.aggregation.aggregator import Aggregator
from ddl.reduction.buckets import Bucket, NamedParameter
from ddl.reduction.hooks import Listener, listen
from ddl.reduction.planning import carry_over


class Holdings:
    """Buckets in the order in which they are launched.

    Attributes:
        buckets: all of them.
        aggregators: of each.
    """

    def __init__(self, make_aggregator: Callable[[Bucket], Aggregator]) -> None:
        """No bucket."""
        self.buckets: list[Bucket] = []
        self.aggregators: list[Aggregator] = []
        self._make_aggregator = make_aggregator
        self._hooks: dict[int, Any] = {}  # by id of the parameter, which its bucket keeps alive

    def append(self, bucket: Bucket, listener: Listener) -> None:
        """One bucket more, of whose gradients `listener` is told; it is not kept alive."""
        self.buckets.append(bucket)
        self.aggregators.append(self._make_aggregator(bucket))
        for place, member in enumerate(bucket.members):
            handle = listen(listener, member.parameter, bucket.index, place)
            self._hooks[id(member.parameter)] = handle

    def regroup(self, groups: Sequence[Sequence[NamedParameter]], listener: Listener) -> None:
        """Move all parameters, with what is owed for them, into other buckets; between steps.

        Args:
            groups: the members of each, in the order of launches; of one kind, as before.
            listener: see `append`.
        """
        before = list(self.owing)
        self.let_go()
        self.buckets, self.aggregators = [], []
        for group in groups:
            self.append(Bucket(len(self.buckets), group, dense=before[0][0].dense), listener)
        carry_over(before, list(self.owing))

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is in a bucket."""
        return id(parameter) in self._hooks

    @property
    def owing(self) -> Iterable[tuple[Bucket, Aggregator]]:
        """Every bucket and its aggregator."""
        return zip(self.buckets, self.aggregators, strict=True)

    @property
    def mark(self) -> int:
        """A number that depends on which parameters are frozen, the same in every process."""
        members = [member for bucket in self.buckets for member in bucket.members]
        return zlib.crc32(bytes(member.parameter.requires_grad for member in members))

    def stop(self, index: int, place: int) -> None:
        """A parameter must not move while it is frozen: forget what is owed for it."""
        bucket, owing = self.buckets[index], self.aggregators[index]
        for kept in (owing.residual, owing.velocity):
            if kept is not None:
                bucket.part(kept, place, owing.first).zero_()

    def let_go(self) -> None:
        """Hear of no more gradients."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
