"""A background thread that runs tasks one after the other, in the order given."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """Runs tasks in order on one thread, which starts with the first task.

    After a task has failed the later ones are not run: they fail with the same error, since what
    they would send no longer matches what the other ranks expect.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._finalizer: Any = None

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task; never blocks."""
        if self._thread is None:
            # The thread must not hold on to this object, or it would never be collected.
            self._thread = threading.Thread(
                target=_serve, args=(self._tasks,), name=self._name, daemon=True
            )
            self._thread.start()
            self._finalizer = weakref.finalize(self, self._tasks.put, None)
        future: Future[T] = Future()
        self._tasks.put((future, task))
        return future

    def close(self, timeout: float) -> None:
        """Finish what is queued, then end the thread; wait at most `timeout` seconds for it."""
        if self._thread is not None:
            self._finalizer()
            self._thread.join(timeout)
            self._thread = None


def _serve(tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    failure: BaseException | None = None
    while (entry := tasks.get()) is not None:
        future, task = entry
        if failure is None:
            try:
                future.set_result(task())
            except BaseException as error:  # carried over to whoever waits for the result
                failure = error
        if failure is not None:
            future.set_exception(failure)
