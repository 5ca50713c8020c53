"""A background thread that runs tasks one after the other, in the order given."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Tasks = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]

# How long queued tasks may take to finish before they are cancelled, and to end after that.
PATIENCE_SECONDS = 5.0


class Worker:
    """Runs tasks in order on one thread, which starts with the first task.

    After a task has failed the later ones are not run: they fail with the same error, since what
    they would send no longer matches what the other ranks expect. The thread ends with `close`,
    with the object, or with the process, whichever comes first.
    """

    def __init__(self, name: str, cancel: Callable[[], None]) -> None:
        """Wait for the first task.

        Args:
            name: of the thread.
            cancel: ends the wait that a task may be in; must not refer to this object.
        """
        self._name = name
        self._cancel = cancel
        self._tasks: Tasks = queue.SimpleQueue()
        self._stop: Callable[[], Any] | None = None

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task; never blocks."""
        if self._stop is None:
            # Neither the thread nor the finalizer may hold on to this object, or it would never be
            # collected. A thread still running when Python ends could bring the process down.
            thread = threading.Thread(
                target=_serve, args=(self._tasks,), name=self._name, daemon=True
            )
            thread.start()
            self._stop = weakref.finalize(self, _stop, self._tasks, thread, self._cancel)
        future: Future[T] = Future()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """Finish what is queued, or cancel it if that takes too long, then end the thread."""
        if self._stop is not None:
            self._stop()


def _serve(tasks: Tasks) -> None:
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
        del entry, future, task  # a waiting thread must not keep the last task's tensors


def _stop(tasks: Tasks, thread: threading.Thread, cancel: Callable[[], None]) -> None:
    tasks.put(None)
    if thread is threading.current_thread():  # collected from within a task
        return
    thread.join(PATIENCE_SECONDS)
    if thread.is_alive():
        cancel()
        thread.join(PATIENCE_SECONDS)
