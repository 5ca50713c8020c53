"""One pass over gradient and residual (compiled).

Blocks of 64 entries, which stay in registers or the first cache:

1. x = scale * flat + residual, product and sum rounded one after the other.
2. The block's largest key decides: below the threshold it is only stored, as most blocks are.
3. Otherwise every entry goes to one of two places: candidates, with the residual set to 0, or the
   residual. No sort, no branch per entry.
4. A full buffer is tightened to its k largest, which raises the threshold for what follows.
5. Where x is not finite, the residual keeps its old value and a bit in `poisoned` remembers the
   place. That map is only made once a non-finite x is met: the pass stops and is resumed.

A pass with `fresh` = False reads the residual alone (x = residual) to repair a prediction that
was too high; places in `poisoned` are left out.
"""

import numpy as np
from numba import types
from numba.extending import overload

from ddl.kernels import cpu_layout as layout
from ddl.kernels.cpu_layout import (
    BFLOAT16,
    STATE_COUNT,
    STATE_LEAST,
    STATE_NONFINITE,
    STATE_PASSED,
    STATE_POSITION,
)
from ddl.kernels.cpu_select import INFINITE, MASK, tighten
from ddl.kernels.jit import inline, jit

# Unsigned indices spare Numba's test for negative ones, which would keep loops from vectorising.
# They must not be mixed with signed numbers, which Numba would turn into float64.
U = np.uint64
BLOCK = U(layout.BLOCK)
CHUNK = U(layout.CHUNK)
LANES = U(layout.LANES)
RUN = 4  # neighbours taken together by a sample


def accumulate_block(flat, residual, position, size, scale, form, x, bits):
    """Fill x[:size] with scale * flat + residual from position on; bits is x seen as uint32."""
    raise NotImplementedError("compiled code only")


@overload(accumulate_block, jit_options={"forceinline": True})
def _accumulate_block(flat, residual, position, size, scale, form, x, bits):
    if flat.dtype == types.float32:

        def from_float32(flat, residual, position, size, scale, form, x, bits):
            for j in range(size):
                x[j] = scale * flat[position + j] + residual[position + j]

        return from_float32

    def from_half(flat, residual, position, size, scale, form, x, bits):
        if form == BFLOAT16:
            for j in range(size):
                bits[j] = np.uint32(flat[position + j]) << np.uint32(16)
        else:
            # The exponent's bias differs by 112, and a product with 2^112 is exact, also for
            # denormals; infinity and NaN get float32's exponent of ones.
            for j in range(size):
                bits[j] = np.uint32(flat[position + j] & np.uint16(0x7FFF)) << np.uint32(13)
            for j in range(size):
                x[j] *= np.float32(2.0**112)
            for j in range(size):
                half = flat[position + j]
                sign = np.uint32(half & np.uint16(0x8000)) << np.uint32(16)
                special = half & np.uint16(0x7C00) == np.uint16(0x7C00)
                bits[j] |= sign | (np.uint32(0x7F800000) if special else np.uint32(0))
        for j in range(size):
            x[j] = scale * x[j] + residual[position + j]

    return from_half


@inline
def largest_key(keys):
    """Return the largest key of a block."""
    peak = np.int32(0)
    for j in range(BLOCK):
        key = keys[j] & MASK
        peak = key if key > peak else peak
    return peak


@jit("void(float32[::1], float64[:, ::1])")
def add_block(x, lanes):
    """Add a block to the sums and to the sums of squares of its chunk.

    Lane by lane, in one fixed order, so that every implementation gets the same bits.
    """
    for i in range(U(0), BLOCK, LANES):
        for j in range(LANES):
            value = np.float64(x[i + j])
            lanes[0, j] += value
            lanes[1, j] += value * value


_COLLECT = (
    "boolean({flat}[::1], float32[::1], int64, float32, int64, boolean, int64,"
    " int32[::1], float32[::1], int64, int64, uint64[::1], float64[:, :, ::1], int64[::1])"
)


@jit(_COLLECT.format(flat="float32"), _COLLECT.format(flat="uint16"))
def collect(
    flat,
    residual,
    hi,
    scale,
    form,
    fresh,
    k,
    indices,
    values,
    start,
    room,
    poisoned,
    sums,
    state,
):
    """Accumulate from state's position up to hi; leave every x among candidates or residual.

    Args:
        flat: float32, or uint16 bits of `form`; not read unless fresh.
        residual: float32, read and written.
        hi: end of this piece.
        scale: factor of flat.
        form: FLOAT32, BFLOAT16 or FLOAT16 of cpu_layout.
        fresh: x is scale * flat + residual; otherwise the residual itself.
        k: what a full buffer is tightened to.
        indices: int32 candidates of this thread, from `start` on.
        values: float32, likewise.
        start: where the candidates begin.
        room: how many fit; at least min(numel, k + 1) + BLOCK.
        poisoned: uint64 [blocks], a bit for each non-finite x, or empty.
        sums: float64 [chunks, 2, LANES], sums and sums of squares of finite x, by lane; empty:
            not wanted.
        state: position, candidates, smallest key that is a candidate, entries that ever were
            candidates, non-finite entries; updated.

    Returns:
        True if the pass stopped because it needs `poisoned`; resume it with that map.
    """
    x = np.empty(BLOCK, np.float32)
    keys = x.view(np.int32)
    bits = x.view(np.uint32)
    position = U(state[STATE_POSITION])
    end = U(hi)
    first = U(start)
    place = U(start + state[STATE_COUNT])
    full = U(start + room) - BLOCK
    least = np.int32(state[STATE_LEAST])
    passed = U(state[STATE_PASSED])
    moments = sums.shape[0] > 0
    mapped = poisoned.shape[0] > 0
    stopped = False
    while position < end:
        block = position // BLOCK
        size = min(BLOCK, end - position)
        if size == BLOCK:
            if fresh:
                accumulate_block(flat, residual, position, BLOCK, scale, form, x, bits)
            else:
                for j in range(BLOCK):
                    x[j] = residual[position + j]
        else:
            x[:] = np.float32(0)
            if fresh:
                accumulate_block(flat, residual, position, size, scale, form, x, bits)
            else:
                for j in range(size):
                    x[j] = residual[position + j]
        peak = largest_key(keys)
        mask = U(0)
        if mapped and not fresh:
            mask = poisoned[block]

        if peak >= least and place > full:
            least = np.int32(tighten(residual, indices, values, start, place - first, k))
            place = first + U(k)

        if size < BLOCK or peak >= INFINITE or mask != U(0):
            # The careful way: entry by entry.
            if fresh:
                for j in range(size):
                    if keys[j] & MASK >= INFINITE:
                        mask |= U(1) << j
                if mask != U(0):
                    if not mapped:
                        stopped = True
                        break
                    poisoned[block] = mask
            for j in range(size):
                key = keys[j] & MASK
                if (mask >> j) & U(1):
                    x[j] = np.float32(0)
                    if fresh:
                        state[STATE_NONFINITE] += 1
                elif key >= least:
                    indices[place] = np.int32(position + j)
                    values[place] = x[j]
                    place += U(1)
                    passed += U(1)
                    residual[position + j] = np.float32(0)
                elif fresh:
                    residual[position + j] = x[j]
        elif peak < least:
            if fresh:
                for j in range(BLOCK):
                    residual[position + j] = x[j]
        else:
            before = place
            for j in range(BLOCK):
                indices[place] = np.int32(position + j)
                values[place] = x[j]
                place += U(keys[j] & MASK >= least)
            passed += place - before
            for j in range(BLOCK):
                residual[position + j] = np.float32(0) if keys[j] & MASK >= least else x[j]
        if moments:
            add_block(x, sums[position // CHUNK])
        position += size
    state[STATE_POSITION] = np.int64(position)
    state[STATE_COUNT] = np.int64(place - first)
    state[STATE_LEAST] = np.int64(least)
    state[STATE_PASSED] = np.int64(passed)
    return stopped


_SAMPLE = "void({flat}[::1], float32[::1], float32, int64, boolean, int32[::1])"


@jit(_SAMPLE.format(flat="float32"), _SAMPLE.format(flat="uint16"))
def sample(flat, residual, scale, form, fresh, keys):
    """Fill keys with the keys of x at places spread over the vector; 0 where x is not finite.

    Neighbours in a layered gradient are alike, so runs of RUN entries are taken at a random place
    of each of equally long stretches. Keys for all entries: each is taken once.
    """
    x = np.empty(RUN, np.float32)
    bits = x.view(np.uint32)
    numel = U(residual.shape[0])
    taken = U(0)
    wanted = U(keys.shape[0])
    run = U(RUN)
    runs = (wanted + run - U(1)) // run
    noise = U(0x9E3779B97F4A7C15)
    for i in range(runs):
        position = i * run
        size = min(run, wanted - taken)
        if wanted < numel:
            position = i * numel // runs
            free = (i + U(1)) * numel // runs - position
            noise ^= noise << U(13)  # xorshift64
            noise ^= noise >> U(7)
            noise ^= noise << U(17)
            if free > run:
                position += (noise >> U(32)) % (free - run + U(1))
            position = min(position, numel - run)
        if fresh:
            accumulate_block(flat, residual, position, size, scale, form, x, bits)
        else:
            for j in range(size):
                x[j] = residual[position + j]
        for j in range(size):
            key = np.int32(bits[j]) & MASK
            keys[taken + j] = key if key < INFINITE else np.int32(0)
        taken += size


@jit("void(float32[::1], int32[::1], uint64[::1], float32[::1])")
def take(residual, indices, poisoned, out_values):
    """Move the residual's entries at the indices into out_values, 0 where x was not finite."""
    for i in range(indices.shape[0]):
        index = U(indices[i])
        if poisoned.shape[0] and (poisoned[index // BLOCK] >> (index % BLOCK)) & U(1):
            out_values[i] = np.float32(0)
        else:
            out_values[i] = residual[index]
            residual[index] = np.float32(0)
