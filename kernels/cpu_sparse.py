"""Sparse vectors against each other and against dense ones (compiled), O(entries).

1. `join` adds two ascending vectors with two pointers and notes where each entry went.
2. `keep` leaves the entries above a cutoff and follows every entry's fate through the cut.
3. `put` and `add` write or add entries to a dense vector.
4. `permute` draws distinct numbers for random-k.
"""

import numpy as np

from ddl.kernels.cpu_select import INFINITE, MASK
from ddl.kernels.jit import jit

U = np.uint64


@jit(
    "int64(int32[::1], float32[::1], int32[::1], float32[::1],"
    " int32[::1], float32[::1], int32[::1], int32[::1])"
)
def join(a_indices, a_values, b_indices, b_values, indices, values, place_a, place_b):
    """Add two ascending sparse vectors; return the number of distinct indices.

    `indices` and `values` have room for both; `place_a` and `place_b` get the place of each entry.
    """
    a = U(0)
    b = U(0)
    to = U(0)
    a_count = U(a_indices.shape[0])
    b_count = U(b_indices.shape[0])
    while a < a_count and b < b_count:
        # No branch on the data: which vector comes next is as random as a coin.
        from_a = a_indices[a] <= b_indices[b]
        from_b = b_indices[b] <= a_indices[a]
        one = a_values[a] if from_a else b_values[b]
        indices[to] = a_indices[a] if from_a else b_indices[b]
        values[to] = a_values[a] + b_values[b] if from_a and from_b else one
        place_a[a] = np.int32(to)  # the last write to a place is the right one
        place_b[b] = np.int32(to)
        a += U(from_a)
        b += U(from_b)
        to += U(1)
    while a < a_count:
        indices[to] = a_indices[a]
        values[to] = a_values[a]
        place_a[a] = np.int32(to)
        a += U(1)
        to += U(1)
    while b < b_count:
        indices[to] = b_indices[b]
        values[to] = b_values[b]
        place_b[b] = np.int32(to)
        b += U(1)
        to += U(1)
    return np.int64(to)


@jit("void(float32[::1], int64, int32[::1])")
def ranks(values, count, keys):
    """Fill keys with the key of each value, where everything that is not finite ranks alike."""
    bits = values.view(np.int32)
    for i in range(U(count)):
        key = bits[i] & MASK
        keys[i] = key if key < INFINITE else INFINITE


@jit(
    "void(int32[::1], float32[::1], int32[::1], int64, int64, int64,"
    " int32[::1], float32[::1], int32[::1], int32[::1])"
)
def keep(indices, values, keys, count, cutoff, ties, out_indices, out_values, place_a, place_b):
    """Output entries above the cutoff and its first ties; turn places into places of the output.

    `keys` is used up: it holds the new place of each entry, -1 where dropped, afterwards.
    """
    kept = np.int64(0)
    for i in range(count):
        key = np.int64(keys[i])
        if key > cutoff or (key == cutoff and ties > 0):
            ties -= key == cutoff
            out_indices[kept] = indices[i]
            out_values[kept] = values[i]
            keys[i] = np.int32(kept)
            kept += 1
        else:
            keys[i] = np.int32(-1)
    for i in range(place_a.shape[0]):
        place_a[i] = keys[place_a[i]]
    for i in range(place_b.shape[0]):
        place_b[i] = keys[place_b[i]]


@jit("void(int32[::1], int32[::1], int32[::1])", "void(int16[::1], int32[::1], int16[::1])")
def put(dense, indices, values):
    """Write entries, as bits of their dtype, into a dense vector."""
    for i in range(U(indices.shape[0])):
        dense[U(indices[i])] = values[i]


@jit("void(float32[::1], int32[::1], float32[::1])")
def add(dense, indices, values):
    """Add entries to a dense vector."""
    for i in range(U(indices.shape[0])):
        dense[U(indices[i])] += values[i]


@jit("void(int64, int64, uint64[::1], int32[::1])")
def permute(numel, half_bits, keys, out):
    """Fill out with the images of 0, 1, .. under a permutation of [0, numel); see reference.py."""
    h = U(half_bits)
    low = (U(1) << h) - U(1)
    word = U(0xFFFFFFFF)
    for i in range(U(out.shape[0])):
        number = i
        inside = False
        while not inside:
            left = number >> h
            right = number & low
            for key in keys:
                mixed = (right + key) & word
                mixed = ((mixed ^ (mixed >> U(16))) * U(0x45D9F3B)) & word
                mixed = ((mixed ^ (mixed >> U(16))) * U(0x45D9F3B)) & word
                left, right = right, left ^ ((mixed ^ (mixed >> U(16))) & low)
            number = (left << h) | right
            inside = number < U(numel)
        out[i] = np.int32(number)
