"""The code of a CUDA source for a device: built ahead of time, kept on disk, or compiled now.

1. Where DDL_CUDA_PREBUILT names a folder, from there or not at all; see `prebuild`.
2. Otherwise from the user's cache, $XDG_CACHE_HOME/ddl (~/.cache/ddl), under a name that changes
   with any source, header, option or version of NVRTC.
3. Otherwise compiled, and kept there for the next process. Processes that start together may each
   compile; they write the same.
"""

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from ddl.kernels import prebuild, sources
from ddl.kernels.compiler import compiler

log = logging.getLogger("ddl.kernels")

_CHECK_BYTES = 32  # a SHA-256 before the code: a half-written file must not reach the GPU


def code_for(name: str, capability: tuple[int, int]) -> bytes:
    """Return the code of one source, such as "scatter.cu", for a device.

    Args:
        name: a source in csrc.
        capability: the device's compute capability, such as (9, 0).

    Raises:
        RuntimeError: it does not compile, NVRTC is missing, or what was built ahead does not fit.
    """
    prebuilt = prebuild.directory()
    if prebuilt is not None:
        return prebuild.load(prebuilt, name, capability)
    target = compiler().target(capability)
    version = "{}.{}".format(*compiler().version)
    path = _cache() / f"cuda-{sources.digest()}-{version}" / target / f"{Path(name).stem}.bin"
    code = _read(path)
    if code is None:
        log.info("compiling %s for %s", name, target)
        code = compiler().compile(name, target).code
        _write(path, code)
    return code


def _cache() -> Path:
    place = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(place) if os.path.isabs(place) else Path.home() / ".cache") / "ddl"


def _read(path: Path) -> bytes | None:
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    check, code = kept[:_CHECK_BYTES], kept[_CHECK_BYTES:]
    return code if hashlib.sha256(code).digest() == check else None


def _write(path: Path, code: bytes) -> None:
    """Keep the code; without a place to write, each process compiles for itself."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
    except OSError as error:
        log.debug("cannot keep %s (%s)", path, error)
