"""The k-th largest key among few candidates, without a sort (compiled).

The key of a float32 is its bits without the sign, `bits & 0x7fffffff`: an integer that orders
magnitudes, with infinity at `INFINITE` and every NaN above.

1. `kth_largest`: radix select from the most significant digit (11, 10 and 10 bits).
2. `tighten`: a full buffer keeps its k largest and gives the others back to the residual.
3. `settle`: candidates above a cutoff become the output, the others go back to the residual.
"""

import numpy as np

from ddl.kernels import keys as key_bits
from ddl.kernels.jit import jit

MASK = np.int32(key_bits.MASK)
INFINITE = np.int32(key_bits.INFINITE)


@jit("UniTuple(int64, 2)(int32[::1], int64, int64, int64)")
def kth_largest(keys, start, count, k):
    """Return the k-th largest key of keys[start : start + count] and its share of the k.

    Args:
        keys: int32; a sign bit is ignored.
        start: first entry looked at.
        count: number of entries looked at.
        k: rank, 1 <= k <= count.

    Returns:
        The key, and how many entries equal to it are among the k largest (at least 1).
    """
    histogram = np.empty(2048, np.int64)
    wanted = k
    prefix = np.int64(0)  # the digits found so far
    above = np.int64(31)  # their position
    for shift in (20, 10, 0):
        histogram[:] = 0
        for i in range(start, start + count):
            key = np.int64(keys[i] & MASK)
            if key >> above == prefix:
                histogram[(key >> shift) & 2047 if shift == 20 else (key >> shift) & 1023] += 1
        digit = np.int64(2047 if shift == 20 else 1023)
        while histogram[digit] < wanted:
            wanted -= histogram[digit]
            digit -= 1
        prefix = (prefix << (above - shift)) | digit
        above = np.int64(shift)
    return prefix, wanted


@jit("int64(float32[::1], int32[::1], float32[::1], int64, int64, int64)")
def tighten(residual, indices, values, start, count, k):
    """Keep the k largest of a full buffer, in order, and give the others back.

    Returns:
        The key from which on *later* entries may still be among the k largest: one more than the
        k-th, because a tie goes to the lower index.
    """
    keys = values.view(np.int32)
    cutoff, ties = kth_largest(keys, start, count, k)
    kept = start
    for i in range(start, start + count):
        key = np.int64(keys[i] & MASK)
        if key > cutoff or (key == cutoff and ties > 0):
            ties -= key == cutoff
            indices[kept] = indices[i]
            values[kept] = values[i]
            kept += 1
        else:
            residual[indices[i]] = values[i]
    return cutoff + 1


@jit("int64(float32[::1], int32[::1], float32[::1], int64, int64, int64, int32[::1], float32[::1])")
def settle(residual, indices, values, count, cutoff, ties, out_indices, out_values):
    """Output what is above the cutoff and its first ties, give the others back.

    Returns:
        The smallest key in the output, 0 if there is none.
    """
    keys = values.view(np.int32)
    kept = 0
    least = np.int64(MASK)
    for i in range(count):
        key = np.int64(keys[i] & MASK)
        if key > cutoff or (key == cutoff and ties > 0):
            ties -= key == cutoff
            out_indices[kept] = indices[i]
            out_values[kept] = values[i]
            kept += 1
            least = min(least, key)
        else:
            residual[indices[i]] = values[i]
    return least if kept > 0 else np.int64(0)


@jit("int64(float32[::1], int64, int64)")
def count_from(values, count, least):
    """Return how many of the first count values have a key of at least `least`."""
    keys = values.view(np.int32)
    total = np.int64(0)
    for i in range(count):
        total += np.int64(keys[i] & MASK) >= least
    return total
