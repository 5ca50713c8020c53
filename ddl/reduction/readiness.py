"""Readiness: which gradients of a step have come, and when the first and the last one did."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ddl.errors import GradientError
from ddl.reduction.buckets import Bucket


class Readiness:
    """Backward passes counted, parameter by parameter, within one step.

    Attributes:
        first: clock (time.perf_counter) at the first gradient of the step; None before it.
        last: clock at the last parameter that became ready; the begin of the step before that.
    """

    def __init__(self, expected: int) -> None:
        """No bucket, no gradient.

        Args:
            expected: backward passes of a step.
        """
        self._expected = expected
        self._passes: list[list[int]] = []
        self._unready: list[int] = []
        self.first: float | None = None
        self.last = time.perf_counter()

    def start(self, buckets: Sequence[Bucket]) -> None:
        """No gradient of these buckets has come yet."""
        self._passes = [[0] * len(bucket.members) for bucket in buckets]
        self._unready = [len(bucket.members) for bucket in buckets]
        self.first = None
        self.last = time.perf_counter()

    def add(self, came: Sequence[bool]) -> None:
        """One bucket more, behind the present ones.

        Args:
            came: of its parameters, which have a gradient of this step already.
        """
        self._passes.append([int(one) for one in came])
        self._unready.append(len(came))

    def tick(self, index: int, place: int) -> bool:
        """A gradient has come; returns False if it is one too many.

        Args:
            index: of the bucket.
            place: of the parameter in it.
        """
        passes = self._passes[index]
        if passes[place] == self._expected:
            return False
        passes[place] += 1
        if self.first is None:
            self.first = time.perf_counter()
        if passes[place] == self._expected:
            self._unready[index] -= 1
            self.last = time.perf_counter()
        return True

    def stand_in(self, bucket: Bucket) -> list[int]:
        """Count what has not come as come; returns the places of those parameters."""
        passes = self._passes[bucket.index]
        places = [place for place, count in enumerate(passes) if not count]
        for place in places:
            passes[place] = int(bucket.members[place].parameter.requires_grad)
        return places

    def is_ready(self, index: int) -> bool:
        """Whether all gradients of a bucket have come."""
        return not self._unready[index]

    @property
    def all_ready(self) -> bool:
        """Whether all gradients of all buckets have come."""
        return not any(self._unready)

    @property
    def idle(self) -> bool:
        """Whether no gradient has come."""
        return not any(any(passes) for passes in self._passes)

    def check_complete(self, buckets: Sequence[Bucket], where: str) -> None:
        """Refuse a step in which a parameter got no gradient.

        Args:
            buckets: all of them.
            where: step and rank, for the message.

        Raises:
            GradientError: names the first such parameter.
        """
        missing = [
            member.name
            for bucket, passes in zip(buckets, self._passes, strict=True)
            for member, count in zip(bucket.members, passes, strict=True)
            if count == 0 and member.parameter.requires_grad
        ]
        if missing and self.idle:
            raise GradientError(
                f"no parameter got a gradient in {where}, expected a backward() before each "
                'optimizer.step(); or pass unused_parameters="zero"'
            )
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise GradientError(
                f"parameter {missing[0]!r}{more} got no gradient in {where}, expected one from "
                "every backward pass; set its requires_grad to False, or pass "
                'unused_parameters="zero"'
            )
