"""A sleep that ends early when MPI's sockets have news.

MPI has no call that waits without spinning. But a library that talks TCP watches its sockets with
an epoll descriptor of Linux, and whoever polls that descriptor is woken by the same news. So a wait
can sleep between two polls as if it were in the kernel's own receive. It stays a sleep, of the
length that the back-off says, where there is no such descriptor (shared memory, InfiniBand, other
systems), or where the news is not for this thread.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")
LARGEST_DESCRIPTOR = 1023  # select takes no more, and poll no times below a millisecond
# A long message rings with each of its parts; so many rings in one wait mean that nobody listens.
MOST_FALSE_ALARMS = 10_000


def watching_descriptors() -> frozenset[int]:
    """The epoll descriptors of this process; none where the system has no such thing."""
    found = []
    try:
        names = [path.name for path in DESCRIPTORS.iterdir()]
    except OSError:
        return frozenset()
    for name in names:
        try:
            if "eventpoll" in os.readlink(DESCRIPTORS / name):
                found.append(int(name))
        except OSError:  # the listing's own descriptor is closed by now
            continue
    return frozenset(found)


class Doorbell:
    """What wakes the waits of one process."""

    def __init__(self, descriptors: Iterable[int] = ()) -> None:
        """`descriptors`: what MPI has opened; those that watch others of them are left out."""
        mine = set(descriptors)
        self._descriptors = [
            descriptor
            for descriptor in sorted(mine)
            if descriptor <= LARGEST_DESCRIPTOR and not _watched(descriptor) & mine
        ]
        self._false_alarms = 0

    @property
    def connected(self) -> bool:
        """Whether anything can ring."""
        return bool(self._descriptors)

    def sleep(self, seconds: float) -> None:
        """Sleep so long, or until it rings."""
        if not self._descriptors:
            time.sleep(seconds)
            return
        try:
            ringing, _, _ = select.select(self._descriptors, [], [], seconds)
        except (OSError, ValueError):  # closed behind our back
            self._descriptors = []
            return
        self._false_alarms = self._false_alarms + 1 if ringing else 0
        if self._false_alarms > MOST_FALSE_ALARMS:
            self._descriptors = []

    def answered(self) -> None:
        """A wait has ended, so it did not ring in vain."""
        self._false_alarms = 0


def _watched(descriptor: int) -> set[int]:
    """The descriptors that an epoll descriptor watches."""
    try:
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
