// The loops for x86 with AVX2 and F16C: those of portable.cpp, in eight lanes instead of four.

#include "loops.h"

#ifdef DDL_X86

#include <cstdlib>
#include <cstring>
#include <immintrin.h>

// FMA is left out on purpose: product and sum are to be rounded one after the other.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#define DDL_F16C 1
#include "block.inl"

#include "loops.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace ddl_cpu {
extern const Loops avx2_loops = kLoops;
}

#endif
