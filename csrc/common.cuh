// What every kernel needs: sizes, the grid-stride loop, bits of float32 and of the two halves.
//
// Compiled by nvcc, by NVRTC (which has no standard headers) and, through an emulator, by a host
// compiler: so nothing is included and no inline assembly is used.

#pragma once

namespace ddl {

using Index = int;               // of an entry, 0 .. 2^31 - 2
using Size = long long;          // a stride past the last index must not overflow
using Bits = unsigned int;       // of a float32
using HalfBits = unsigned short; // of a bfloat16 or float16

constexpr int kThreads = 256; // per block, also the launch wrappers' number

// Where a grid-stride loop starts, and how far it jumps.
__device__ __forceinline__ Size first_entry() {
    return static_cast<Size>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ Size entry_stride() {
    return static_cast<Size>(gridDim.x) * blockDim.x;
}

// Orders magnitudes as integers: infinity is kInfinite, every NaN lies above.
constexpr Bits kMagnitude = 0x7fffffffu;
constexpr Bits kInfinite = 0x7f800000u;

__device__ __forceinline__ Bits magnitude_key(float value) {
    return __float_as_uint(value) & kMagnitude;
}

// Round to nearest, ties to even, as torch does. A NaN stays a NaN.
__device__ __forceinline__ HalfBits to_bfloat16(float value) {
    const Bits bits = __float_as_uint(value);
    if (magnitude_key(value) > kInfinite) return static_cast<HalfBits>(bits >> 16 | 0x0040u);
    return static_cast<HalfBits>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

__device__ __forceinline__ HalfBits to_float16(float value) {
    const Bits key = magnitude_key(value);
    const Bits sign = __float_as_uint(value) >> 16 & 0x8000u;
    if (key > kInfinite) return static_cast<HalfBits>(sign | 0x7e00u);
    // From 65520 on, half way between the largest float16 and the next power of two: infinity.
    if (key >= 0x477ff000u) return static_cast<HalfBits>(sign | 0x7c00u);
    if (key < 0x38800000u) {
        // Below 2^-14 float16 counts in steps of 2^-24. The sum with 0.5, whose own last bit is
        // worth 2^-24, rounds to such a step; its last bits are the answer.
        const Bits steps = __float_as_uint(__fadd_rn(__uint_as_float(key), 0.5f)) - 0x3f000000u;
        return static_cast<HalfBits>(sign | steps);
    }
    const Bits rounded = key + 0x0fffu + (key >> 13 & 1u);
    return static_cast<HalfBits>(sign | (rounded - 0x38000000u) >> 13); // bias 127 to 15
}

} // namespace ddl
