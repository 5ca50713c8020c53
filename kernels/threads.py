"""Contiguous pieces of a vector, worked on by a few threads while the GIL is released.

Numba's own `parallel=True` is not used: its portable threading layer aborts the process when
several Python threads enter it at once, which is what many ranks in one process do.
"""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

INLINE_NUMEL = 1 << 20  # below this, waking a thread costs more than it saves
PIECE_NUMEL = 1 << 18  # about 0.1 ms of work; a thread takes one after the other


class Workers:
    """A pool of helper threads that is created when first needed, and anew after a fork."""

    def __init__(self) -> None:
        """Start no thread yet."""
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

        The calling thread then takes over what no helper has begun: with many callers at once
        the few helpers are a bonus, not a queue to wait in. Tasks must not call `run` themselves.
        """
        futures = [self._submit(task, part) for part in range(1, parts)]
        try:
            task(0)
        finally:
            for part, future in enumerate(futures, start=1):
                if future is None or future.cancel():
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


def split(numel: int, granule: int, threads: int) -> list[tuple[int, int]]:
    """Cut [0, numel) into contiguous pieces whose inner bounds are multiples of granule.

    Several to a thread, so that a thread that starts late, or shares its core, takes fewer.
    """
    pieces = 1
    granules = -(-numel // granule)
    if numel >= INLINE_NUMEL and threads > 1:
        pieces = max(threads, min(16 * threads, numel // PIECE_NUMEL))
    pieces = max(1, min(pieces, granules))
    bounds = [granules * piece // pieces * granule for piece in range(pieces)] + [numel]
    return list(itertools.pairwise(bounds))


workers = Workers()
os.register_at_fork(after_in_child=workers.forget)
