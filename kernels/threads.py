"""Contiguous parts of a vector, run by a few threads while the GIL is released.

Numba's own `parallel=True` is not used: its portable threading layer aborts the process when
several Python threads enter it at once, which is what many ranks in one process do.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

INLINE_NUMEL = 1 << 18  # below this, waking a thread costs more than it saves


class Workers:
    """A pool of helper threads that is created when first needed, and anew after a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: int | None = None
        self._pool: ThreadPoolExecutor | None = None

    @property
    def count(self) -> int:
        """Number of threads one operation uses, the calling one included."""
        return self._wanted if self._wanted is not None else torch.get_num_threads()

    @count.setter
    def count(self, value: int) -> None:
        with self._lock:
            self._wanted = value
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)

    def forget(self) -> None:
        """Drop the pool without waiting: its threads do not exist in a forked child."""
        self._lock = threading.Lock()
        self._pool = None

    def run(self, task: Callable[[int], None], parts: int) -> None:
        """Call task(0) .. task(parts - 1), the first on the calling thread; wait for all.

        Tasks must not call `run` themselves.
        """
        futures = [self._submit(task, part) for part in range(1, parts)]
        try:
            task(0)
        finally:
            for part, future in enumerate(futures, start=1):
                if future is None:
                    task(part)
                else:
                    future.result()

    def _submit(self, task: Callable[[int], None], part: int) -> "Future[None] | None":
        try:
            with self._lock:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(
                        max(1, self.count - 1), thread_name_prefix="ddl-kernels"
                    )
                return self._pool.submit(task, part)
        except RuntimeError:  # the interpreter is shutting down, or no thread can be had
            return None


def split(numel: int, granule: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, numel) into contiguous parts whose inner bounds are multiples of granule."""
    if numel < INLINE_NUMEL:
        parts = 1
    granules = -(-numel // granule)
    parts = max(1, min(parts, granules))
    bounds = [granules * part // parts * granule for part in range(parts)] + [numel]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


workers = Workers()
os.register_at_fork(after_in_child=workers.forget)
