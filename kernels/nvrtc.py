"""The real driver: kernels compiled by NVRTC, loaded and started through CuPy.

1. `driver_for(device)` makes one driver a device, or says once what is missing and returns None.
2. The first launch of a source gets its code (see `binaries`) and loads all its kernels, once a
   process and device.
3. A launch hands addresses and scalars to the kernel, on torch's current stream, and returns.
"""

import logging
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddl.kernels import binaries, prebuild, sources
from ddl.kernels.compiler import compiler, kernels_in
from ddl.kernels.launch import THREADS, Argument
from ddl.kernels.sources import source, source_directory

__all__ = ["CupyDriver", "driver_for", "source", "source_directory"]

log = logging.getLogger("ddl.kernels")

_NULL = np.uint64(0)


class CupyDriver:
    """Starts kernels on one GPU; see `ddl.kernels.launch.Driver`. Any thread may use it.

    Attributes:
        device: the GPU.
        multiprocessors: how many it has.
    """

    def __init__(self, index: int) -> None:
        """Serve GPU number `index`; compiles nothing yet.

        Raises:
            ImportError: CuPy is missing.
            RuntimeError: CuPy cannot use the GPU, or NVRTC is missing.
        """
        import cupy

        self.device = torch.device("cuda", index)
        self.multiprocessors: int = torch.cuda.get_device_properties(index).multi_processor_count
        self._cupy = cupy
        self._capability: tuple[int, int] = torch.cuda.get_device_capability(index)
        self._guard = threading.Lock()
        self._sources: dict[str, dict[str, Callable[..., None]]] = {}
        with self._gpu():  # fails here rather than in the first step
            pass
        if prebuild.directory() is None:
            compiler()

    def prepare(self, *names: str) -> None:
        """Compile and load sources now, all of them if none is named.

        Call it before the capture of a CUDA graph, during which old drivers cannot load code.

        Raises:
            RuntimeError: a source does not compile or load.
        """
        for name in names or sources.names(".cu"):
            self._kernels(name)

    def launch(self, source: str, kernel: str, blocks: int, arguments: Sequence[Argument]) -> None:
        """See `ddl.kernels.launch.Driver.launch`.

        Raises:
            FileNotFoundError: there is no such source.
            RuntimeError: the source does not compile or load.
            ValueError: there is no such kernel, or a tensor is on another device.
            TypeError: an argument is neither a tensor, a NumPy scalar nor None.
        """
        kernels = self._sources.get(source) or self._kernels(source)
        if kernel not in kernels:
            raise ValueError(f"{source} has no kernel {kernel!r}; it has {', '.join(kernels)}")
        values = tuple(
            self._value(kernel, place, argument) for place, argument in enumerate(arguments)
        )
        stream = torch.cuda.current_stream(self.device).cuda_stream
        # Torch's guard outside: CuPy's own may leave another GPU current than it found.
        with torch.cuda.device(self.device), self._gpu(), self._stream(stream):
            kernels[kernel]((blocks,), (THREADS,), values)

    def _value(self, kernel: str, place: int, argument: Argument) -> np.generic:
        """Turn an argument into the scalar that CuPy passes on."""
        if isinstance(argument, Tensor):
            if argument.device != self.device:
                raise ValueError(
                    f"argument {place} of {kernel} must be on {self.device}, got a tensor on "
                    f"{argument.device}; move it with .to()"
                )
            return np.uint64(argument.data_ptr())
        if argument is None:
            return _NULL  # CuPy would take None for the lack of an argument, and crash
        if isinstance(argument, np.generic):
            return argument
        raise TypeError(
            f"argument {place} of {kernel} must be a tensor, a NumPy scalar or None, got "
            f"{type(argument).__name__}; pass the parameter's own type, such as numpy.int64"
        )

    def _gpu(self) -> Any:
        """Make the GPU current for CuPy."""
        return self._cupy.cuda.Device(self.device.index)

    def _stream(self, pointer: int) -> Any:
        """Wrap torch's stream for CuPy, which from version 14 on wants it its own way."""
        streams = self._cupy.cuda
        if hasattr(streams.Stream, "from_external"):
            return streams.Stream.from_external(_Pointer(pointer))
        return streams.ExternalStream(pointer, self.device.index)

    def _kernels(self, name: str) -> dict[str, Callable[..., None]]:
        """Return the kernels of a source, compiled and loaded at most once."""
        with self._guard:
            if name not in self._sources:
                self._sources[name] = self._load(name)
            return self._sources[name]

    def _load(self, name: str) -> dict[str, Callable[..., None]]:
        code = binaries.code_for(name, self._capability)
        with tempfile.TemporaryDirectory(prefix="ddl-") as folder:
            path = Path(folder, name).with_suffix(".bin")
            path.write_bytes(code)
            try:
                with torch.cuda.device(self.device), self._gpu():
                    module = self._cupy.RawModule(path=str(path))
                    # Here, not later, CuPy reads the file.
                    return {kernel: module.get_function(kernel) for kernel in kernels_in(code)}
            except Exception as error:  # CuPy's errors have no common base
                hint = ""
                if torch.cuda.is_current_stream_capturing():
                    hint = "; a CUDA graph is being captured: call prepare() before that"
                raise RuntimeError(
                    f"the code of {name} cannot be loaded on {self.device} ({error}){hint}"
                ) from error


class _Pointer:
    """A stream as CUDA's stream protocol wants it."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._pointer)  # version of the protocol, address


_drivers: dict[int, CupyDriver | None] = {}
_making = threading.Lock()


def driver_for(device: torch.device | str) -> CupyDriver | None:
    """Return the driver of a GPU, the same one each time; None where it cannot be had.

    For a GPU without a usable CuPy the reason and the cure are logged once, at WARNING.

    Args:
        device: a device of any type; "cuda" is the current one.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    with _making:
        if index not in _drivers:
            _drivers[index] = _make(index)
        return _drivers[index]


def _make(index: int) -> CupyDriver | None:
    version = torch.version.cuda
    try:
        if version is None:
            raise RuntimeError("this torch is not built for CUDA")
        return CupyDriver(index)
    except ImportError as error:
        major = (version or "13").partition(".")[0]
        problem = f"CuPy cannot be imported ({error}); pip install 'ddl[cuda{major}]' brings it"
    except Exception as error:  # whatever a broken CuPy raises: torch's operations still work
        problem = f"{type(error).__name__}: {error}"
    if None not in _drivers.values():
        log.warning(
            "the CUDA kernels cannot be used on cuda:%d; torch's operations take their place, many "
            "times slower. %s",
            index,
            problem,
        )
    return None
