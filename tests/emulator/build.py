"""Compile CUDA sources for the CPU: one shared library per source, kept for the next time.

1. The sources of a folder, some of them perhaps replaced, are copied to a new folder; dynamic
   shared memory, which C++ has no word for, becomes a pointer there.
2. The preprocessor tells which kernels there are and how their parameters are called.
3. A generated file includes the emulator, the source and a trampoline for each kernel.
4. In the assembler's text every variable of shared memory gets a gap behind it, and a table tells
   where they lie (x86-64 only; elsewhere shared memory is one piece).
5. Compiler and linker write beside the final place; renaming makes the result appear at once, so
   that several processes may build the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADERS = ("cuda_emulator.h", "cuda_values.h", "runtime.h", "trampolines.h")
GAP = 64  # bytes between variables of shared memory
KEPT_SECONDS = 14 * 24 * 3600  # what nobody used for so long is thrown away

COMMON_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-w")
KERNEL_FLAGS = ("-O1", "-g1", "-gdwarf-4", "-ffp-contract=off", "-fno-strict-aliasing")
UNDEFINED = ("-fno-sanitize=vptr", "-fno-sanitize-recover=all")
# How kernels are compiled, and the runtime with them.
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": ((), ()),
    "checked": (
        (
            "-fsanitize=thread,undefined",
            *UNDEFINED,
            "--param=tsan-distinguish-volatile=1",
            "--param=tsan-instrument-func-entry-exit=0",
        ),
        (),
    ),
    "sanitized": (
        ("-fsanitize=address,undefined", *UNDEFINED, "-fno-omit-frame-pointer"),
        ("-fsanitize=address",),
    ),
}

_KERNEL = re.compile(r'extern\s*"C"\s*EMULATOR_GLOBAL\s+void\s+(\w+)\s*\(')
_DYNAMIC = re.compile(r"extern\s+__shared__\s+([^;\[\]]+?)\s*\b(\w+)\s*\[\s*\]\s*;")


class CompilationError(RuntimeError):
    """A source does not compile; the message has the compiler's log."""


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter, as the compiler sees it.

    Attributes:
        name: as in the source.
        kind: "p" pointer, "f" floating, "i" signed, "u" unsigned, "b" bool, "s" a structure.
        bytes: its size.
        target_kind: what a pointer points to, "v" for void; "" for other parameters.
        target_bytes: the size of that.
        target_const: whether it must not be changed.
    """

    name: str
    kind: str
    bytes: int
    target_kind: str
    target_bytes: int
    target_const: bool


@dataclass(frozen=True)
class Kernel:
    """A kernel of a library, by its place in there."""

    number: int
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Library:
    """A compiled source."""

    path: Path
    launch: Callable[..., int]
    kernels: Mapping[str, Kernel]


class _Parameter(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char),
        ("bytes", ctypes.c_uint32),
        ("target_kind", ctypes.c_char),
        ("target_bytes", ctypes.c_uint32),
        ("target_const", ctypes.c_bool),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("call", ctypes.c_void_p),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("count", ctypes.c_uint32),
    )


def compiler() -> str | None:
    """The host compiler, g++ alone: its sanitizers' calls are what the runtime answers."""
    return shutil.which("g++")


@functools.cache
def _compiler_version() -> str:
    found = compiler()
    if found is None:
        raise CompilationError("g++ was not found; install it, the emulator compiles with it")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    return f"{found} {version.stdout} {platform.machine()}"


@functools.cache
def cache_directory() -> Path:
    """A folder of this user's alone, for compiled libraries."""
    folder = Path(tempfile.gettempdir()) / f"cuda-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        folder = Path(tempfile.mkdtemp(prefix="cuda-emulator-"))
    for entry in folder.iterdir():
        try:
            if time.time() - entry.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()
        except FileNotFoundError:
            pass  # another process was faster
    return folder


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _run(command: list[str], what: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise CompilationError(f"{what} does not compile:\n{' '.join(command)}\n{result.stderr}")
    return result.stdout


@functools.cache
def _runtime(variant: str, extra: tuple[str, ...] = ()) -> Path:
    """The runtime's object file."""
    texts = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(HERE.iterdir())
        if path.suffix in (".h", ".cpp")
    }
    flags = (*COMMON_FLAGS, "-O2", *VARIANTS[variant][1], *extra)
    key = _digest("runtime", _compiler_version(), *flags, *texts, *texts.values())
    place = cache_directory() / f"runtime-{key}.o"
    if place.exists():
        os.utime(place)
        return place
    with tempfile.TemporaryDirectory(dir=cache_directory(), prefix="build-") as work:
        made = Path(work) / "runtime.o"
        source = str(HERE / "runtime.cpp")
        _run([str(compiler()), *flags, "-c", source, "-o", str(made)], "the emulator's runtime")
        os.replace(made, place)
    return place


def _parameter_names(text: str, start: int) -> list[str]:
    """The names of the parameters in the parentheses that open before `start`."""
    depth, names, last = 1, [], start
    for place in range(start, len(text)):
        character = text[place]
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(character, 0)
        if (character == "," and depth == 1) or depth == 0:
            words = re.findall(r"\w+", text[last:place])
            names += words[-1:]
            last = place + 1
        if depth == 0:
            break
    return names


def _find_kernels(preprocessed: str) -> dict[str, list[str]]:
    return {
        match[1]: _parameter_names(preprocessed, match.end())
        for match in _KERNEL.finditer(preprocessed)
    }


_TABLES = """#include "trampolines.h"
extern "C" const emulator::Kernel emulator_kernels[] = {{
{calls}    {{}}}};
extern "C" const emulator::u32 emulator_kernel_count = {count};
"""
_ONE_PIECE = 'extern "C" const emulator::SharedVariable emulator_shared[] = {{}};\n'


def _tell_shared_memory_apart(assembly: str) -> str:
    """Put gaps between the variables of shared memory, and append the table of them.

    The compiler writes thread-local variables without initial values, which these are, as a label
    and a number of zero bytes in a section of the name .tbss.
    """
    lines, found, section, label = [], [], "", ""
    for line in assembly.splitlines():
        lines.append(line)
        words = line.split()
        if words and words[0] in (".section", ".text", ".data", ".bss"):
            section = words[1] if words[0] == ".section" else words[0]
        if section.startswith(".tbss"):
            if line.endswith(":"):
                label = line[:-1]
            elif words[0] == ".zero" and label:
                found.append((label, int(words[1])))
                lines.append(f"\t.zero\t{GAP}")
                label = ""
    lines += ['\t.section\t.data.rel.ro.local,"aw"', "\t.align 8", "\t.globl emulator_shared"]
    lines += ["\t.hidden emulator_shared", "emulator_shared:"]
    for number, (name, size) in enumerate(found):
        lines.append(f"\t.quad .Lemulator_name{number}, {name}@dtpoff, {size}")
    lines += ["\t.quad 0, 0, 0", "\t.section\t.rodata"]
    for number, (name, _) in enumerate(found):
        lines.append(f'.Lemulator_name{number}:\n\t.string "{name}"')
    return "\n".join(lines) + "\n"


def _compile(
    source: str, texts: Mapping[str, str], variant: str, extra: tuple[str, ...], place: Path
) -> None:
    runtime = _runtime(variant, extra)
    with tempfile.TemporaryDirectory(dir=cache_directory(), prefix="build-") as work:
        folder = Path(work)
        for name, text in texts.items():
            pointer = r"\1 *const \2 = static_cast<\1 *>(::emulator::dynamic_shared());"
            (folder / name).write_text(_DYNAMIC.sub(pointer, text), encoding="utf-8")
        wrapper = folder / "wrapper.cpp"
        begin = f'#include "cuda_emulator.h"\n#include "{source}"\n'
        wrapper.write_text(begin, encoding="utf-8")
        command = [str(compiler()), *COMMON_FLAGS, *KERNEL_FLAGS, *VARIANTS[variant][0], *extra]
        command += ["-I", str(folder), "-iquote", str(HERE)]
        scan = [*command, "-E", "-P", "-DEMULATOR_SCAN", str(wrapper)]
        kernels = _find_kernels(_run(scan, source))
        calls = "".join(f"    EMULATOR_KERNEL({name})\n" for name in kernels)
        names = "".join(f"// {name}: {' '.join(names)}\n" for name, names in kernels.items())
        tables = _TABLES.format(calls=calls, count=len(kernels))
        told_apart = variant == "checked" and platform.machine() == "x86_64"
        tables += "" if told_apart else _ONE_PIECE
        wrapper.write_text(begin + tables, encoding="utf-8")
        unit, made = folder / "wrapper.o", folder / "library.so"
        if told_apart:
            assembly = folder / "wrapper.s"
            _run([*command, "-S", str(wrapper), "-o", str(assembly)], source)
            text = assembly.read_text(encoding="utf-8")
            assembly.write_text(_tell_shared_memory_apart(text), encoding="utf-8")
            wrapper = assembly
        _run([*command, "-c", str(wrapper), "-o", str(unit)], source)
        link = [str(compiler()), "-shared", "-o", str(made), str(unit), str(runtime)]
        link += ["-Wl,-z,defs"] if variant != "sanitized" else ["-fsanitize=address,undefined"]
        _run(link, source)
        listing = folder / "kernels.txt"
        listing.write_text(names, encoding="utf-8")
        os.replace(listing, place.with_suffix(".txt"))
        os.replace(made, place)  # last: it says that all is there


@functools.cache
def _open(place: Path) -> Library:
    library = ctypes.CDLL(str(place))
    listing = place.with_suffix(".txt").read_text(encoding="utf-8")
    names = {
        line[3:].partition(":")[0]: line.partition(":")[2].split() for line in listing.splitlines()
    }
    table = ctypes.POINTER(_Kernel)()
    library.emulator_describe.restype = ctypes.c_uint32
    count = library.emulator_describe(ctypes.byref(table))
    kernels = {}
    for number in range(count):
        kernel = table[number]
        name = kernel.name.decode()
        kernels[name] = Kernel(
            number,
            tuple(
                Parameter(
                    names[name][i],
                    p.kind.decode(),
                    p.bytes,
                    p.target_kind.strip(b"\0").decode(),
                    p.target_bytes,
                    p.target_const,
                )
                for i, p in enumerate(kernel.parameters[: kernel.count])
            ),
        )
    launch = library.emulator_launch
    launch.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_void_p)
    launch.restype = ctypes.c_int
    return Library(place, launch, kernels)


def library(
    folder: Path,
    source: str,
    variant: str,
    overrides: Mapping[str, str] | None = None,
    extra: tuple[str, ...] = (),
) -> Library:
    """Compile a source, or find it compiled.

    Args:
        folder: of the sources.
        source: file in it, ending in .cu.
        variant: key of VARIANTS.
        overrides: texts that replace files of the folder, by name.
        extra: more flags for the compiler.

    Raises:
        CompilationError: it does not compile, or there is no g++.
        FileNotFoundError: there is no such source.
    """
    texts = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(folder.iterdir())
        if path.suffix == ".cuh" or path.name == source
    }
    texts |= overrides or {}
    if source not in texts:
        raise FileNotFoundError(f"no CUDA source {source!r} in {folder}")
    texts = {n: t for n, t in texts.items() if n == source or n.endswith(".cuh")}
    headers = [(HERE / name).read_text(encoding="utf-8") for name in HEADERS]
    flags = (*COMMON_FLAGS, *KERNEL_FLAGS, *VARIANTS[variant][0], *extra)
    runtime = _runtime(variant, extra).name
    key = _digest(_compiler_version(), runtime, *flags, *headers, source, *texts, *texts.values())
    place = cache_directory() / f"{Path(source).stem}-{variant}-{key}.so"
    if place.exists():
        os.utime(place)
        os.utime(place.with_suffix(".txt"))
    else:
        _compile(source, texts, variant, extra, place)
    return _open(place)
