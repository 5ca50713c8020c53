"""The loops over entries, compiled by Numba: where there is no native library.

`native.Loops` has the same functions. Importing this compiles them, once per machine.
"""

from ddl.kernels.jit import compile_once

with compile_once():
    from ddl.kernels.cpu_accumulate import collect, sample, take
    from ddl.kernels.cpu_select import count_from, kth_largest, settle
    from ddl.kernels.cpu_sparse import add, join, keep, permute, put, ranks

__all__ = [
    "add",
    "collect",
    "count_from",
    "join",
    "keep",
    "kth_largest",
    "permute",
    "put",
    "ranks",
    "sample",
    "settle",
    "take",
]
