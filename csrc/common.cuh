// What every kernel needs: sizes, ranges, sums over a block, bits of float32 and of the two halves.
//
// Compiled by nvcc, by NVRTC (which has no standard headers) and, through an emulator, by a host
// compiler: so nothing is included and no inline assembly is used.

#pragma once

namespace ddl {

using Index = int;               // of an entry, 0 .. 2^31 - 2
using Size = long long;          // a stride past the last index must not overflow
using Count = unsigned int;      // of entries, up to 2^31
using Bits = unsigned int;       // of a float32
using HalfBits = unsigned short; // of a bfloat16 or float16
using Wide = unsigned long long;

constexpr int kThreads = 256; // per block, also the launch wrappers' number
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;

constexpr Index kPadding = 0x7fffffff; // in the place of an index: here is no entry

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / kWarp; }

// Where a grid-stride loop starts, and how far it jumps.
__device__ __forceinline__ Size first_entry() {
    return static_cast<Size>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ Size entry_stride() { return static_cast<Size>(gridDim.x) * blockDim.x; }

// Work parted among the blocks: contiguous and in order, so that what a block finds stands before
// what the next one finds.
struct Range {
    Size first, last;
};

__device__ __forceinline__ Range share_of_block(Size parts) {
    const Size block = blockIdx.x, blocks = gridDim.x;
    return {parts * block / blocks, parts * (block + 1) / blocks};
}

// A sum over the threads before this one and over all threads of a warp or block. T is Count or
// Wide, so that the order of summation does not matter.
template <class T> struct Sums {
    T before, all;
};

template <class T> __device__ __forceinline__ T sum_up_to_lane(T value) {
    for (int step = 1; step < kWarp; step *= 2) {
        const T other = __shfl_up_sync(kAllLanes, value, step);
        if (lane() >= step) value += other;
    }
    return value;
}

// Every thread of the block calls it; `room` [kWarps] is shared memory, free again on return.
template <class T> __device__ __forceinline__ Sums<T> block_sums(T value, T *room) {
    const T upto = sum_up_to_lane(value);
    if (lane() == kWarp - 1) room[warp()] = upto;
    __syncthreads();
    Sums<T> sums = {upto - value, 0};
    for (int w = 0; w < kWarps; ++w) {
        if (w < warp()) sums.before += room[w];
        sums.all += room[w];
    }
    __syncthreads();
    return sums;
}

// Orders magnitudes as integers: infinity is kInfinite, every NaN lies above.
constexpr Bits kMagnitude = 0x7fffffffu;
constexpr Bits kInfinite = 0x7f800000u;

__device__ __forceinline__ Bits magnitude_key(float value) {
    return __float_as_uint(value) & kMagnitude;
}

__device__ __forceinline__ bool is_finite(float value) { return magnitude_key(value) < kInfinite; }

__device__ __forceinline__ float from_bfloat16(HalfBits half) {
    return __uint_as_float(static_cast<Bits>(half) << 16);
}

// The exponents' biases differ by 112, and a product with 2^112 is exact, also for denormals;
// infinity and NaN get float32's exponent of ones.
__device__ __forceinline__ float from_float16(HalfBits half) {
    const Bits special = (half & 0x7c00u) == 0x7c00u ? kInfinite : 0u;
    const Bits sign = static_cast<Bits>(half & 0x8000u) << 16;
    const float scaled = __fmul_rn(__uint_as_float(static_cast<Bits>(half & 0x7fffu) << 13),
                                   __uint_as_float(239u << 23)); // 2^112
    return __uint_as_float(__float_as_uint(scaled) | sign | special);
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
