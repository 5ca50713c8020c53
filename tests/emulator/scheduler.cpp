// Threads as fibers on one thread of the operating system, in an order drawn by the seed.
//
// 1. Some blocks of the grid are resident. One of them runs until its threads have all ended, or
//    until it makes an atomic or a fence and the dice say that another block's turn has come.
// 2. Of a block one thread runs until it waits or ends; then the next one in the queue.
// 3. Where the queue is empty and threads remain, they wait for each other: an error.
//
// A thread that never waits needs no stack of its own: the next thread begins on the same one.

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "state.h"

namespace emulator {

Machine machine;

namespace {

constexpr size_t kStack = 1 << 17;
constexpr u32 kMostResident = 4;
constexpr u32 kPatience = 16; // an atomic in so many ends the block's turn

const char *const kNames[] = {
    "__syncthreads",    "__syncthreads_count", "__syncthreads_and", "__syncthreads_or",
    "__syncwarp",       "__shfl_sync",         "__shfl_up_sync",    "__shfl_down_sync",
    "__shfl_xor_sync",  "__ballot_sync",       "__any_sync",        "__all_sync",
    "__match_any_sync", "__match_all_sync",    "__reduce_add_sync", "__reduce_add_sync",
    "__reduce_min_sync", "__reduce_min_sync",  "__reduce_max_sync", "__reduce_max_sync",
    "__reduce_and_sync", "__reduce_or_sync",   "__reduce_xor_sync"};

const char *name_of(Meeting meeting) { return kNames[static_cast<int>(meeting)]; }

std::string hexadecimal(u32 value) {
    char text[16];
    std::snprintf(text, sizeof(text), "0x%08x", value);
    return text;
}

std::string at(Place place) {
    const char *slash = std::strrchr(place.file, '/');
    return std::string(slash ? slash + 1 : place.file) + ":" + std::to_string(place.line);
}

// ---- The queue of a block -----------------------------------------------------------------------

void push_back(Block &block, u32 thread) {
    const u32 mask = static_cast<u32>(block.queue.size()) - 1;
    block.queue[(block.head + block.queued++) & mask] = static_cast<u16>(thread);
}

void push_front(Block &block, u32 thread) {
    const u32 mask = static_cast<u32>(block.queue.size()) - 1;
    block.head = (block.head - 1) & mask;
    block.queue[block.head] = static_cast<u16>(thread);
    ++block.queued;
}

u32 pop(Block &block) {
    const u32 mask = static_cast<u32>(block.queue.size()) - 1;
    const u32 thread = block.queue[block.head];
    block.head = (block.head + 1) & mask;
    --block.queued;
    return thread;
}

// Put the numbers 0 .. count - 1 into an order: natural, reversed, by warps, or any.
void draw_order(u16 *order, u32 count) {
    Random &random = machine.random;
    const u32 style = random.below(4);
    for (u32 i = 0; i < count; ++i)
        order[i] = static_cast<u16>(style == 1 ? count - 1 - i : i);
    if (style == 2 && count % kWarp == 0) {
        for (u32 warp = count / kWarp - 1; warp > 0; --warp) {
            const u32 other = random.below(warp + 1);
            for (u32 lane = 0; lane < kWarp; ++lane)
                std::swap(order[warp * kWarp + lane], order[other * kWarp + lane]);
        }
    }
    if (style == 3)
        for (u32 i = count - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
}

// All threads of the block that have not ended can run.
void queue_all(Block &block) {
    u16 order[kMostThreads];
    const u32 count = static_cast<u32>(block.threads.size());
    draw_order(order, count);
    for (u32 i = 0; i < count; ++i)
        if (block.threads[order[i]].waiting != Waiting::kDone) push_back(block, order[i]);
}

// ---- From thread to thread ----------------------------------------------------------------------

void run_threads();

Fiber *take_fiber() {
    Machine &m = machine;
    if (m.free_fibers.empty()) {
        auto *fiber = new Fiber;
        void *memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) fail("there is no memory for the stacks of so many threads");
        fiber->low = static_cast<char *>(memory);
        fiber->bytes = kStack;
        m.all_fibers.push_back(fiber);
        m.free_fibers.push_back(fiber);
    }
    Fiber *fiber = m.free_fibers.back();
    m.free_fibers.pop_back();
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(fiber->low, fiber->bytes);
#endif
    // Stacks begin at different places of a page, lest they all compete for the same cache lines.
    const auto page = reinterpret_cast<uintptr_t>(fiber->low) / kStack;
    prepare_stack(*fiber, fiber->low + kStack - page % 13 * 320, run_threads);
    return fiber;
}

void free_ended() {
    if (machine.ended == nullptr) return;
    machine.free_fibers.push_back(machine.ended);
    machine.ended = nullptr;
}

void become(u32 number) {
    machine.thread_number = number;
    machine.thread = &machine.block->threads[number];
}

// Leave the fiber `from` for the next thread that can run, or for the scheduler.
void go_on(Fiber &from) {
    Machine &m = machine;
    settle_pending();
    Fiber *to = &m.scheduler;
    if (m.block->queued > 0) {
        become(pop(*m.block));
        if (m.thread->fiber == &from) return;
        if (m.thread->fiber == nullptr) m.thread->fiber = take_fiber();
        to = m.thread->fiber;
    }
    change_fiber(from, *to);
    free_ended();
}

// What a fiber does: thread after thread, as long as they have not begun elsewhere.
void run_threads() {
    Machine &m = machine;
    begin_fiber(m.scheduler);
    free_ended();
    for (;;) {
        m.kernel->call(m.arguments.data());
        settle_pending();
        Fiber *const own = m.thread->fiber;
        m.thread->fiber = nullptr;
        m.thread->waiting = Waiting::kDone;
        Block &block = *m.block;
        --block.live;
        if (block.queued > 0 && block.threads[block.queue[block.head]].fiber == nullptr) {
            become(pop(block));
            m.thread->fiber = own;
            continue;
        }
        m.ended = own;
        go_on(*own);
        __builtin_unreachable();
    }
}

// ---- Blocks -------------------------------------------------------------------------------------

void fill_with_garbage(u8 *memory, u64 bytes) {
    // Not a number, far out of any range, or anything; never zero.
    static const u32 kinds[] = {0x7fc0deadu, 0x7f7f7f7fu, 0xdeadbeefu, 0};
    const u32 kind = kinds[machine.random.below(4)];
    u64 word = static_cast<u64>(kind) << 32 | kind;
    Random random = machine.random;
    for (u64 i = 0; i + 8 <= bytes; i += 8) {
        if (kind == 0) {
            random.next();
            word = random.state | 0x0101010101010101ull;
        }
        std::memcpy(memory + i, &word, 8);
    }
    std::memset(memory + bytes / 8 * 8, 0xde, bytes % 8);
}

void begin_block(Block &block, u32 index) {
    Machine &m = machine;
    const u32 count = m.threads_of_block;
    block.index = index;
    block.number = m.first_number + index;
    block.threads.assign(count, Thread());
    block.warps.resize((count + kWarp - 1) / kWarp);
    for (Warp &warp : block.warps) {
        warp.groups.clear();
        warp.synchronised = 0;
    }
    block.live = count;
    block.at_barrier = block.head = block.queued = block.fences = 0;
    block.clock = block.barrier = 1;
    if (block.queue.empty()) block.queue.resize(kMostThreads);
    const u64 shared = m.shared_bytes + m.dynamic_bytes;
    if (m.resident.size() > 1) {
        block.shared.resize(shared);
        fill_with_garbage(block.shared.data(), shared);
    } else {
        fill_with_garbage(m.shared, m.shared_bytes);
        fill_with_garbage(m.dynamic, m.dynamic_bytes);
    }
    if (m.find_races && block.shared_cells.size() < shared / 4 + 2)
        block.shared_cells.resize(shared / 4 + 2);
    block.hidden.clear();
    block.hides = m.weak_memory && m.random.once_in(2);
    block.known.assign(m.find_races ? m.blocks : 0, 0);
    block.heard.assign(m.find_races ? m.blocks : 0, 0);
    queue_all(block);
}

void move_shared(Block &block, bool in) {
    Machine &m = machine;
    if (m.resident.size() < 2) return;
    const auto copy = [in](u8 *memory, u8 *kept, u64 bytes) {
        if (bytes != 0) std::memcpy(in ? memory : kept, in ? kept : memory, bytes);
    };
    copy(m.shared, block.shared.data(), m.shared_bytes);
    copy(m.dynamic, block.shared.data() + m.shared_bytes, m.dynamic_bytes);
}

// Why nothing moves: threads wait for others that wait elsewhere or have ended.
std::string stuck(const Block &block) {
    u32 done = 0, count = 0;
    std::string text;
    struct Group {
        Meeting meeting;
        u32 mask, line, count;
        Place place;
    };
    std::vector<Group> groups;
    for (const Thread &thread : block.threads) {
        if (thread.waiting == Waiting::kDone) {
            ++done;
            continue;
        }
        ++count;
        bool known = false;
        for (Group &group : groups) {
            known = group.meeting == thread.meeting && group.mask == thread.mask &&
                    group.line == thread.place.line;
            if (known) {
                ++group.count;
                break;
            }
        }
        if (!known)
            groups.push_back({thread.meeting, thread.mask, thread.place.line, 1, thread.place});
    }
    for (size_t i = 0; i < groups.size() && i < 4; ++i) {
        const Group &group = groups[i];
        text += std::string(i == 0 ? "" : ", ") + std::to_string(group.count) + " of " +
                std::to_string(block.threads.size()) + " threads wait at " +
                name_of(group.meeting) + " (" + at(group.place) + ")";
        if (group.meeting >= Meeting::kSyncWarp)
            text += " for the lanes " + hexadecimal(group.mask);
    }
    if (groups.size() > 4) text += ", others elsewhere";
    return "deadlock: " + text + ", " + std::to_string(done) + " have ended";
}

} // namespace

std::string here() {
    const Machine &m = machine;
    std::string text = std::string("kernel ") + m.kernel->name;
    if (m.block != nullptr) text += ", block " + std::to_string(m.block->index);
    if (m.thread != nullptr) text += ", thread " + std::to_string(m.thread_number);
    return text;
}

void fail(const std::string &what, void *culprit) {
    Machine &m = machine;
    m.failed = true;
    m.error = here() + ": " + what;
    m.culprit = culprit;
    m.pending.bytes = 0;
    Fiber abandoned; // nobody comes back to it
    change_fiber(abandoned, m.scheduler);
    __builtin_unreachable();
}

void run_grid() {
    Machine &m = machine;
    m.failed = false;
    m.block = nullptr;
    m.thread = nullptr;
    m.scheduler.low = nullptr; // may be another thread's than last time
    m.free_fibers = m.all_fibers;
    m.ended = nullptr;
    m.pending.bytes = 0;
    m.hidden_at_end.clear();
    forget_synchronisation();

    std::vector<u32> order(m.blocks);
    for (u32 i = 0; i < m.blocks; ++i) order[i] = i;
    for (u32 i = m.blocks - 1; i > 0; --i) std::swap(order[i], order[m.random.below(i + 1)]);
    const u32 residents = std::min(m.blocks, 1 + m.random.below(kMostResident));
    m.resident.resize(residents);
    u32 begun = 0;
    for (; begun < residents; ++begun) begin_block(m.resident[begun], order[begun]);

    std::vector<u32> running(residents);
    for (u32 i = 0; i < residents; ++i) running[i] = i;
    while (!running.empty()) {
        const u32 choice = m.random.below(static_cast<u32>(running.size()));
        Block &block = m.resident[running[choice]];
        m.block = &block;
        move_shared(block, true);
        reveal(block);
        become(pop(block));
        if (m.thread->fiber == nullptr) m.thread->fiber = take_fiber();
        change_fiber(m.scheduler, *m.thread->fiber);
        if (m.failed) return;
        free_ended();
        m.thread = nullptr;
        hide(block);
        if (block.queued > 0) { // another block's turn
            move_shared(block, false);
            continue;
        }
        if (block.live > 0) {
            m.failed = true;
            m.error = here() + ": " + stuck(block);
            m.culprit = nullptr;
            return;
        }
        if (!block.hidden.empty()) m.hidden_at_end.push_back(std::move(block.hidden));
        if (begun < m.blocks) {
            begin_block(block, order[begun++]);
        } else {
            running[choice] = running.back();
            running.pop_back();
        }
    }
    m.block = nullptr;
    // The end of a kernel makes everything visible, in any order.
    for (size_t left = m.hidden_at_end.size(); left > 0; --left) {
        std::swap(m.hidden_at_end[m.random.below(static_cast<u32>(left))],
                  m.hidden_at_end[left - 1]);
        Block last;
        last.hidden = std::move(m.hidden_at_end[left - 1]);
        reveal(last);
    }
}

// ---- What kernels call --------------------------------------------------------------------------

Index3 thread_index() { return {machine.thread_number, 0, 0}; }
Index3 block_index() { return {machine.block->index, 0, 0}; }
Index3 block_size() { return {machine.threads_of_block, 1, 1}; }
Index3 grid_size() { return {machine.blocks, 1, 1}; }
void *dynamic_shared() { return machine.dynamic; }
void trap() { fail("__trap() was called", __builtin_return_address(0)); }

int meet_block(Meeting meeting, int predicate, Place place) {
    Machine &m = machine;
    Block &block = *m.block;
    Thread &self = *m.thread;
    settle_pending();
    self.waiting = Waiting::kBlock;
    self.meeting = meeting;
    self.mask = 0;
    self.place = place;
    self.value = predicate != 0;
    if (++block.at_barrier == block.threads.size()) {
        u32 count = 0;
        for (const Thread &thread : block.threads) {
            if (thread.meeting != meeting || thread.place.line != place.line)
                fail("threads wait at different barriers: " + std::string(name_of(meeting)) +
                     " (" + at(place) + ") and " + name_of(thread.meeting) + " (" +
                     at(thread.place) + ")");
            count += static_cast<u32>(thread.value);
        }
        u64 result = count;
        if (meeting == Meeting::kSyncThreadsAnd) result = count == block.threads.size();
        if (meeting == Meeting::kSyncThreadsOr) result = count != 0;
        for (Thread &thread : block.threads) {
            thread.waiting = Waiting::kNot;
            thread.value = result;
        }
        block.at_barrier = 0;
        block.barrier = ++block.clock;
        queue_all(block);
    }
    go_on(*self.fiber);
    return static_cast<int>(self.value);
}

namespace {

u32 combine(Meeting meeting, u32 one, u32 other) {
    const auto signed_one = static_cast<int>(one), signed_other = static_cast<int>(other);
    switch (meeting) {
    case Meeting::kMinSigned: return signed_other < signed_one ? other : one;
    case Meeting::kMinUnsigned: return other < one ? other : one;
    case Meeting::kMaxSigned: return signed_other > signed_one ? other : one;
    case Meeting::kMaxUnsigned: return other > one ? other : one;
    case Meeting::kAnd: return one & other;
    case Meeting::kOr: return one | other;
    case Meeting::kXor: return one ^ other;
    default: return one + other;
    }
}

// All lanes that `mask` names have come: give each its answer.
void answer(Block &block, u32 warp, Meeting meeting, u32 mask) {
    Thread *const lanes = &block.threads[warp * kWarp];
    u64 values[kWarp] = {};
    u32 set = 0, combined = 0;
    for (u32 lane = 0; lane < kWarp; ++lane) {
        if ((mask >> lane & 1u) == 0) continue;
        const u64 value = values[lane] = lanes[lane].value;
        if (value != 0) set |= 1u << lane;
        const auto narrow = static_cast<u32>(value);
        const bool first = (mask & ((1u << lane) - 1u)) == 0;
        combined = first ? narrow : combine(meeting, combined, narrow);
    }
    for (u32 lane = 0; lane < kWarp; ++lane) {
        if ((mask >> lane & 1u) == 0) continue;
        Thread &thread = lanes[lane];
        thread.waiting = Waiting::kNot;
        switch (meeting) {
        case Meeting::kShuffle:
        case Meeting::kShuffleUp:
        case Meeting::kShuffleDown:
        case Meeting::kShuffleXor:
            if ((mask >> thread.source & 1u) == 0)
                fail(std::string(name_of(meeting)) + " (" + at(thread.place) + ") of lane " +
                     std::to_string(lane) + " reads lane " + std::to_string(thread.source) +
                     ", which is not in the mask " + hexadecimal(mask));
            thread.value = values[thread.source];
            break;
        case Meeting::kSyncWarp: break;
        case Meeting::kBallot: thread.value = set; break;
        case Meeting::kAny: thread.value = set != 0; break;
        case Meeting::kAll: thread.value = set == mask; break;
        case Meeting::kMatchAny: {
            u32 same = 0;
            for (u32 other = 0; other < kWarp; ++other)
                if ((mask >> other & 1u) != 0 && values[other] == values[lane])
                    same |= 1u << other;
            thread.value = same;
            break;
        }
        case Meeting::kMatchAll: {
            bool same = true;
            for (u32 other = 0; other < kWarp; ++other)
                if ((mask >> other & 1u) != 0 && values[other] != values[lane]) same = false;
            thread.value = same ? mask : 0;
            break;
        }
        default: thread.value = combined;
        }
    }
}

} // namespace

u64 meet_warp(Meeting meeting, u32 mask, u64 value, u32 source, Place place) {
    Machine &m = machine;
    Block &block = *m.block;
    Thread &self = *m.thread;
    settle_pending();
    const u32 lane = m.thread_number % kWarp, warp = m.thread_number / kWarp;
    if ((mask >> lane & 1u) == 0)
        fail(std::string(name_of(meeting)) + " (" + at(place) + "): the mask " +
             hexadecimal(mask) + " does not name lane " + std::to_string(lane) +
             ", which calls it");
    const u32 last = static_cast<u32>(block.threads.size()) - warp * kWarp;
    if (last < kWarp && mask >> last != 0)
        fail(std::string(name_of(meeting)) + " (" + at(place) + "): the mask " +
             hexadecimal(mask) + " names lanes that do not exist");
    self.waiting = Waiting::kWarp;
    self.meeting = meeting;
    self.mask = mask;
    self.source = source;
    self.place = place;
    self.value = value;
    std::vector<Warp::Group> &groups = block.warps[warp].groups;
    size_t g = 0;
    while (g < groups.size() && (groups[g].meeting != meeting || groups[g].mask != mask)) ++g;
    if (g == groups.size()) groups.push_back({meeting, mask, 0});
    groups[g].arrived |= 1u << lane;
    if (groups[g].arrived != mask) {
        go_on(*self.fiber);
        return self.value;
    }
    groups.erase(groups.begin() + static_cast<std::ptrdiff_t>(g));
    answer(block, warp, meeting, mask);
    if (meeting == Meeting::kSyncWarp) block.warps[warp].synchronised = ++block.clock;
    // The others go on soon or late, in one direction or the other; this one sometimes after them.
    const u32 dice = m.random.next();
    const u32 others = mask & ~(1u << lane);
    for (u32 i = 0; i < kWarp; ++i) {
        const u32 other = (dice & 1u) != 0 ? i : kWarp - 1 - i;
        if ((others >> other & 1u) == 0) continue;
        if ((dice & 2u) != 0)
            push_front(block, warp * kWarp + other);
        else
            push_back(block, warp * kWarp + other);
    }
    if ((dice & 12u) == 0) {
        push_back(block, m.thread_number);
        go_on(*self.fiber);
    }
    return self.value;
}

namespace {

// Perhaps it is another block's turn, or another thread's.
void offer_turn() {
    Machine &m = machine;
    if (!m.random.once_in(kPatience)) return;
    settle_pending();
    Fiber &own = *m.thread->fiber;
    Block &block = *m.block;
    if (m.resident.size() > 1 && m.random.once_in(2)) {
        push_front(block, m.thread_number);
        change_fiber(own, m.scheduler);
        free_ended();
    } else if (block.queued > 0) {
        push_back(block, m.thread_number);
        go_on(own);
    }
}

} // namespace

void fence() {
    settle_pending();
    publish();
    ++machine.block->fences;
    Block &block = *machine.block;
    for (size_t i = 0; i < block.known.size(); ++i)
        block.known[i] = std::max(block.known[i], block.heard[i]);
    offer_turn();
}

void touch(const volatile void *address, u32 bytes, Access access) {
    Machine &m = machine;
    if (access == Access::kAtomic) offer_turn();
    if (m.hooked)
        check_access(const_cast<const u8 *>(static_cast<const volatile u8 *>(address)), bytes,
                     access, __builtin_return_address(0));
}

} // namespace emulator
