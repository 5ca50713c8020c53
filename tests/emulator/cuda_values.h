// CUDA's vector types, bit functions and arithmetic, as a kernel has them without any header.

#pragma once

using size_t = decltype(sizeof(0));

// ---- Vectors, aligned as on the device ----------------------------------------------------------

#define EMULATOR_VECTORS(T, NAME, ALIGN2, ALIGN4)                                                  \
    struct NAME##1 { T x; };                                                                       \
    struct alignas(ALIGN2) NAME##2 { T x, y; };                                                    \
    struct NAME##3 { T x, y, z; };                                                                 \
    struct alignas(ALIGN4) NAME##4 { T x, y, z, w; };                                              \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                     \
    inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                             \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTORS(signed char, char, 2, 4)
EMULATOR_VECTORS(unsigned char, uchar, 2, 4)
EMULATOR_VECTORS(short, short, 4, 8)
EMULATOR_VECTORS(unsigned short, ushort, 4, 8)
EMULATOR_VECTORS(int, int, 8, 16)
EMULATOR_VECTORS(unsigned int, uint, 8, 16)
EMULATOR_VECTORS(long long, longlong, 16, 16)
EMULATOR_VECTORS(unsigned long long, ulonglong, 16, 16)
EMULATOR_VECTORS(float, float, 8, 16)
EMULATOR_VECTORS(double, double, 16, 16)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- Bits ---------------------------------------------------------------------------------------

#define EMULATOR_CAST(NAME, FROM, TO)                                                              \
    EMULATOR_UNHOOKED inline TO NAME(FROM value) {                                                 \
        TO result;                                                                                 \
        static_assert(sizeof(FROM) == sizeof(TO), "the same bits");                                \
        __builtin_memcpy(&result, &value, sizeof(result));                                         \
        return result;                                                                             \
    }
EMULATOR_CAST(__float_as_uint, float, unsigned)
EMULATOR_CAST(__uint_as_float, unsigned, float)
EMULATOR_CAST(__float_as_int, float, int)
EMULATOR_CAST(__int_as_float, int, float)
EMULATOR_CAST(__double_as_longlong, double, long long)
EMULATOR_CAST(__longlong_as_double, long long, double)

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
    return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1u) << (31 - bit);
    return reversed;
}
inline unsigned long long __brevll(unsigned long long x) {
    return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 |
           __brev(static_cast<unsigned>(x >> 32));
}
inline unsigned __umulhi(unsigned x, unsigned y) {
    return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(both << (shift & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(both >> (shift & 31u));
}

// ---- Arithmetic; compiled without contraction, so that each operation rounds on its own ---------

inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __dsqrt_rn(double x) { return __builtin_sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return __builtin_fma(x, y, z); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline double __int2double_rn(int x) { return static_cast<double>(x); }
inline double __uint2double_rn(unsigned x) { return static_cast<double>(x); }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }

#define EMULATOR_LESSER(T)                                                                         \
    inline T min(T x, T y) { return y < x ? y : x; }                                               \
    inline T max(T x, T y) { return x < y ? y : x; }
EMULATOR_LESSER(int)
EMULATOR_LESSER(unsigned)
EMULATOR_LESSER(long)
EMULATOR_LESSER(unsigned long)
EMULATOR_LESSER(long long)
EMULATOR_LESSER(unsigned long long)
#define EMULATOR_LESSER_OF(T, OTHER)                                                               \
    inline OTHER min(T x, OTHER y) { return min(static_cast<OTHER>(x), y); }                       \
    inline OTHER min(OTHER x, T y) { return min(x, static_cast<OTHER>(y)); }                       \
    inline OTHER max(T x, OTHER y) { return max(static_cast<OTHER>(x), y); }                       \
    inline OTHER max(OTHER x, T y) { return max(x, static_cast<OTHER>(y)); }
EMULATOR_LESSER_OF(int, unsigned)
EMULATOR_LESSER_OF(long long, unsigned long long)

// A NaN gives way to the other, as in fmin and fmax.
inline float min(float x, float y) { return __builtin_fminf(x, y); }
inline float max(float x, float y) { return __builtin_fmaxf(x, y); }
inline double min(double x, double y) { return __builtin_fmin(x, y); }
inline double max(double x, double y) { return __builtin_fmax(x, y); }

#define EMULATOR_MATH(NAME)                                                                        \
    extern "C" double NAME(double) noexcept;                                                       \
    extern "C" float NAME##f(float) noexcept;                                                      \
    inline float NAME(float x) { return __builtin_##NAME##f(x); }
EMULATOR_MATH(fabs)
EMULATOR_MATH(sqrt)
EMULATOR_MATH(floor)
EMULATOR_MATH(ceil)
EMULATOR_MATH(trunc)
EMULATOR_MATH(rint)
EMULATOR_MATH(exp)
EMULATOR_MATH(log)
EMULATOR_MATH(log1p)
#define EMULATOR_MATH2(NAME)                                                                       \
    extern "C" double NAME(double, double) noexcept;                                               \
    extern "C" float NAME##f(float, float) noexcept;                                               \
    inline float NAME(float x, float y) { return __builtin_##NAME##f(x, y); }
EMULATOR_MATH2(fmin)
EMULATOR_MATH2(fmax)
EMULATOR_MATH2(copysign)
EMULATOR_MATH2(pow)
extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
extern "C" double ldexp(double, int) noexcept;
extern "C" float ldexpf(float, int) noexcept;
extern "C" int abs(int) noexcept;

inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x) != 0; }
inline bool isinf(double x) { return __builtin_isinf(x) != 0; }
inline bool signbit(float x) { return __builtin_signbit(x) != 0; }
inline bool signbit(double x) { return __builtin_signbit(x) != 0; }
