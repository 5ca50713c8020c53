// CUDA's language for a host compiler: compiles a kernel source unchanged, to run on the CPU.
//
// cuda_emulator.h   this: qualifiers, built-in variables, synchronisation, atomics
// cuda_values.h     vector types, bits, arithmetic
// runtime.h         what these need from the runtime
// scheduler.cpp     threads as fibers, blocks in turn
// meetings.cpp      barriers, exchanges between lanes
// memory.cpp        what may be accessed, who sees whose writes, races
// launch.cpp        one launch: copies of the arguments with guards around them
// hooks.cpp         what the compiler's instrumentation calls
// trampolines.h     from a kernel's name to a call with untyped arguments
//
// Grids and blocks have one dimension.

#pragma once

#include "runtime.h"

#ifdef EMULATOR_SCAN // only to find the kernels
#define __global__ EMULATOR_GLOBAL
#else
#define __global__ __attribute__((noinline))
#endif
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__
// Allowed on a variable of a function, and lies in one stretch whose ends can be told.
#define __shared__ thread_local

#include "cuda_values.h"

#define threadIdx (::emulator::Index3{::emulator::thread_index(), 0, 0})
#define blockIdx (::emulator::Index3{::emulator::block_index(), 0, 0})
#define blockDim (::emulator::Index3{::emulator::block_size(), 1, 1})
#define gridDim (::emulator::Index3{::emulator::grid_size(), 1, 1})
constexpr int warpSize = 32;

// The place where a function of CUDA is called, as defaulted parameters and as an argument.
#define EMULATOR_HERE const char *file = __builtin_FILE(), unsigned line = __builtin_LINE()
#define EMULATOR_PLACE (::emulator::Place{file, line})

inline void __syncthreads(EMULATOR_HERE) {
    ::emulator::meet_block(::emulator::Meeting::kSyncThreads, 0, EMULATOR_PLACE);
}
inline int __syncthreads_count(int predicate, EMULATOR_HERE) {
    return ::emulator::meet_block(::emulator::Meeting::kSyncThreadsCount, predicate,
                                  EMULATOR_PLACE);
}
inline int __syncthreads_and(int predicate, EMULATOR_HERE) {
    return ::emulator::meet_block(::emulator::Meeting::kSyncThreadsAnd, predicate, EMULATOR_PLACE);
}
inline int __syncthreads_or(int predicate, EMULATOR_HERE) {
    return ::emulator::meet_block(::emulator::Meeting::kSyncThreadsOr, predicate, EMULATOR_PLACE);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_HERE) {
    ::emulator::meet_warp(::emulator::Meeting::kSyncWarp, mask, 0, 0, EMULATOR_PLACE);
}
inline void __threadfence() { ::emulator::fence(); }
inline void __threadfence_system() { ::emulator::fence(); }
inline void __threadfence_block() {} // order within a block is that of its one OS thread
[[noreturn]] inline void __trap() { ::emulator::trap(); }

// A lane cannot count on any other to be with it.
inline unsigned __activemask() { return 1u << ::emulator::thread_index() % ::emulator::kWarp; }

// ---- Between lanes ------------------------------------------------------------------------------

namespace emulator {

inline u32 lane() { return thread_index() % kWarp; }

template <class T>
EMULATOR_UNHOOKED inline T shuffle(Meeting meeting, u32 mask, T value, u32 source, Place place) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    u64 bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = meet_warp(meeting, mask, bits, source, place);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

// Lanes lie in sections of `width`; a source outside of the own section is replaced by oneself.
inline u32 section_begin(u32 width) { return lane() & ~(width - 1); }
inline u32 source_up(u32 delta, u32 width) {
    return lane() - section_begin(width) < delta ? lane() : lane() - delta;
}
inline u32 source_down(u32 delta, u32 width) {
    return lane() - section_begin(width) + delta >= width ? lane() : lane() + delta;
}
inline u32 source_xor(u32 bits, u32 width) {
    const u32 source = lane() ^ bits;
    return source >= section_begin(width) + width ? lane() : source;
}

} // namespace emulator

#define EMULATOR_SHUFFLES(T)                                                                       \
    inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_HERE) {      \
        const unsigned from = ::emulator::section_begin(width) + (source & (width - 1));           \
        return ::emulator::shuffle(::emulator::Meeting::kShuffle, mask, value, from,               \
                                   EMULATOR_PLACE);                                                \
    }                                                                                              \
    inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,                \
                            EMULATOR_HERE) {                                                       \
        return ::emulator::shuffle(::emulator::Meeting::kShuffleUp, mask, value,                   \
                                   ::emulator::source_up(delta, width), EMULATOR_PLACE);           \
    }                                                                                              \
    inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,              \
                              EMULATOR_HERE) {                                                     \
        return ::emulator::shuffle(::emulator::Meeting::kShuffleDown, mask, value,                 \
                                   ::emulator::source_down(delta, width), EMULATOR_PLACE);         \
    }                                                                                              \
    inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMULATOR_HERE) {    \
        return ::emulator::shuffle(::emulator::Meeting::kShuffleXor, mask, value,                  \
                                   ::emulator::source_xor(bits, width), EMULATOR_PLACE);           \
    }
EMULATOR_SHUFFLES(int)
EMULATOR_SHUFFLES(unsigned)
EMULATOR_SHUFFLES(long)
EMULATOR_SHUFFLES(unsigned long)
EMULATOR_SHUFFLES(long long)
EMULATOR_SHUFFLES(unsigned long long)
EMULATOR_SHUFFLES(float)
EMULATOR_SHUFFLES(double)

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_HERE) {
    return static_cast<unsigned>(::emulator::meet_warp(::emulator::Meeting::kBallot, mask,
                                                       predicate != 0, 0, EMULATOR_PLACE));
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_HERE) {
    return static_cast<int>(
        ::emulator::meet_warp(::emulator::Meeting::kAny, mask, predicate != 0, 0, EMULATOR_PLACE));
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_HERE) {
    return static_cast<int>(
        ::emulator::meet_warp(::emulator::Meeting::kAll, mask, predicate != 0, 0, EMULATOR_PLACE));
}

namespace emulator {

template <class T> EMULATOR_UNHOOKED inline u64 bits_of(T value) {
    u64 bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}

} // namespace emulator

template <class T> inline unsigned __match_any_sync(unsigned mask, T value, EMULATOR_HERE) {
    return static_cast<unsigned>(::emulator::meet_warp(
        ::emulator::Meeting::kMatchAny, mask, ::emulator::bits_of(value), 0, EMULATOR_PLACE));
}
template <class T>
inline unsigned __match_all_sync(unsigned mask, T value, int *all, EMULATOR_HERE) {
    const unsigned lanes = static_cast<unsigned>(::emulator::meet_warp(
        ::emulator::Meeting::kMatchAll, mask, ::emulator::bits_of(value), 0, EMULATOR_PLACE));
    *all = lanes != 0;
    return lanes;
}

#define EMULATOR_REDUCE(NAME, T, MEETING)                                                          \
    inline T __reduce_##NAME##_sync(unsigned mask, T value, EMULATOR_HERE) {                       \
        return static_cast<T>(::emulator::meet_warp(                                               \
            ::emulator::Meeting::MEETING, mask, ::emulator::bits_of(value), 0, EMULATOR_PLACE));   \
    }
EMULATOR_REDUCE(add, int, kAddSigned)
EMULATOR_REDUCE(add, unsigned, kAddUnsigned)
EMULATOR_REDUCE(min, int, kMinSigned)
EMULATOR_REDUCE(min, unsigned, kMinUnsigned)
EMULATOR_REDUCE(max, int, kMaxSigned)
EMULATOR_REDUCE(max, unsigned, kMaxUnsigned)
EMULATOR_REDUCE(and, unsigned, kAnd)
EMULATOR_REDUCE(or, unsigned, kOr)
EMULATOR_REDUCE(xor, unsigned, kXor)

// ---- Atomics and loads with a hint --------------------------------------------------------------

namespace emulator {

// No other thread runs between the read and the write: fibers only change where they wait.
template <class T, class Change>
EMULATOR_UNHOOKED __attribute__((noinline)) T change(T *address, Change changed) {
    touch(address, sizeof(T), Access::kAtomic);
    const T old = *address;
    *address = changed(old);
    return old;
}

template <class T>
EMULATOR_UNHOOKED __attribute__((noinline)) T load(const T *address, Access access) {
    touch(address, sizeof(T), access);
    return *address;
}

template <class T> EMULATOR_UNHOOKED __attribute__((noinline)) void store(T *address, T value) {
    touch(address, sizeof(T), Access::kWrite);
    *address = value;
}

} // namespace emulator

#define EMULATOR_ATOMIC(NAME, T, CHANGED)                                                          \
    inline T NAME(T *address, T value) {                                                           \
        return ::emulator::change(                                                                 \
            address, [value](T old) EMULATOR_UNHOOKED { return static_cast<T>(CHANGED); });        \
    }
#define EMULATOR_ATOMICS(T)                                                                        \
    EMULATOR_ATOMIC(atomicExch, T, (static_cast<void>(old), value))                                \
    EMULATOR_ATOMIC(atomicMax, T, old > value ? old : value)                                       \
    EMULATOR_ATOMIC(atomicMin, T, old < value ? old : value)                                       \
    EMULATOR_ATOMIC(atomicAnd, T, old &value)                                                      \
    EMULATOR_ATOMIC(atomicOr, T, old | value)                                                      \
    EMULATOR_ATOMIC(atomicXor, T, old ^ value)                                                     \
    inline T atomicCAS(T *address, T expected, T value) {                                          \
        return ::emulator::change(address, [expected, value](T old) EMULATOR_UNHOOKED {            \
            return old == expected ? value : old;                                                  \
        });                                                                                        \
    }
EMULATOR_ATOMICS(int)
EMULATOR_ATOMICS(unsigned)
EMULATOR_ATOMICS(unsigned long long)
EMULATOR_ATOMIC(atomicMax, long long, old > value ? old : value)
EMULATOR_ATOMIC(atomicMin, long long, old < value ? old : value)
EMULATOR_ATOMIC(atomicAdd, int, static_cast<unsigned>(old) + static_cast<unsigned>(value))
EMULATOR_ATOMIC(atomicAdd, unsigned, old + value)
EMULATOR_ATOMIC(atomicAdd, unsigned long long, old + value)
EMULATOR_ATOMIC(atomicAdd, float, old + value)
EMULATOR_ATOMIC(atomicAdd, double, old + value)
EMULATOR_ATOMIC(atomicSub, int, static_cast<unsigned>(old) - static_cast<unsigned>(value))
EMULATOR_ATOMIC(atomicSub, unsigned, old - value)
EMULATOR_ATOMIC(atomicExch, float, (static_cast<void>(old), value))
EMULATOR_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
EMULATOR_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)

template <class T> inline T __ldg(const T *address) {
    return ::emulator::load(address, ::emulator::Access::kConstantRead);
}
template <class T> inline T __ldcg(const T *address) {
    return ::emulator::load(address, ::emulator::Access::kVolatileRead);
}
template <class T> inline T __ldcv(const T *address) {
    return ::emulator::load(address, ::emulator::Access::kVolatileRead);
}
template <class T> inline T __ldca(const T *address) {
    return ::emulator::load(address, ::emulator::Access::kRead);
}
template <class T> inline T __ldcs(const T *address) {
    return ::emulator::load(address, ::emulator::Access::kRead);
}
template <class T> inline void __stcs(T *address, T value) { ::emulator::store(address, value); }
template <class T> inline void __stcg(T *address, T value) { ::emulator::store(address, value); }
template <class T> inline void __stwb(T *address, T value) { ::emulator::store(address, value); }
