"""The loops over entries, from the native library that a C++ compiler made at installation.

1. setup.py builds csrc/cpu into this folder where it can. It needs neither torch nor Python's
   headers: a table of C functions, called through ctypes, which releases the GIL.
2. `load` finds the library, refuses one of another version, and picks the best instructions that
   this processor has.
3. Without a library, or with DDL_NATIVE=0 in the environment, `load` returns None and the caller
   takes Numba's loops (`numba_loops`), which give the same bits, more slowly.
"""

import ctypes
import importlib.machinery
import logging
import os
from ctypes import CFUNCTYPE, c_char, c_float, c_int64, c_void_p
from pathlib import Path

import numpy as np

log = logging.getLogger("ddl.kernels")

VERSION = 1  # kVersion in csrc/cpu/loops.h
PORTABLE, AVX2, AVX512 = range(3)

_P, _N, _F = c_void_p, c_int64, c_float
# In the order of csrc/cpu/loops.h: the result, then the arguments.
_TABLE = {
    "collect": CFUNCTYPE(_N, _P, _P, _N, _F, _N, _N, _N, _P, _P, _N, _N, _P, _P, _P),
    "sample": CFUNCTYPE(None, _P, _P, _N, _F, _N, _N, _P, _N),
    "take": CFUNCTYPE(None, _P, _P, _N, _P, _P),
    "kth_largest": CFUNCTYPE(_N, _P, _N, _N, _P),
    "settle": CFUNCTYPE(_N, _P, _P, _P, _N, _N, _N, _P, _P),
    "count_from": CFUNCTYPE(_N, _P, _N, _N),
    "join": CFUNCTYPE(_N, _P, _P, _N, _P, _P, _N, _P, _P, _P, _P),
    "ranks": CFUNCTYPE(None, _P, _N, _P),
    "keep": CFUNCTYPE(None, _P, _P, _P, _N, _N, _N, _P, _P, _P, _N, _P, _N),
    "put32": CFUNCTYPE(None, _P, _P, _P, _N),
    "put16": CFUNCTYPE(None, _P, _P, _P, _N),
    "add": CFUNCTYPE(None, _P, _P, _P, _N),
    "permute": CFUNCTYPE(None, _N, _N, _P, _N, _P, _N),
}


def _at(array: np.ndarray) -> int:
    """Return the address of an array's first entry."""
    try:
        # Five times faster than the other way.
        return ctypes.addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, or empty
        return array.__array_interface__["data"][0]


def _if_any(array: np.ndarray) -> int | None:
    return _at(array) if array.shape[0] else None


class Loops:
    """The functions of `numba_loops`, with the same arguments, at one level of instructions."""

    def __init__(self, library: ctypes.CDLL, level: int) -> None:
        """Read the library's table for a level that this processor has."""
        self.level = level
        library.ddl_native_loops.restype = ctypes.POINTER(c_void_p * len(_TABLE))
        table = library.ddl_native_loops(c_int64(level)).contents
        self._library = library  # keeps the code in memory
        self._call = {
            name: prototype(address)
            for (name, prototype), address in zip(_TABLE.items(), table, strict=True)
        }

    def collect(
        self,
        flat: np.ndarray,
        residual: np.ndarray,
        hi: int,
        scale: np.float32,
        form: int,
        fresh: bool,
        k: int,
        indices: np.ndarray,
        values: np.ndarray,
        start: int,
        room: int,
        poisoned: np.ndarray,
        sums: np.ndarray,
        state: np.ndarray,
    ) -> bool:
        """See `cpu_accumulate.collect`."""
        stopped = self._call["collect"](
            _at(flat),
            _at(residual),
            hi,
            scale,
            form,
            fresh,
            k,
            _at(indices),
            _at(values),
            start,
            room,
            _if_any(poisoned),
            _if_any(sums),
            _at(state),
        )
        return bool(stopped)

    def sample(
        self,
        flat: np.ndarray,
        residual: np.ndarray,
        scale: np.float32,
        form: int,
        fresh: bool,
        keys: np.ndarray,
    ) -> None:
        """See `cpu_accumulate.sample`."""
        numel, wanted = residual.shape[0], keys.shape[0]
        self._call["sample"](_at(flat), _at(residual), numel, scale, form, fresh, _at(keys), wanted)

    def take(
        self,
        residual: np.ndarray,
        indices: np.ndarray,
        poisoned: np.ndarray,
        out_values: np.ndarray,
    ) -> None:
        """See `cpu_accumulate.take`."""
        self._call["take"](
            _at(residual),
            _at(indices),
            indices.shape[0],
            _if_any(poisoned),
            _at(out_values),
        )

    def kth_largest(self, keys: np.ndarray, start: int, count: int, k: int) -> tuple[int, int]:
        """See `cpu_select.kth_largest`."""
        ties = c_int64()
        first = _at(keys) + start * keys.itemsize
        key = self._call["kth_largest"](first, count, k, ctypes.addressof(ties))
        return key, ties.value

    def settle(
        self,
        residual: np.ndarray,
        indices: np.ndarray,
        values: np.ndarray,
        count: int,
        cutoff: int,
        ties: int,
        out_indices: np.ndarray,
        out_values: np.ndarray,
    ) -> int:
        """See `cpu_select.settle`."""
        return self._call["settle"](
            _at(residual),
            _at(indices),
            _at(values),
            count,
            cutoff,
            ties,
            _at(out_indices),
            _at(out_values),
        )

    def count_from(self, values: np.ndarray, count: int, least: int) -> int:
        """See `cpu_select.count_from`."""
        return self._call["count_from"](_at(values), count, least)

    def join(
        self,
        a_indices: np.ndarray,
        a_values: np.ndarray,
        b_indices: np.ndarray,
        b_values: np.ndarray,
        indices: np.ndarray,
        values: np.ndarray,
        place_a: np.ndarray,
        place_b: np.ndarray,
    ) -> int:
        """See `cpu_sparse.join`."""
        return self._call["join"](
            _at(a_indices),
            _at(a_values),
            a_indices.shape[0],
            _at(b_indices),
            _at(b_values),
            b_indices.shape[0],
            _at(indices),
            _at(values),
            _at(place_a),
            _at(place_b),
        )

    def ranks(self, values: np.ndarray, count: int, keys: np.ndarray) -> None:
        """See `cpu_sparse.ranks`."""
        self._call["ranks"](_at(values), count, _at(keys))

    def keep(
        self,
        indices: np.ndarray,
        values: np.ndarray,
        keys: np.ndarray,
        count: int,
        cutoff: int,
        ties: int,
        out_indices: np.ndarray,
        out_values: np.ndarray,
        place_a: np.ndarray,
        place_b: np.ndarray,
    ) -> None:
        """See `cpu_sparse.keep`."""
        self._call["keep"](
            _at(indices),
            _at(values),
            _at(keys),
            count,
            cutoff,
            ties,
            _at(out_indices),
            _at(out_values),
            _at(place_a),
            place_a.shape[0],
            _at(place_b),
            place_b.shape[0],
        )

    def put(self, dense: np.ndarray, indices: np.ndarray, values: np.ndarray) -> None:
        """See `cpu_sparse.put`."""
        name = "put32" if dense.itemsize == 4 else "put16"
        self._call[name](_at(dense), _at(indices), _at(values), indices.shape[0])

    def add(self, dense: np.ndarray, indices: np.ndarray, values: np.ndarray) -> None:
        """See `cpu_sparse.add`."""
        self._call["add"](_at(dense), _at(indices), _at(values), indices.shape[0])

    def permute(self, numel: int, half_bits: int, keys: np.ndarray, out: np.ndarray) -> None:
        """See `cpu_sparse.permute`."""
        self._call["permute"](numel, half_bits, _at(keys), keys.shape[0], _at(out), out.shape[0])


def find(folder: Path) -> Path | None:
    """Return the library that setup.py put into the folder, None where it could not build one."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_native{suffix}"
        if path.is_file():
            return path
    return None


def open_library(path: Path) -> ctypes.CDLL:
    """Open a library of this version.

    Raises:
        OSError: it cannot be loaded, or is of another version.
    """
    library = ctypes.CDLL(str(path))
    try:
        library.ddl_native_version.restype = c_int64
        version = library.ddl_native_version()
    except AttributeError as error:
        raise OSError(f"{path} is not ddl's native library") from error
    if version != VERSION:
        raise OSError(f"{path} has version {version}, expected {VERSION}; reinstall ddl")
    return library


def levels(library: ctypes.CDLL) -> list[int]:
    """Return the levels of instructions that this processor has, ascending."""
    library.ddl_native_level.restype = c_int64
    return list(range(library.ddl_native_level() + 1))


def load(folder: Path | None = None) -> Loops | None:
    """Return the native loops at the best level, None where Numba's are to be used."""
    if os.environ.get("DDL_NATIVE", "1") == "0":
        return None
    path = find(folder or Path(__file__).parent)
    if path is None:
        log.debug("no native kernels were built; using Numba's")
        return None
    try:
        library = open_library(path)
    except OSError as error:
        log.warning(
            "the native kernels cannot be used (%s); using Numba's, which are slower", error
        )
        return None
    return Loops(library, levels(library)[-1])
