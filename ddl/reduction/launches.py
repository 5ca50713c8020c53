"""Buckets under way: the outcome to come, and whether somebody changes the gradient meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple

import torch
from torch import Tensor

from ddl.aggregation.aggregator import Outcome
from ddl.errors import DDLError, DeadlineError, GradientError
from ddl.reduction.buckets import Bucket

logger = logging.getLogger(__name__)

# The worker's own waits have the same deadline and know more; let their error come first.
GRACE_SECONDS = 10.0
CHANGE_CURE = (
    "call optimizer.synchronize() between backward() and any change of gradients, such as "
    "clipping; a GradScaler goes to DistributedOptimizer as scaler="
)
GLANCE = 32  # entries that nearly always tell whether a gradient was changed


class Patience(NamedTuple):
    """How long to wait."""

    report: float  # seconds between two lines in the log
    timeout: float  # of the worker's own waits, in seconds
    waiting: Callable[[], str]  # whom the worker waits for, in words


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

    def outcome(self, bucket: Bucket, where: str, patience: Patience) -> Outcome:
        """Wait for it.

        Args:
            bucket: whose gradient it is.
            where: step, bucket and rank, for messages.
            patience: see there.

        Raises:
            GradientError: the gradient was changed meanwhile.
            DDLError: the aggregation failed, or another rank did not take part in time.
        """
        begin = time.monotonic()
        while not wait([self.future], timeout=patience.report).done:
            waited = time.monotonic() - begin
            whom = patience.waiting()
            logger.warning("%s: has waited %.0f s %s", where, waited, whom)
            if waited > patience.timeout + GRACE_SECONDS:
                raise DeadlineError(f"{where}: nothing after {waited:.0f} s {whom}")
        replaced = bucket.first_detached()
        if replaced is not None or self.shows_change(bucket.flat):
            what = f"of parameter {replaced!r}, " if replaced else ""
            raise GradientError(
                f"{where}: a gradient {what}was changed while it was under way, expected it "
                f"untouched; {CHANGE_CURE}"
            )
        try:
            return self.future.result()
        except DDLError as error:
            raise type(error)(f"{where}: {error}") from error
        except Exception as error:
            raise DDLError(f"{where}: {type(error).__name__}: {error}") from error


def glance(flat: Tensor) -> Tensor:
    """The bits of some entries: torch does not count changes by `grad.data` or by a GradScaler."""
    some = flat.detach()[:: max(1, flat.numel() // GLANCE)].clone()
    return some.view(torch.int16 if flat.element_size() == 2 else torch.int32)
