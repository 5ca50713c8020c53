"""Numba's compiler behind one decorator, a disk cache, and a lock for many processes.

1. `jit(signature, ...)` compiles for the given signatures when the module is imported, or loads
   the machine code from Numba's cache.
2. `compile_once()` guards that import. A marker file beside the cache says that these sources are
   compiled for this processor. Where it is missing, one process takes the file lock and compiles;
   the others wait, then load.
3. Numba notices a change of a function, but not of one that it calls in another file; so a change
   in any of the sources drops all cached code.
"""

import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy

try:
    import fcntl
except ImportError:  # not a POSIX system: processes may compile twice, which only costs time
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("ddl.kernels")

SOURCES = ("jit.py", "cpu_layout.py", "cpu_accumulate.py", "cpu_select.py", "cpu_sparse.py")
LOCK_SECONDS = 600.0  # a compiling process takes about 20 s; after this it is taken for dead


def jit(*signatures: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for the signatures, GIL released, cached on disk where possible."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(list(signatures), nogil=True, cache=True, **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            return numba.njit(list(signatures), nogil=True, **options)(function)

    return decorate


def inline(function: Callable[..., Any]) -> Any:
    """Compile a helper into its callers."""
    return numba.njit(forceinline=True)(function)


def _probe() -> None:
    """Tell, once jitted, where Numba keeps the code of this folder."""


def cache_directory() -> Path | None:
    """Return the folder where Numba caches the kernels, None where it finds no writable one."""
    try:
        path = Path(str(numba.njit(cache=True)(_probe).stats.cache_path))
        path.mkdir(parents=True, exist_ok=True)
    except (RuntimeError, OSError):
        return None
    return path


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _source_digest() -> str:
    here = Path(__file__).parent
    return _digest(*[(here / name).read_bytes() for name in SOURCES])


def _machine_digest() -> str:
    machine = (
        numba.__version__,
        numpy.__version__,
        platform.python_version(),
        llvmlite.binding.get_host_cpu_name(),
        llvmlite.binding.get_host_cpu_features().flatten(),
        os.environ.get("NUMBA_CPU_NAME", ""),
        os.environ.get("NUMBA_CPU_FEATURES", ""),
    )
    return _digest(*[part.encode() for part in machine])


@contextmanager
def compile_once() -> Iterator[None]:
    """Guard the import of the modules that compile, so that one process at most compiles."""
    folder = cache_directory()
    if folder is None:
        yield
        return
    source = _source_digest()
    marker = folder / f"ddl-kernels-{source}-{_machine_digest()}.ready"
    if marker.exists():
        yield
        return
    with _file_lock(folder / "ddl-kernels.lock"):
        if not marker.exists() and not any(folder.glob(f"ddl-kernels-{source}-*.ready")):
            _drop_stale(folder)
        yield
        try:
            marker.touch()
        except OSError as error:
            log.warning("cannot write %s (%s); each process will check for itself", marker, error)


def _drop_stale(folder: Path) -> None:
    stems = [Path(name).stem for name in SOURCES]
    stale = [path for stem in stems for path in folder.glob(f"{stem}.*.nb[ic]")]
    for path in [*stale, *folder.glob("ddl-kernels-*.ready")]:
        path.unlink(missing_ok=True)


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on path, or go on without it after LOCK_SECONDS."""
    if fcntl is None:
        yield
        return
    with path.open("a") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    log.warning(
                        "%s is still locked after %.0f s; compiling without it", path, LOCK_SECONDS
                    )
                    break
                time.sleep(0.05)
            except OSError as error:  # a file system without locks
                log.debug("cannot lock %s: %s", path, error)
                break
        yield  # closing the file releases the lock
