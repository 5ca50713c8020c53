"""A driver that runs the CUDA sources on the CPU, made to find what a GPU forgives.

It takes CPU tensors and implements the Driver protocol of ddl.kernels.launch. Every launch runs
its threads and blocks in another order. In the checked mode (the default) each access to memory is
looked at:

- outside of every argument and of shared memory, also by a tensor's neighbours in its storage;
- racing with another thread's or block's, whatever the order happened to be;
- undefined in C++: misaligned vectors, shifts, overflows, bounds of arrays;
- writes stay hidden from other blocks until a fence, in some of the launches.

Any finding, and every deadlock, raises EmulatorError with one line that says where.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from emulator import build, sanitized
from torch import Tensor

from ddl.kernels.launch import THREADS
from ddl.kernels.sources import source_directory as installed_sources

STEPS = 1 << 30  # accesses to memory that a launch may make
MESSAGE_BYTES = 4096
_VALUE, _IN_REGION, _ADDRESS = range(3)
_WEAK_MEMORY, _FIND_RACES, _HOOKED = 1, 2, 4
_KINDS = {"f": "floating point", "i": "signed", "u": "unsigned", "b": "bool"}


def missing() -> str | None:
    """Why tests that need the emulator may be passed over here: a reason, or None.

    In continuous integration (CI is set) nothing may, so that a lack shows.
    """
    if build.compiler() is None and not os.environ.get("CI"):
        return "g++ was not found; the emulator compiles the CUDA sources with it"
    return None


class EmulatorError(RuntimeError):
    """A kernel did what it must not do on a GPU, or was called in a wrong way."""


class Launch(NamedTuple):
    """A launch that was made."""

    source: str
    kernel: str
    blocks: int


class EmulatedDriver:
    """Starts kernels on the CPU.

    Attributes:
        multiprocessors: the number that launch wrappers see.
        launches: what was launched, in order.
    """

    def __init__(
        self,
        seed: int = 0,
        multiprocessors: int = 2,
        weak_memory: bool = True,
        sanitize: bool = False,
        source_directory: Path | str | None = None,
        overrides: Mapping[str, str] | None = None,
        races: bool = True,
        guard: bool = True,
        flags: Sequence[str] = (),
    ) -> None:
        """Compile nothing yet.

        Args:
            seed: of every order; each launch draws another one from it.
            multiprocessors: see the class.
            weak_memory: hide a block's writes from other blocks until a fence.
            sanitize: compile with AddressSanitizer and UndefinedBehaviorSanitizer instead; the
                process must have been started by `emulator.sanitized`. No weak memory, no races.
            source_directory: of the sources; those of ddl unless given.
            overrides: texts that replace source files, by name.
            races: look for races.
            guard: give kernels copies of the arguments with guards around them. Without, only
                where neither weak_memory nor races is wanted, they get the tensors themselves.
            flags: more flags for the compiler.

        Raises:
            ValueError: guard is False while weak_memory, races or sanitize is True.
        """
        if not guard and (weak_memory or races or sanitize):
            raise ValueError(
                "guard=False needs weak_memory=False, races=False and sanitize=False: they look "
                "at the copies"
            )
        self.multiprocessors = multiprocessors
        self.launches: list[Launch] = []
        self.seed = seed
        self._folder = Path(source_directory or installed_sources())
        self._overrides = dict(overrides or {})
        self._extra = tuple(flags)
        self._guard = guard
        checked = (weak_memory or races) and not sanitize
        self._variant = "sanitized" if sanitize else "checked" if checked else "plain"
        self._flags = (_HOOKED | _WEAK_MEMORY * weak_memory | _FIND_RACES * races) if checked else 0
        self._libraries: dict[str, build.Library] = {}
        self._counter = itertools.count()

    def library(self, source: str) -> build.Library:
        """The compiled source.

        Raises:
            RuntimeError: it does not compile; the message has the compiler's log.
        """
        found = self._libraries.get(source)
        if found is None:
            if self._variant == "sanitized" and not sanitized.is_running():
                raise RuntimeError(
                    "sanitize=True in a process without sanitizers; start it with "
                    "emulator.sanitized.run"
                )
            found = build.library(self._folder, source, self._variant, self._overrides, self._extra)
            self._libraries[source] = found
        return found

    def launch(
        self,
        source: str,
        kernel: str,
        blocks: int,
        arguments: Sequence[Any],
        *,
        threads: int = THREADS,
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel to its end; see the Driver protocol.

        Args:
            source: file in csrc.
            kernel: a kernel in it.
            blocks: number of blocks.
            arguments: a tensor, None or a numpy scalar for each parameter.
            threads: of a block, at most 1024.
            shared_bytes: dynamic shared memory.

        Raises:
            EmulatorError: wrong arguments, or the kernel did something wrong.
            RuntimeError: the source does not compile.
        """
        library = self.library(source)
        found = library.kernels.get(kernel)
        where = f"{source}, kernel {kernel}"
        if found is None:
            raise EmulatorError(f"{where}: not found; {source} has {', '.join(library.kernels)}")
        if not (1 <= blocks < 2**31 and 1 <= threads <= 1024):
            raise EmulatorError(f"{where}: cannot start {blocks} blocks of {threads} threads")
        self.launches.append(Launch(source, kernel, blocks))
        check_arguments(where, found.parameters, arguments)
        seed = (self.seed * 0x9E3779B97F4A7C15 + next(self._counter)) & (2**64 - 1)
        request = array(
            "Q",
            (
                found.number,
                blocks,
                threads,
                seed,
                shared_bytes,
                self._flags,
                STEPS,
                len(arguments),
            ),
        )
        if self._guard:
            _append_copied(request, found.parameters, arguments)
        else:
            _append_direct(request, arguments)
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        culprit = ctypes.c_uint64()
        address, _ = request.buffer_info()
        if library.launch(address, message, MESSAGE_BYTES, ctypes.byref(culprit)) == 0:
            return
        text = message.value.decode(errors="replace")
        names = found.parameters
        text = re.sub(
            r"argument \{(\d+)\}",
            lambda match: f"argument {int(match[1]) + 1} ({names[int(match[1])].name})",
            text,
        )
        line = _source_line(library.path, culprit.value)
        raise EmulatorError(f"{source}, {text}{line}")


def _scalar_bits(value: np.generic) -> int:
    return int.from_bytes(value.tobytes(), "little")


def _append_direct(request: array[int], arguments: Sequence[Any]) -> None:
    request.append(0)
    for value in arguments:
        if isinstance(value, Tensor):
            request.extend((_ADDRESS, value.data_ptr(), 0))
        else:
            request.extend((_VALUE, 0 if value is None else _scalar_bits(value), 0))


def _append_copied(
    request: array[int], parameters: Sequence[build.Parameter], arguments: Sequence[Any]
) -> None:
    """Say which memory the tensors cover: overlapping ones share a region, others have their own.

    So a kernel that leaves a view for the rest of its storage leaves the region as well.
    """
    spans = sorted(
        (value.data_ptr(), value.data_ptr() + value.numel() * value.element_size(), place)
        for place, value in enumerate(arguments)
        if isinstance(value, Tensor)
    )
    regions: list[list[int]] = []  # begin, end, first argument, copy back
    region_of: dict[int, int] = {}
    for begin, end, place in spans:
        if not regions or begin >= regions[-1][1] or begin == end:
            regions.append([begin, end, place, 0])
        region = regions[-1]
        region[1] = max(region[1], end)
        region[2] = min(region[2], place)
        region[3] |= not parameters[place].target_const
        region_of[place] = len(regions) - 1
    request.append(len(regions))
    for place, value in enumerate(arguments):
        if isinstance(value, Tensor):
            number = region_of[place]
            request.extend((_IN_REGION, number, value.data_ptr() - regions[number][0]))
        else:
            request.extend((_VALUE, 0 if value is None else _scalar_bits(value), 0))
    for begin, end, place, copy_back in regions:
        request.extend((begin, end - begin, place, copy_back))


def check_arguments(
    where: str, parameters: Sequence[build.Parameter], arguments: Sequence[Any]
) -> None:
    """Compare arguments with a kernel's signature.

    Raises:
        EmulatorError: they do not fit.
    """
    if len(arguments) != len(parameters):
        names = ", ".join(parameter.name for parameter in parameters)
        raise EmulatorError(
            f"{where}: got {len(arguments)} arguments, expected {len(parameters)}: {names}"
        )
    for number, (parameter, value) in enumerate(zip(parameters, arguments, strict=True), 1):
        wrong = _mismatch(parameter, value)
        if wrong:
            raise EmulatorError(f"{where}: argument {number} ({parameter.name}): {wrong}")


def _mismatch(parameter: build.Parameter, value: Any) -> str:
    if parameter.kind == "p":
        if value is None:
            return ""
        if not isinstance(value, Tensor):
            return f"got {type(value).__name__}, expected a tensor or None for a pointer"
        if value.device.type != "cpu":
            return f"got a tensor on {value.device}, expected one on the CPU"
        if not value.is_contiguous():
            return "got a tensor that is not contiguous; a kernel gets its address only"
        size, wanted = value.element_size(), parameter.target_bytes
        # Bytes may stand for anything, and a structure is built from many elements.
        if parameter.target_kind in "fiub" and size != wanted and size != 1:
            return f"got {value.dtype} of {size} bytes, expected a pointer to {wanted} bytes each"
        if parameter.target_kind == "f" and size == wanted and not value.is_floating_point():
            return f"got {value.dtype}, expected floating point of {wanted} bytes"
        return ""
    expected = f"expected a numpy scalar, {_KINDS.get(parameter.kind, 'structure')} of "
    expected += f"{parameter.bytes} bytes"
    if not isinstance(value, np.generic):
        return f"got {type(value).__name__}, {expected}"
    if value.dtype.kind != parameter.kind or value.dtype.itemsize != parameter.bytes:
        return f"got numpy.{value.dtype}, {expected}"
    return ""


def _source_line(library: Path, offset: int) -> str:
    """Where in the source an address lies, as " at file:line", through the functions it is in."""
    tool = shutil.which("addr2line")
    if offset == 0 or tool is None:
        return ""
    command = [tool, "-i", "-e", str(library), hex(offset - 1)]
    result = subprocess.run(command, capture_output=True, text=True)
    places = [line.rpartition("/")[2].split(" ")[0] for line in result.stdout.splitlines()]
    places = [p for p in places if re.fullmatch(r"[\w.]+\.cuh?:\d+", p)]
    return f" at {', called at '.join(places)}" if places else ""
