// What threads do together: barriers of a block, exchanges between the lanes of a warp, fences and
// atomics, at which others may take their turn.

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "state.h"

namespace emulator {

namespace {

constexpr long long kLast = 1ll << 40; // priority of who stops until the others are done
constexpr u32 kRarest = 200;           // a turn is taken at least once in so many offers

const char *const kNames[] = {
    "__syncthreads",     "__syncthreads_count", "__syncthreads_and", "__syncthreads_or",
    "__syncwarp",        "__shfl_sync",         "__shfl_up_sync",    "__shfl_down_sync",
    "__shfl_xor_sync",   "__ballot_sync",       "__any_sync",        "__all_sync",
    "__match_any_sync",  "__match_all_sync",    "__reduce_add_sync", "__reduce_add_sync",
    "__reduce_min_sync", "__reduce_min_sync",   "__reduce_max_sync", "__reduce_max_sync",
    "__reduce_and_sync", "__reduce_or_sync",    "__reduce_xor_sync"};

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

} // namespace

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

u32 thread_index() { return machine.thread_number; }
u32 block_index() { return machine.block->index; }
u32 block_size() { return machine.threads_of_block; }
u32 grid_size() { return machine.blocks; }
void *dynamic_shared() { return machine.dynamic; }
void trap() { fail("__trap() was called", __builtin_return_address(0)); }

namespace {

// Out of line, as all that has text to say: a thread that waits should touch little of its stack.
[[noreturn]] __attribute__((noinline, cold)) void fail_meeting(Meeting meeting, Place place,
                                                               const std::string &what) {
    fail(std::string(name_of(meeting)) + " (" + at(place) + ")" + what);
}

// The whole block has come.
__attribute__((noinline)) void release(Block &block, Meeting meeting, Place place) {
    u32 count = 0;
    for (const Thread &thread : block.threads) {
        if (thread.meeting != meeting || thread.place.line != place.line)
            fail_meeting(meeting, place,
                         std::string(" and ") + name_of(thread.meeting) + " (" + at(thread.place) +
                             "): threads wait at different barriers");
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

} // namespace

int meet_block(Meeting meeting, int predicate, Place place) {
    Machine &m = machine;
    Block &block = *m.block;
    Thread &self = *m.thread;
    settle_pending();
    self.waiting = Waiting::kForBlock;
    self.meeting = meeting;
    self.mask = 0;
    self.place = place;
    self.value = predicate != 0;
    if (++block.at_barrier == block.threads.size()) release(block, meeting, place);
    go_on(*self.fiber);
    return static_cast<int>(self.value);
}

namespace {

u32 combine(Meeting meeting, u32 one, u32 other) {
    const auto signed_one = static_cast<int>(one), signed_other = static_cast<int>(other);
    switch (meeting) {
    case Meeting::kMinSigned:
        return signed_other < signed_one ? other : one;
    case Meeting::kMinUnsigned:
        return other < one ? other : one;
    case Meeting::kMaxSigned:
        return signed_other > signed_one ? other : one;
    case Meeting::kMaxUnsigned:
        return other > one ? other : one;
    case Meeting::kAnd:
        return one & other;
    case Meeting::kOr:
        return one | other;
    case Meeting::kXor:
        return one ^ other;
    default:
        return one + other;
    }
}

// All lanes that `mask` names have come: give each its answer.
__attribute__((noinline)) void answer(Block &block, u32 warp, Meeting meeting, u32 mask) {
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
                fail_meeting(meeting, thread.place,
                             " of lane " + std::to_string(lane) + " reads lane " +
                                 std::to_string(thread.source) + ", which is not in the mask " +
                                 hexadecimal(mask));
            thread.value = values[thread.source];
            break;
        case Meeting::kSyncWarp:
            break;
        case Meeting::kBallot:
            thread.value = set;
            break;
        case Meeting::kAny:
            thread.value = set != 0;
            break;
        case Meeting::kAll:
            thread.value = set == mask;
            break;
        case Meeting::kMatchAny: {
            u32 same = 0;
            for (u32 other = 0; other < kWarp; ++other)
                if ((mask >> other & 1u) != 0 && values[other] == values[lane]) same |= 1u << other;
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
        default:
            thread.value = combined;
        }
    }
}

} // namespace

namespace {

[[noreturn]] __attribute__((noinline, cold)) void fail_mask(Meeting meeting, Place place, u32 mask,
                                                            u32 lane) {
    if ((mask >> lane & 1u) != 0)
        fail_meeting(meeting, place,
                     ": the mask " + hexadecimal(mask) + " names lanes that do not exist");
    fail_meeting(meeting, place,
                 ": the mask " + hexadecimal(mask) + " does not name lane " + std::to_string(lane) +
                     ", which calls it");
}

// The lanes that waited go on soon or late, in one direction or the other. Whether the lane that
// came last goes on after them.
__attribute__((noinline)) bool wake(Block &block, u32 warp, Meeting meeting, u32 others) {
    Machine &m = machine;
    if (meeting == Meeting::kSyncWarp) block.warps[warp].synchronised = ++block.clock;
    const u32 dice = m.random.next();
    for (u32 i = 0; i < kWarp; ++i) {
        const u32 other = (dice & 1u) != 0 ? i : kWarp - 1 - i;
        if ((others >> other & 1u) == 0) continue;
        if ((dice & 2u) != 0)
            push_front(block, warp * kWarp + other);
        else
            push_back(block, warp * kWarp + other);
    }
    if ((dice & 12u) != 0) return false;
    push_back(block, m.thread_number);
    return true;
}

} // namespace

u64 meet_warp(Meeting meeting, u32 mask, u64 value, u32 source, Place place) {
    Machine &m = machine;
    Block &block = *m.block;
    Thread &self = *m.thread;
    settle_pending();
    const u32 lane = m.thread_number % kWarp, warp = m.thread_number / kWarp;
    const u32 lanes = static_cast<u32>(block.threads.size()) - warp * kWarp;
    if ((mask >> lane & 1u) == 0 || (lanes < kWarp && mask >> lanes != 0))
        fail_mask(meeting, place, mask, lane);
    self.waiting = Waiting::kForWarp;
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
    if (wake(block, warp, meeting, mask & ~(1u << lane))) go_on(*self.fiber);
    return self.value;
}

// Perhaps it is another block's turn, or another thread's; the more rarely the more often it was
// offered, so that a single fence or atomic matters about as much as one of thousands.
void offer_turn(u32 &offers, bool to_blocks) {
    Machine &m = machine;
    Block &block = *m.block;
    const bool taken = m.random.once_in(2 + offers);
    if (offers < kRarest) ++offers;
    if (!taken) return;
    settle_pending();
    Fiber &own = *m.thread->fiber;
    if (to_blocks && m.resident.size() > 1 && !m.random.once_in(4)) {
        push_front(block, m.thread_number);
        block.priority = m.random.once_in(2) ? m.random.next() : --m.lowest_priority;
        if (m.random.once_in(4)) block.priority -= kLast;
        change_fiber(own, m.scheduler);
        free_ended();
    } else if (block.queued > 0) {
        push_back(block, m.thread_number);
        go_on(own);
    }
}

void fence() {
    settle_pending();
    offer_turn(machine.block->fence_offers, true);
    publish();
    ++machine.block->fences;
    Block &block = *machine.block;
    for (size_t i = 0; i < block.known.size(); ++i)
        block.known[i] = std::max(block.known[i], block.heard[i]);
    offer_turn(block.fence_offers, true);
}

void touch(const volatile void *address, u32 bytes, Access access) {
    Machine &m = machine;
    if (access == Access::kAtomic) {
        const auto *byte = static_cast<const volatile u8 *>(address);
        const bool shared = (byte >= m.shared && byte < m.shared + m.shared_bytes) ||
                            (byte >= m.dynamic && byte < m.dynamic + m.dynamic_bytes);
        offer_turn(shared ? m.block->shared_offers : m.block->atomic_offers, !shared);
    }
    if (m.hooked)
        check_access(const_cast<const u8 *>(static_cast<const volatile u8 *>(address)), bytes,
                     access, __builtin_return_address(0));
}

} // namespace emulator
