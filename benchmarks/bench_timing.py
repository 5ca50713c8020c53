"""How long a call takes: on the host's clock, or between two events on the device.

On a CUDA device, before each timed call,

1. the caches are overwritten, so that short vectors come from memory as they would in a step;
2. the device is put to sleep until the host has queued the whole call. So what is timed is the work
   on the device and not the time that Python takes to ask for it, as long as the call itself does
   not wait: a rival that does is timed with its waiting.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

Timer = Callable[[Callable[[], Any]], tuple[float, Any]]  # of a call: milliseconds and its result

PAUSE_SECONDS = 0.01  # libgomp's threads spin for about 4 ms before they sleep
CACHE_BYTES = 1 << 28  # more than any GPU's L2 cache
SLEEP_CYCLES = 4_000_000  # about two milliseconds; a selection's launches take a few tenths


def timer(device: str) -> Timer:
    """Return the function that times calls on a device."""
    return _on_host if device == "cpu" else _OnDevice(device)


def _on_host(call: Callable[[], Any]) -> tuple[float, Any]:
    if torch.get_num_threads() > 1:
        time.sleep(PAUSE_SECONDS)
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e3, result


class _OnDevice:
    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=self._device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, call: Callable[[], Any]) -> tuple[float, Any]:
        with torch.cuda.device(self._device):
            self._cache.zero_()
            torch.cuda.synchronize()
            torch.cuda._sleep(SLEEP_CYCLES)
            self._start.record()
            result = call()
            self._end.record()
            self._end.synchronize()
        return self._start.elapsed_time(self._end), result
