"""NVRTC, which compiles a CUDA source for one architecture; it needs neither a GPU nor a toolkit.

Torch's CUDA builds bring the library. It is called through ctypes rather than by handing the source
to CuPy, because CuPy adds -ftz=true to every compilation: that flushes denormals to zero, and the
kernels would no longer give the bits of the CPU.

1. `compiler()` finds the library, of torch's CUDA version where there is a choice.
2. `target` names what to compile for: the device's own architecture, or PTX of the newest older one
   for a device that this NVRTC does not know, which the driver then translates.
3. `compile` returns the code and what the compiler said. Headers are handed over as text, so that
   the result depends on nothing but the sources in the package.
"""

import ctypes
import functools
import importlib.util
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch

from ddl.kernels import sources

MAJORS = (13, 12)  # of CUDA, looked for where torch does not tell
KINDS = ("sm", "compute")  # of targets: machine code, and PTX


class Compiled(NamedTuple):
    """What came of a compilation.

    Attributes:
        code: a cubin, or PTX where the architecture was "compute_*".
        log: what the compiler said, such as warnings.
    """

    code: bytes
    log: str


class Compiler:
    """One NVRTC library.

    Attributes:
        version: such as (13, 0).
        architectures: those that it knows, such as 90 for sm_90, ascending.
    """

    def __init__(self, path: str) -> None:
        """Load the library.

        Raises:
            OSError: it cannot be loaded.
        """
        # NVRTC opens this companion by name, which the loader finds only if it is already there.
        folder = Path(path).parent
        if folder.is_absolute():
            for companion in sorted(folder.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(companion))
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = c_char_p
        major, minor, count = c_int(), c_int(), c_int()
        self._check(self._library.nvrtcVersion(byref(major), byref(minor)))
        self.version = (major.value, minor.value)
        self._check(self._library.nvrtcGetNumSupportedArchs(byref(count)))
        known = (c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(known))
        self.architectures = sorted(known)

    def __str__(self) -> str:
        """Name and version."""
        return f"NVRTC {self.version[0]}.{self.version[1]}"

    def target(self, capability: tuple[int, int]) -> str:
        """Return what to compile for, such as "sm_90", for a device of the compute capability.

        Raises:
            RuntimeError: the device is older than all that this NVRTC knows.
        """
        known = [f"{kind}_{number}" for number in self.architectures for kind in KINDS]
        found = choose(known, capability)
        if found is None:
            raise RuntimeError(
                f"{self} compiles for sm_{self.architectures[0]} and later, got a device of "
                f"compute capability {capability[0]}.{capability[1]}; install a torch built with "
                "an older CUDA"
            )
        return found

    def compile(self, name: str, target: str, extra: Sequence[str] = ()) -> Compiled:
        """Compile a source of csrc.

        Args:
            name: such as "scatter.cu".
            target: "sm_90" for code of that architecture, "compute_90" for PTX.
            extra: options on top of `sources.OPTIONS`.

        Raises:
            FileNotFoundError: there is no such source.
            RuntimeError: it does not compile; with the compiler's log.
        """
        return self.compile_text(name, sources.source(name), target, extra)

    def compile_text(
        self, name: str, text: str, target: str, extra: Sequence[str] = ()
    ) -> Compiled:
        """Compile a text, which may include the headers of csrc; see `compile`."""
        headers = {header: sources.source(header) for header in sources.names(".cuh")}
        options = [*sources.OPTIONS, f"-arch={target}", *extra]
        call = self._library
        program = c_void_p()
        self._check(
            call.nvrtcCreateProgram(
                byref(program),
                text.encode(),
                name.encode(),
                len(headers),
                _strings(headers.values()),
                _strings(headers),
            )
        )
        try:
            status = call.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._fetch("ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            if status != 0:
                raise RuntimeError(
                    f"{name} does not compile for {target} ({self}, {self._text(status)}, "
                    f"{' '.join(options)}):\n{log}"
                )
            kind = "PTX" if target.startswith("compute_") else "CUBIN"
            return Compiled(self._fetch(kind, program), log)
        finally:
            call.nvrtcDestroyProgram(byref(program))

    def _fetch(self, what: str, program: c_void_p) -> bytes:
        size = c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _text(self, status: int) -> str:
        return self._library.nvrtcGetErrorString(status).decode()

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"{self.path}: {self._text(status)}")


def choose(targets: Sequence[str], capability: tuple[int, int]) -> str | None:
    """Return the target to use on a device, None where none of them runs on it.

    Code of exactly its architecture, otherwise the newest PTX that is not newer than the device.
    """
    number = 10 * capability[0] + capability[1]
    if f"sm_{number}" in targets:
        return f"sm_{number}"
    older = [int(t.partition("_")[2]) for t in targets if t.startswith("compute_")]
    older = [architecture for architecture in older if architecture <= number]
    return f"compute_{max(older)}" if older else None


@functools.cache
def compiler() -> Compiler:
    """Return the NVRTC of this installation.

    Raises:
        RuntimeError: none is found, or none can be loaded; says where it was looked for.
    """
    tried = []
    for path in _candidates():
        try:
            return Compiler(path)
        except (OSError, AttributeError) as error:
            tried.append(f"{path}: {error}")
    raise RuntimeError(
        "NVRTC was not found; torch's CUDA builds bring it, otherwise pip install nvidia-cuda-nvrtc"
        f" (tried: {'; '.join(tried)})"
    )


def _majors() -> list[int]:
    """CUDA's major versions, torch's own first."""
    own = int(torch.version.cuda.partition(".")[0]) if torch.version.cuda else MAJORS[0]
    return [own, *(major for major in MAJORS if major != own)]


def _candidates() -> Iterator[str]:
    """Where NVRTC may be: the wheels of NVIDIA beside torch, a toolkit, the loader's path."""
    spec = importlib.util.find_spec("nvidia")  # a namespace that many wheels share
    roots = (
        [Path(place) for place in (spec.submodule_search_locations or ()) if spec] if spec else []
    )
    toolkits = [Path(os.environ[name]) for name in ("CUDA_PATH", "CUDA_HOME") if name in os.environ]
    for major in _majors():
        library = f"libnvrtc.so.{major}"
        for root in roots:
            yield from (str(path) for path in sorted(root.glob(f"*/lib/{library}")))
        for toolkit in toolkits:
            for folder in ("lib64", "lib"):
                if (toolkit / folder / library).is_file():
                    yield str(toolkit / folder / library)
        yield library


def _strings(texts: Iterable[str]) -> "ctypes.Array[c_char_p]":
    encoded = [text.encode() for text in texts]
    return (c_char_p * len(encoded))(*encoded)


def kernels_in(code: bytes) -> list[str]:
    """Return the names of the kernels in a cubin or in PTX, sorted."""
    if not code.startswith(b"\x7fELF"):
        return sorted(set(re.findall(r"\.entry\s+(\w+)", code.decode(errors="replace"))))
    # ELF64: each kernel has a section ".text.<name>". The header tells where the table of sections
    # lies, how many there are, and which one holds their names.
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count, of_names = struct.unpack_from("<HHH", code, 58)
    headers = [struct.unpack_from("<II4Q", code, table + size * i) for i in range(count)]
    start = headers[of_names][4]
    found = []
    for header in headers:
        begin = start + header[0]
        name = code[begin : code.index(b"\0", begin)].decode()
        if name.startswith(".text."):
            found.append(name.removeprefix(".text."))
    return sorted(found)
