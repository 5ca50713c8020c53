"""Which communicator a thread of the program works with when none is named.

A process has one, set by `ddl.init`. A thread that plays a rank of its own (ddl.comm.threads)
overrides it for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ddl.comm.base import Communicator

_of_thread: ContextVar[Communicator | None] = ContextVar("ddl_communicator", default=None)
_of_process: list[Communicator] = []  # at most one


def current() -> Communicator | None:
    """The communicator of this thread, else of this process, else None."""
    return _of_thread.get() or (_of_process[0] if _of_process else None)


@contextmanager
def use(comm: Communicator) -> Iterator[None]:
    """Make `comm` this thread's communicator within the block."""
    token = _of_thread.set(comm)
    try:
        yield
    finally:
        _of_thread.reset(token)


def set_process_default(comm: Communicator | None) -> None:
    """Make `comm` the process's communicator, or forget it."""
    _of_process[:] = [] if comm is None else [comm]
