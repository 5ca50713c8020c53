// What compiled kernels ask of the emulator's runtime. Nothing of the standard library is included,
// so that kernels compile fast and see no more names than under NVRTC.

#pragma once

// Kernels are compiled with a hook before every access to memory; the emulator's own code is not.
#define EMULATOR_UNHOOKED __attribute__((no_sanitize("thread"), no_sanitize("undefined")))

namespace emulator {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kWarp = 32;
constexpr u32 kMostThreads = 1024;    // of a block
constexpr u32 kDynamicShared = 98304; // bytes, at most

// A place in the source, to tell where threads wait.
struct Place {
    const char *file;
    u32 line;
};

struct Index3 {
    u32 x, y, z;
};

// "const" lets the compiler keep a thread's own index, which never changes for it.
u32 thread_index() __attribute__((const));
u32 block_index() __attribute__((const));
u32 block_size() __attribute__((const));
u32 grid_size() __attribute__((const));

// What threads do together. The order is that of the names in meetings.cpp.
enum class Meeting : u8 {
    kSyncThreads,
    kSyncThreadsCount,
    kSyncThreadsAnd,
    kSyncThreadsOr,
    kSyncWarp,
    kShuffle,
    kShuffleUp,
    kShuffleDown,
    kShuffleXor,
    kBallot,
    kAny,
    kAll,
    kMatchAny,
    kMatchAll,
    kAddSigned,
    kAddUnsigned,
    kMinSigned,
    kMinUnsigned,
    kMaxSigned,
    kMaxUnsigned,
    kAnd,
    kOr,
    kXor,
};

// Wait for every thread of the block. Returns what they found out together about `predicate`.
int meet_block(Meeting meeting, int predicate, Place place);

// Wait for every lane that `mask` names. For shuffles `source` is a lane.
u64 meet_warp(Meeting meeting, u32 mask, u64 value, u32 source, Place place);

void fence();
void *dynamic_shared();
[[noreturn]] void trap();

enum class Access : u8 {
    kRead,
    kWrite,
    kVolatileRead, // also those that bypass the cache next to the processor
    kVolatileWrite,
    kConstantRead, // promised not to change while the kernel runs
    kAtomic,
};

// Called before an access; other threads may run inside when it is atomic.
void touch(const volatile void *address, u32 bytes, Access access);

} // namespace emulator
