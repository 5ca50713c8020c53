// Threads as fibers on one thread of the operating system, in an order drawn by the seed.
//
// 1. Some blocks of the grid are resident. One of them runs until its threads have all ended, or
//    until it makes a fence or an atomic in global memory and the dice say that another block's
//    turn has come. The one of the highest priority runs; who had to stop may get the lowest, so
//    that some blocks stop in the middle of what they do until all others are done.
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

// ---- The queue of a block ----------------------------------------------------------------------

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

namespace {

constexpr size_t kStack = 33 << 12; // no power of two, lest all compete for the same TLB entries
constexpr u32 kMostResident = 4;

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
    for (u32 i = 0; i < count; ++i) order[i] = static_cast<u16>(style == 1 ? count - 1 - i : i);
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

} // namespace

// All threads of the block that have not ended can run.
void queue_all(Block &block) {
    u16 order[kMostThreads];
    const u32 count = static_cast<u32>(block.threads.size());
    draw_order(order, count);
    for (u32 i = 0; i < count; ++i)
        if (block.threads[order[i]].waiting != Waiting::kDone) push_back(block, order[i]);
}

namespace {

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

} // namespace

void free_ended() {
    if (machine.ended == nullptr) return;
    machine.free_fibers.push_back(machine.ended);
    machine.ended = nullptr;
}

namespace {

// What the thread after next will need; on its way by then.
void fetch_ahead(const Block &block) {
    const u32 mask = static_cast<u32>(block.queue.size()) - 1;
    const Thread &next = block.threads[block.queue[block.head]];
    if (block.queued > 0 && next.fiber != nullptr) {
        const auto *stack = static_cast<const char *>(next.fiber->saved);
        for (int line = 0; line < 4; ++line) __builtin_prefetch(stack + 64 * line);
    }
    if (block.queued > 1) {
        const Thread &later = block.threads[block.queue[(block.head + 1) & mask]];
        if (later.fiber != nullptr) __builtin_prefetch(later.fiber);
    }
}

void become(u32 number) {
    machine.thread_number = number;
    machine.thread = &machine.block->threads[number];
}

} // namespace

// Leave the fiber `from` for the next thread that can run, or for the scheduler.
void go_on(Fiber &from) {
    Machine &m = machine;
    settle_pending();
    Fiber *to = &m.scheduler;
    if (m.block->queued > 0) {
        become(pop(*m.block));
        if (m.thread->fiber == &from) return;
        fetch_ahead(*m.block);
        if (m.thread->fiber == nullptr) m.thread->fiber = take_fiber();
        to = m.thread->fiber;
    }
    change_fiber(from, *to);
    free_ended();
}

namespace {

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
    block.priority = m.random.next();
    block.live = count;
    block.at_barrier = block.head = block.queued = block.fences = 0;
    block.fence_offers = block.atomic_offers = block.shared_offers = 0;
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
    m.lowest_priority = 0;
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
        u32 choice = 0;
        for (u32 i = 1; i < running.size(); ++i)
            if (m.resident[running[i]].priority > m.resident[running[choice]].priority) choice = i;
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

} // namespace emulator
