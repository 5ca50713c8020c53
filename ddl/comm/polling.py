"""Waiting for other ranks: poll with a back-off, to a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ddl.errors import CommunicationError, DeadlineError

# A wait first yields its time slice, since most messages of a running collective are about to
# come; then it sleeps, at first shortly, then ever longer. Slow to wake costs at most the cap per
# message; never to sleep costs a core.
YIELDS = 20
SHORT_SLEEPS = 20
FIRST_SLEEP = 20e-6
LONGEST_SLEEP = 1e-3

STALLED = "is a rank stalled, or running another script?"

# Linux makes a sleep of 0 s one of 50 us, which is no way to give others their turn.
_yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


def wait(
    poll: Callable[[], Any],
    what: str,
    timeout: float,
    *,
    cancelled: Callable[[], bool],
    longest_sleep: float = LONGEST_SLEEP,
    first_sleep: float = FIRST_SLEEP,
    sleep: Callable[[float], object] = time.sleep,
    suspicion: Callable[[], str] = lambda: STALLED,
) -> Any:
    """Poll until something else than None comes back, and return that.

    Args:
        poll: asks once; never blocks.
        what: who waits for what, to begin an error's message with.
        timeout: seconds.
        cancelled: whether another thread has ended the wait.
        longest_sleep: seconds between two polls at most.
        first_sleep: seconds between two polls at first.
        sleep: sleeps so many seconds; may end early, if there is news.
        suspicion: who or what holds up the wait, to end an error's message with.

    Raises:
        DeadlineError: nothing within `timeout` seconds.
        CommunicationError: cancelled.
    """
    deadline = time.monotonic() + timeout
    polls = 0
    pause = first_sleep
    while True:
        result = poll()
        if result is not None:
            return result
        polls += 1
        if polls <= YIELDS:
            _yield_core()
            continue
        if time.monotonic() > deadline:
            raise DeadlineError(f"{what}: nothing within {timeout:g} s; {suspicion()}")
        if cancelled():
            raise CommunicationError(f"{what}: cancelled")
        sleep(pause)
        if polls > YIELDS + SHORT_SLEEPS:
            pause = min(2 * pause, longest_sleep)
