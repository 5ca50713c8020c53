// The state of the launch that runs: its blocks, their threads, and who accessed which memory.

#pragma once

#include <string>
#include <vector>

#include "fiber.h"
#include "runtime.h"
#include "trampolines.h"

namespace emulator {

// A generator of the order of things; xorshift64*.
struct Random {
    u64 state = 1;
    void seed(u64 value) {
        value += 0x9e3779b97f4a7c15ull;
        value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
        value = (value ^ value >> 27) * 0x94d049bb133111ebull;
        state = (value ^ value >> 31) | 1;
    }
    u32 next() {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        return static_cast<u32>(state * 0x2545f4914f6cdd1dull >> 32);
    }
    u32 below(u32 bound) { return static_cast<u32>(static_cast<u64>(next()) * bound >> 32); }
    bool once_in(u32 times) { return below(times) == 0; }
};

// Who accessed four bytes last, and when.
struct Stamp {
    u32 block; // its number among all blocks ever run; 0: nobody
    u32 time;  // of the block's clock
    u32 fence; // fences that the block had made
    u16 thread;
    u8 bytes; // which of the four
    u8 flags;
};
constexpr u8 kAtomicStamp = 1, kManyLanes = 2, kManyWarps = 4, kManyBlocks = 8;

struct Cell {
    Stamp write, read;
};

// A write that other blocks do not see yet: memory has the block's own value while the block runs,
// `value` has the others', and the other way round while the block does not run.
struct Hidden {
    u8 *address; // of four bytes
    u8 bytes;
    u8 value[4];
};

enum class Waiting : u8 { kNot, kForBlock, kForWarp, kDone };

struct Thread {
    Fiber *fiber = nullptr; // while it has begun and not ended
    Waiting waiting = Waiting::kNot;
    Meeting meeting = Meeting::kSyncThreads;
    u32 mask = 0, source = 0;
    Place place = {nullptr, 0};
    u64 value = 0; // brought to the meeting, and taken from it
};

struct Warp {
    struct Group {
        Meeting meeting;
        u32 mask, arrived;
    };
    std::vector<Group> groups; // that some lanes wait for
    u32 synchronised = 0;      // when on the block's clock
};

struct Block {
    u32 index = 0;  // in the grid
    u32 number = 0; // among all blocks ever run
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    u32 live = 0;           // threads that have not ended
    u32 at_barrier = 0;     // and wait for all others
    u32 clock = 1;          // counts synchronisations
    u32 barrier = 1;        // when the last of the whole block was
    std::vector<u16> queue; // ring of threads that can run
    u32 head = 0, queued = 0;
    std::vector<u8> shared; // its shared memory while it does not run
    std::vector<Cell> shared_cells;
    std::vector<Hidden> hidden;
    bool hides = false; // its writes until a fence
    u32 fences = 0;
    long long priority = 0;
    u32 fence_offers = 0, atomic_offers = 0, shared_offers = 0; // to let another block run
    std::vector<u32> known, heard; // of each block: fences seen; seen but for the own fence
};

struct Region {
    u8 *begin, *end; // in the arena
    u8 *original;
    u64 first_argument;
    bool copy_back;
};

struct Pending {
    const u8 *address = nullptr; // a write that is allowed if it changes nothing
    u32 bytes = 0;
    u8 before[16];
};

struct Machine {
    // Of the launch.
    const Kernel *kernel = nullptr;
    std::vector<void *> arguments;
    u32 blocks = 0, threads_of_block = 0;
    bool weak_memory = false, find_races = false, hooked = false;
    u32 first_number = 1, next_number = 1; // of its blocks, among all ever run
    u64 steps_left = 0;
    Random random;
    bool failed = false;
    std::string error;
    void *culprit = nullptr; // where in the code

    // Of the thread that runs.
    Block *block = nullptr;
    Thread *thread = nullptr;
    u32 thread_number = 0;
    Pending pending;

    // Blocks.
    std::vector<Block> resident;
    long long lowest_priority = 0;
    std::vector<std::vector<Hidden>> hidden_at_end;
    Fiber scheduler;
    std::vector<Fiber *> free_fibers, all_fibers;
    Fiber *ended = nullptr; // to be freed by who runs next

    // Memory.
    u8 *arena = nullptr;
    u64 arena_bytes = 0, arena_used = 0;
    Cell *cells = nullptr;  // one for each four bytes of the arena
    std::vector<u16> lines; // region of each kLine bytes, from 1
    std::vector<Region> regions;
    u8 *shared = nullptr; // static shared memory
    u64 shared_bytes = 0;
    std::vector<SharedVariable> shared_variables; // with gaps between, or none if unknown
    std::vector<u16> shared_variable_at;          // of each four bytes, from 1
    u8 *dynamic = nullptr;
    u64 dynamic_bytes = 0;
    u8 *image_begin = nullptr, *image_end = nullptr; // of the library: constants
};

extern Machine machine;

constexpr u64 kLine = 256;  // bytes; alignment of the original kept modulo this
constexpr u64 kGuard = 512; // bytes around a region

// Ends the launch; `what` begins in lower case and follows "kernel, block, thread: ".
[[noreturn]] void fail(const std::string &what, void *culprit = nullptr);
std::string here(); // "kernel k, block 1, thread 2"

// scheduler.cpp
void run_grid();
void push_front(Block &block, u32 thread); // onto the queue of those that can run
void push_back(Block &block, u32 thread);
void queue_all(Block &block); // in an order that is drawn
void go_on(Fiber &from);      // leave a fiber for the next thread that can run
void free_ended();            // called by who runs next

// meetings.cpp
void offer_turn(u32 &offers, bool to_blocks); // perhaps others run now
std::string stuck(const Block &block);

// memory.cpp
void check_access(const u8 *address, u64 bytes, Access access, void *culprit);
void settle_pending();
void publish();            // what the block has written
void hide(Block &block);   // before another block runs
void reveal(Block &block); // before the block runs again
void forget_synchronisation();

} // namespace emulator
