// What a kernel may access, which block sees whose writes, and which accesses race.
//
// Global memory holds what the running block sees. A block that hides its writes takes them out of
// memory when its turn ends and puts them back when it is its turn again; a fence leaves them in
// for all to see. Atomics and volatile writes act for all at once.
//
// Two accesses of different threads to the same bytes, of which one is a plain write, race unless
// - the block's barrier or, within a warp, __syncwarp lies between them;
// - or, between blocks, the first block made a fence and then an atomic, and the second an atomic
//   at the same place and then a fence (reads that bypass the cache need not that last fence).
//   Volatile writes and reads, too, tell and hear of fences.
// Threads of a block may write the same value to the same place.

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "state.h"

namespace emulator {

namespace {

constexpr u64 kSharedGap = 64; // build.py puts it between variables

// What atomics at a place hand on: for each block the fences that are known to have been made.
std::unordered_map<const u8 *, std::vector<u32>> handed_on;

Stamp conflict; // with the pending write

const SharedVariable *shared_variable_at(const u8 *address) {
    const Machine &m = machine;
    if (address < m.shared || address >= m.shared + m.shared_bytes) return nullptr;
    const u16 number = m.shared_variable_at[static_cast<u64>(address - m.shared) / 4];
    return number == 0 ? nullptr : &m.shared_variables[number - 1];
}

std::string describe(const u8 *address) {
    const Machine &m = machine;
    for (const Region &region : m.regions)
        if (address >= region.begin && address < region.end)
            return "byte " + std::to_string(address - region.begin) + " of argument {" +
                   std::to_string(region.first_argument) + "}";
    if (const SharedVariable *variable = shared_variable_at(address))
        return "byte " + std::to_string(address - m.shared - variable->offset) +
               " of shared variable " + variable->name;
    if (address >= m.shared && address < m.shared + m.shared_bytes)
        return "byte " + std::to_string(address - m.shared) + " of static shared memory";
    return "byte " + std::to_string(address - m.dynamic) + " of dynamic shared memory";
}

bool is_read(Access access) {
    return access == Access::kRead || access == Access::kVolatileRead ||
           access == Access::kConstantRead;
}

bool is_strong(Access access) {
    return access == Access::kAtomic || access == Access::kVolatileRead ||
           access == Access::kVolatileWrite;
}

const char *verb(Access access) {
    switch (access) {
    case Access::kAtomic:
        return "changes atomically";
    case Access::kWrite:
    case Access::kVolatileWrite:
        return "writes";
    default:
        return "reads";
    }
}

[[noreturn]] void fail_race(const u8 *address, Access access, const Stamp &other, bool wrote,
                            void *culprit) {
    const Machine &m = machine;
    std::string text = std::string("race: ") + verb(access) + " " + describe(address) +
                       ", which block " + std::to_string(other.block - m.first_number) +
                       ", thread " + std::to_string(other.thread);
    if ((other.flags & (kManyLanes | kManyWarps | kManyBlocks)) != 0) text += " and others";
    text += wrote ? (other.flags & kAtomicStamp) != 0 ? " changed atomically" : " wrote" : " read";
    if (other.block == m.block->number)
        text += ", with no barrier between";
    else if ((other.flags & kManyBlocks) == 0 &&
             m.block->heard[other.block - m.first_number] > other.fence)
        text += ", with no fence of this block after the atomic that tells of it";
    else
        text += ", with no fence and atomic of that block and atomic and fence of this one between";
    fail(text, culprit);
}

[[noreturn]] void fail_outside(const u8 *address, u64 bytes, Access access, void *culprit) {
    const Machine &m = machine;
    std::string text = std::string(verb(access)) + " " + std::to_string(bytes) + " bytes ";
    for (const SharedVariable &variable : m.shared_variables) {
        const std::ptrdiff_t offset =
            address - m.shared - static_cast<std::ptrdiff_t>(variable.offset);
        if (offset < -8 || offset >= static_cast<std::ptrdiff_t>(variable.bytes + kSharedGap))
            continue;
        fail("out of bounds: " + text + "at byte " + std::to_string(offset) +
                 " of shared variable " + variable.name + ", which has " +
                 std::to_string(variable.bytes) + " bytes",
             culprit);
    }
    const Region *nearest = nullptr;
    std::ptrdiff_t distance = static_cast<std::ptrdiff_t>(kGuard);
    for (const Region &region : m.regions) {
        if (!region.copy_back && !is_read(access)) continue; // meant was another
        const std::ptrdiff_t away =
            address < region.begin ? region.begin - address : address - region.end;
        if (away < distance) {
            distance = away;
            nearest = &region;
        }
    }
    if (nearest != nullptr)
        text += "at byte " + std::to_string(address - nearest->begin) + " of argument {" +
                std::to_string(nearest->first_argument) + "}, which has " +
                std::to_string(nearest->end - nearest->begin) + " bytes";
    else if (reinterpret_cast<uintptr_t>(address) < 65536)
        text += "at a null pointer + " + std::to_string(reinterpret_cast<uintptr_t>(address));
    else if (address >= m.dynamic && address < m.dynamic + kDynamicShared)
        text += "at byte " + std::to_string(address - m.dynamic) +
                " of dynamic shared memory, of which there are " + std::to_string(m.dynamic_bytes);
    else
        text += "that belong to no argument and to no shared memory";
    fail("out of bounds: " + text, culprit);
}

// Whether what `stamp` tells of comes before whatever the running thread does now.
bool comes_before(const Stamp &stamp, bool past_caches) {
    const Machine &m = machine;
    const Block &block = *m.block;
    if (stamp.block == block.number) {
        if (stamp.time < block.barrier) return true;
        if ((stamp.flags & kManyWarps) != 0) return false;
        if (stamp.thread == m.thread_number && (stamp.flags & kManyLanes) == 0) return true;
        return stamp.thread / kWarp == m.thread_number / kWarp &&
               stamp.time < block.warps[m.thread_number / kWarp].synchronised;
    }
    const std::vector<u32> &fences = past_caches ? block.heard : block.known;
    if ((stamp.flags & kManyBlocks) == 0) return fences[stamp.block - m.first_number] > stamp.fence;
    for (u32 other = 0; other < m.blocks; ++other) // of every block something
        if (other != block.index && fences[other] == 0) return false;
    return true;
}

// An atomic or a volatile access hears of what those before it at the same place knew, and tells.
void synchronise(Block &block, const u8 *address, Access access) {
    const auto place = handed_on.find(address);
    if (place != handed_on.end() && access != Access::kVolatileWrite)
        for (size_t i = 0; i < block.heard.size(); ++i)
            block.heard[i] = std::max(block.heard[i], place->second[i]);
    if (block.fences == 0 || is_read(access)) return;
    std::vector<u32> &fences = handed_on[address];
    fences.resize(block.known.size());
    for (size_t i = 0; i < fences.size(); ++i) fences[i] = std::max(fences[i], block.known[i]);
    fences[block.index] = std::max(fences[block.index], block.fences);
}

void look_for_races(const u8 *address, u32 bytes, Cell &cell, bool shared, u8 mask, Access access,
                    void *culprit) {
    const Machine &m = machine;
    const auto matters = [&](const Stamp &stamp) {
        return (stamp.bytes & mask) != 0 &&
               (shared ? stamp.block == m.block->number : stamp.block >= m.first_number);
    };
    const bool strong = is_strong(access);
    if (matters(cell.write)) {
        if (access == Access::kConstantRead)
            fail("__ldg reads " + describe(address) + ", which the same kernel writes", culprit);
        const bool both_strong = strong && (cell.write.flags & kAtomicStamp) != 0;
        if (!both_strong && !comes_before(cell.write, access == Access::kVolatileRead)) {
            if (access != Access::kWrite || cell.write.block != m.block->number ||
                (cell.write.flags & kAtomicStamp) != 0)
                fail_race(address, access, cell.write, true, culprit);
            Pending &pending = machine.pending;
            pending.address = address;
            pending.bytes = bytes;
            std::memcpy(pending.before, address, bytes);
            conflict = cell.write;
            machine.culprit = culprit;
        }
    }
    if (!is_read(access) && matters(cell.read)) {
        const bool both_strong = strong && (cell.read.flags & kAtomicStamp) != 0;
        if (!both_strong && !comes_before(cell.read, false))
            fail_race(address, access, cell.read, false, culprit);
    }
}

void stamp_cell(Cell &cell, u8 mask, Access access) {
    const Machine &m = machine;
    const Block &block = *m.block;
    Stamp now = {
        block.number, block.clock, block.fences, static_cast<u16>(m.thread_number), mask, 0};
    const bool strong = is_strong(access);
    if (strong) now.flags = kAtomicStamp;
    if (!is_read(access)) {
        cell.write = now;
        if (access != Access::kAtomic) cell.read.block = 0;
        return;
    }
    Stamp &before = cell.read;
    if (before.block >= m.first_number && before.block != block.number) {
        now.flags |= kManyBlocks;
    } else if (before.block == block.number) {
        now.flags |= before.flags & kManyBlocks;
        now.bytes |= before.bytes;
        const u32 warp = m.thread_number / kWarp;
        if (before.time >= block.barrier) {
            if (before.thread / kWarp != warp || (before.flags & kManyWarps) != 0)
                now.flags |= kManyWarps;
            else if (before.time >= block.warps[warp].synchronised &&
                     (before.thread != m.thread_number || (before.flags & kManyLanes) != 0))
                now.flags |= kManyLanes;
            if ((before.flags & kAtomicStamp) == 0) now.flags &= static_cast<u8>(~kAtomicStamp);
        }
    }
    before = now;
}

// The bytes of a cell that the running block hides become everyone's.
void publish_bytes(const u8 *cell_address, u8 mask) {
    for (Hidden &hidden : machine.block->hidden)
        if (hidden.address == cell_address) hidden.bytes &= static_cast<u8>(~mask);
}

void hide_write(u8 *cell_address, const Cell &cell, u8 mask) {
    Block &block = *machine.block;
    const Stamp &last = cell.write;
    if (last.block == block.number && last.fence == block.fences && last.flags == 0 &&
        (last.bytes & mask) == mask)
        return; // hidden already
    Hidden hidden = {cell_address, mask, {}};
    std::memcpy(hidden.value, cell_address, 4);
    block.hidden.push_back(hidden);
}

void exchange(Hidden &hidden) {
    for (u32 byte = 0; byte < 4; ++byte)
        if ((hidden.bytes >> byte & 1u) != 0) std::swap(hidden.address[byte], hidden.value[byte]);
}

// Every four bytes of an access.
void check_cells(const u8 *address, u64 bytes, Access access, Cell *cells, const u8 *base,
                 bool shared, void *culprit) {
    const Machine &m = machine;
    u64 offset = static_cast<u64>(address - base);
    const u64 end = offset + bytes;
    while (offset < end) {
        const u64 first = offset & ~u64{3}, last = std::min(end, first + 4);
        const u8 mask = static_cast<u8>(((1u << (last - offset)) - 1u) << (offset - first));
        Cell &cell = cells[first / 4];
        if (m.find_races)
            look_for_races(base + offset, static_cast<u32>(last - offset), cell, shared, mask,
                           access, culprit);
        if (!shared && m.block->hides) {
            auto *cell_address = const_cast<u8 *>(base + first);
            if (access == Access::kWrite)
                hide_write(cell_address, cell, mask);
            else if (!is_read(access))
                publish_bytes(cell_address, mask);
        }
        stamp_cell(cell, mask, access);
        offset = last;
    }
}

} // namespace

void settle_pending() {
    Pending &pending = machine.pending;
    if (pending.bytes == 0) return;
    const bool changed = std::memcmp(pending.before, pending.address, pending.bytes) != 0;
    pending.bytes = 0;
    if (changed) fail_race(pending.address, Access::kWrite, conflict, true, machine.culprit);
}

void check_access(const u8 *address, u64 bytes, Access access, void *culprit) {
    Machine &m = machine;
    settle_pending();
    if (--m.steps_left == 0)
        fail("does not end: more accesses to memory than a launch may make", culprit);
    if (static_cast<u64>(address - m.arena) < m.arena_used) {
        const u16 number = m.lines[static_cast<u64>(address - m.arena) / kLine];
        if (number == 0) fail_outside(address, bytes, access, culprit);
        const Region &region = m.regions[number - 1];
        if (address < region.begin || address + bytes > region.end)
            fail_outside(address, bytes, access, culprit);
        if (access == Access::kAtomic) {
            if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
                fail("misaligned: " + std::string(verb(access)) + " " + describe(address), culprit);
        }
        if (m.find_races && is_strong(access)) synchronise(*m.block, address, access);
        check_cells(address, bytes, access, m.cells, m.arena, false, culprit);
        return;
    }
    const Fiber &fiber = *m.thread->fiber;
    if (static_cast<size_t>(reinterpret_cast<const char *>(address) - fiber.low) < fiber.bytes)
        return;
    Cell *const cells = m.find_races ? m.block->shared_cells.data() : nullptr;
    if (static_cast<u64>(address - m.shared) < m.shared_bytes) {
        if (!m.shared_variables.empty()) {
            const SharedVariable *variable = shared_variable_at(address);
            if (variable == nullptr || address < m.shared + variable->offset ||
                address + bytes > m.shared + variable->offset + variable->bytes)
                fail_outside(address, bytes, access, culprit);
        }
        if (cells != nullptr) check_cells(address, bytes, access, cells, m.shared, true, culprit);
        return;
    }
    if (static_cast<u64>(address - m.dynamic) < m.dynamic_bytes &&
        address + bytes <= m.dynamic + m.dynamic_bytes) {
        if (cells != nullptr)
            check_cells(address, bytes, access, cells + m.shared_bytes / 4 + 1, m.dynamic, true,
                        culprit);
        return;
    }
    if (address >= m.image_begin && address < m.image_end && is_read(access)) return;
    fail_outside(address, bytes, access, culprit);
}

void publish() { machine.block->hidden.clear(); }

// Later entries may lie over earlier ones.
void hide(Block &block) {
    for (size_t i = block.hidden.size(); i > 0; --i) exchange(block.hidden[i - 1]);
}

void reveal(Block &block) {
    for (Hidden &hidden : block.hidden) exchange(hidden);
}

void forget_synchronisation() { handed_on.clear(); }

} // namespace emulator
