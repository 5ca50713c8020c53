// The exported functions. kernels/native.py reads the table of a level and calls through it.

#include "loops.h"

#define DDL_EXPORT extern "C" __attribute__((visibility("default")))

using namespace ddl_cpu;

DDL_EXPORT int64_t ddl_native_version() { return kVersion; }

// The highest level this processor and operating system run: 0 portable, 1 AVX2, 2 AVX-512.
DDL_EXPORT int64_t ddl_native_level() {
#ifdef DDL_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("bmi2"))
        return 2;
    // Every processor with AVX2 has F16C, which compilers of 2022 cannot ask for.
    if (__builtin_cpu_supports("avx2")) return 1;
#endif
    return 0;
}

DDL_EXPORT const Loops *ddl_native_loops(int64_t level) {
#ifdef DDL_X86
    if (level == 2) return &avx512_loops;
    if (level == 1) return &avx2_loops;
#endif
    return &portable_loops;
}
