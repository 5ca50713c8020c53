// The loops over entries that ddl.kernels runs on a CPU: their table, and words they share.
//
// Plain C to the outside: no torch, no Python, no exceptions, no memory kept between calls. The
// rules of each loop are those of kernels/cpu_*.py, which do the same, to the bit, in Numba.
//
//   loops.h        this: the table of loops
//   loops.inl      every loop, written over blocks of 64 entries
//   portable.cpp   loops.inl for any processor
//   avx2.cpp       the same, compiled for AVX2 and F16C
//   avx512.cpp     the same, with blocks in four registers and candidates picked by compression
//   native.cpp     the exported functions: version, levels, the table of one level

#pragma once

#include <cstdint>

namespace ddl_cpu {

using Index = int32_t;
using Key = int32_t;  // bits of a float32 without the sign: orders magnitudes
using Size = int64_t; // counts and positions
using Word = uint64_t;

// Change it whenever the table or the meaning of an argument changes; kernels/native.py has the
// same number, and refuses a library with another.
constexpr Size kVersion = 1;

constexpr Size kBlock = 64;         // entries; one word of the map of non-finite entries
constexpr Size kChunk = 1 << 16;    // entries summed before they are added to others
constexpr Size kLanes = 16;         // partial sums, and as many of squares, of a chunk
constexpr Size kSampleRun = 4;      // neighbours taken together by a sample
constexpr Key kMagnitude = 0x7fffffff;
constexpr Key kInfinite = 0x7f800000; // every NaN lies above

enum Form : Size { kFloat32, kBFloat16, kFloat16 }; // of the gradient

// What a thread knows of its pass; the numbers are places in an int64 array.
enum State : Size { kPosition, kCount, kLeast, kPassed, kNonfinite };

struct Loops {
    // Selection: see kernels/cpu_accumulate.py and kernels/cpu_select.py.
    Size (*collect)(const void *flat, float *residual, Size hi, float scale, Size form, Size fresh,
                    Size k, Index *indices, float *values, Size start, Size room, Word *poisoned,
                    double *sums, Size *state);
    void (*sample)(const void *flat, const float *residual, Size numel, float scale, Size form,
                   Size fresh, Key *keys, Size wanted);
    void (*take)(float *residual, const Index *indices, Size count, const Word *poisoned,
                 float *out_values);
    Size (*kth_largest)(const Key *keys, Size count, Size k, Size *ties);
    Size (*settle)(float *residual, const Index *indices, const float *values, Size count,
                   Size cutoff, Size ties, Index *out_indices, float *out_values);
    Size (*count_from)(const float *values, Size count, Size least);
    // Sparse vectors: see kernels/cpu_sparse.py.
    Size (*join)(const Index *a_indices, const float *a_values, Size a_count,
                 const Index *b_indices, const float *b_values, Size b_count, Index *indices,
                 float *values, Index *place_a, Index *place_b);
    void (*ranks)(const float *values, Size count, Key *keys);
    void (*keep)(const Index *indices, const float *values, Key *keys, Size count, Size cutoff,
                 Size ties, Index *out_indices, float *out_values, Index *place_a, Size a_count,
                 Index *place_b, Size b_count);
    void (*put32)(uint32_t *dense, const Index *indices, const uint32_t *values, Size count);
    void (*put16)(uint16_t *dense, const Index *indices, const uint16_t *values, Size count);
    void (*add)(float *dense, const Index *indices, const float *values, Size count);
    void (*permute)(Size numel, Size half_bits, const Word *keys, Size rounds, Index *out,
                    Size count);
};

extern const Loops portable_loops;
#if defined(__x86_64__) && defined(__GNUC__)
#define DDL_X86 1
extern const Loops avx2_loops;
extern const Loops avx512_loops;
#endif

} // namespace ddl_cpu
