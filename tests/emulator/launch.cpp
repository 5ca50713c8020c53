// One launch, as the driver asks for it in an array of 64-bit words.
//
//     kernel, blocks, threads, seed, bytes of dynamic shared memory, flags, limit of steps,
//     number of arguments, number of regions
//     per argument: how, what, offset
//     per region: address, bytes, first argument in it, whether to copy it back
//
// A region is memory that arguments point to. Kernels get copies, with guards around them whose
// content is hostile, at addresses as aligned as the originals.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include <cxxabi.h>
#include <link.h>

#include "state.h"

extern "C" const emulator::Kernel emulator_kernels[];
extern "C" const emulator::u32 emulator_kernel_count;
extern "C" const emulator::SharedVariable emulator_shared[]; // ends in one without a name

// In the same stretch as the kernels' shared memory.
static thread_local char emulator_anchor;

namespace emulator {

namespace {

enum How : u64 { kValue, kInRegion, kAddress };
enum Flag : u64 { kWeakMemory = 1, kFindRaces = 2, kHooked = 4 };

std::mutex one_at_a_time;
alignas(16) u8 dynamic_memory[kDynamicShared];

// Not a number as any float, far out of range as any index.
struct Hostile {
    u8 bytes[2 * kLine + kGuard + 8];
    Hostile() {
        static const u8 word[] = {0xad, 0xde, 0xc0, 0x7f};
        for (size_t i = 0; i < sizeof(bytes); ++i) bytes[i] = word[i % 4];
    }
} const hostile;

struct Gap {
    u8 *begin, *end;
};

void find_shared_variables() {
    Machine &m = machine;
    m.shared_variable_at.assign(m.shared_bytes / 4 + 1, 0);
    for (const SharedVariable *v = emulator_shared; v->name != nullptr; ++v) {
        int status = 0;
        char *const whole = abi::__cxa_demangle(v->name, nullptr, nullptr, &status);
        std::string name = whole == nullptr ? v->name : whole;
        std::free(whole);
        const size_t colons = name.rfind("::"); // function(arguments)::variable
        if (colons != std::string::npos) name = name.substr(colons + 2);
        m.shared_variables.push_back({strdup(name.c_str()), v->offset, v->bytes});
        for (u64 byte = v->offset; byte < v->offset + v->bytes; ++byte)
            m.shared_variable_at[byte / 4] = static_cast<u16>(m.shared_variables.size());
    }
}

void find_image() {
    Machine &m = machine;
    static std::ptrdiff_t anchor_offset = -1;
    if (anchor_offset < 0) {
        const auto visit = [](dl_phdr_info *info, size_t, void *) {
            u8 *low = nullptr, *high = nullptr;
            u64 shared = 0;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const auto &header = info->dlpi_phdr[i];
                auto *begin = reinterpret_cast<u8 *>(info->dlpi_addr + header.p_vaddr);
                if (header.p_type == PT_TLS) shared = header.p_memsz;
                if (header.p_type != PT_LOAD) continue;
                if (low == nullptr || begin < low) low = begin;
                high = std::max(high, begin + header.p_memsz);
            }
            const auto *self = reinterpret_cast<const u8 *>(&machine);
            if (self < low || self >= high) return 0;
            machine.image_begin = low;
            machine.image_end = high;
            machine.shared_bytes = shared;
            anchor_offset = &emulator_anchor - static_cast<char *>(info->dlpi_tls_data);
            return 1;
        };
        emulator_anchor = 1; // allocates this thread's copy
        dl_iterate_phdr(visit, nullptr);
        find_shared_variables();
    }
    m.shared = reinterpret_cast<u8 *>(&emulator_anchor) - anchor_offset;
    m.dynamic = dynamic_memory;
}

void *reserve(u64 bytes) {
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

bool grow_arena(u64 bytes, bool with_cells) {
    Machine &m = machine;
    if (bytes > m.arena_bytes) {
        if (m.arena != nullptr) munmap(m.arena, m.arena_bytes);
        if (m.cells != nullptr) munmap(m.cells, m.arena_bytes / 4 * sizeof(Cell));
        m.cells = nullptr;
        m.arena_bytes = 1 << 22;
        while (m.arena_bytes < bytes) m.arena_bytes *= 2;
        m.arena = static_cast<u8 *>(reserve(m.arena_bytes));
        if (m.arena == nullptr) return false;
    }
    if (with_cells && m.cells == nullptr)
        m.cells = static_cast<Cell *>(reserve(m.arena_bytes / 4 * sizeof(Cell)));
    return !with_cells || m.cells != nullptr;
}

// Numbers of blocks tell whose stamps are of this launch; they must not wrap around.
void number_blocks() {
    Machine &m = machine;
    m.first_number = m.next_number;
    m.next_number += m.blocks;
    if (m.next_number >= m.first_number) return;
    m.first_number = 1;
    m.next_number = 1 + m.blocks;
    if (m.cells != nullptr) std::memset(m.cells, 0, m.arena_bytes / 4 * sizeof(Cell));
    for (Block &block : m.resident)
        std::fill(block.shared_cells.begin(), block.shared_cells.end(), Cell());
}

#ifdef __SANITIZE_ADDRESS__
void forbid(const Gap &gap) {
    __asan_poison_memory_region(gap.begin, static_cast<size_t>(gap.end - gap.begin));
}
void allow_all() { __asan_unpoison_memory_region(machine.arena, machine.arena_bytes); }
#else
void forbid(const Gap &) {}
void allow_all() {}
#endif

bool holds(const Gap &gap) {
    const auto phase = reinterpret_cast<uintptr_t>(gap.begin) % 4;
    return std::memcmp(gap.begin, hostile.bytes + phase,
                       static_cast<size_t>(gap.end - gap.begin)) == 0;
}

std::string overwritten(const std::vector<Gap> &gaps) {
    const Machine &m = machine;
    for (size_t i = 0; i < gaps.size(); ++i) {
        if (holds(gaps[i])) continue;
        const bool behind = i > 0 && (i == gaps.size() - 1 || gaps[i].begin[0] != 0xad);
        const Region &region = m.regions[behind ? i - 1 : std::min(i, m.regions.size() - 1)];
        return "out of bounds: memory " + std::string(behind ? "behind" : "before") +
               " argument {" + std::to_string(region.first_argument) + "} was overwritten";
    }
    for (const Region &region : m.regions)
        if (!region.copy_back && std::memcmp(region.begin, region.original,
                                             static_cast<size_t>(region.end - region.begin)) != 0)
            return "argument {" + std::to_string(region.first_argument) +
                   "}, a pointer to const, was changed";
    return "";
}

} // namespace

} // namespace emulator

extern "C" __attribute__((visibility("default"))) emulator::u32
emulator_describe(const emulator::Kernel **kernels) {
    *kernels = emulator_kernels;
    return emulator_kernel_count;
}

// Returns 0, or 1 with a message and the offset of the guilty code in this library (0: unknown).
extern "C" __attribute__((visibility("default"))) int emulator_launch(const emulator::u64 *request,
                                                                      char *message,
                                                                      emulator::u64 message_bytes,
                                                                      emulator::u64 *culprit) {
    using namespace emulator;
    const std::lock_guard<std::mutex> guard(one_at_a_time);
    Machine &m = machine;
    const u64 *word = request;
    m.kernel = &emulator_kernels[*word++];
    m.blocks = static_cast<u32>(*word++);
    m.threads_of_block = static_cast<u32>(*word++);
    m.random.seed(*word++);
    m.dynamic_bytes = *word++;
    const u64 flags = *word++;
    m.weak_memory = (flags & kWeakMemory) != 0;
    m.find_races = (flags & kFindRaces) != 0;
    m.hooked = (flags & kHooked) != 0;
    m.steps_left = *word++;
    const u64 argument_count = *word++, region_count = *word++;
    const u64 *const arguments = word, *const regions = word + 3 * argument_count;
    const auto complain = [&](const std::string &text, void *guilty) {
        std::snprintf(message, message_bytes, "%s", text.c_str());
        *culprit =
            guilty == nullptr ? 0 : static_cast<u64>(static_cast<u8 *>(guilty) - m.image_begin);
        return 1;
    };
    find_image();
    number_blocks();

    u64 needed = kGuard + kLine;
    for (u64 r = 0; r < region_count; ++r) needed += regions[4 * r + 1] + kGuard + 3 * kLine;
    if (!grow_arena(needed, m.hooked))
        return complain("there is no memory for the copies", nullptr);
    allow_all();
    m.lines.assign(needed / kLine + 1, 0);
    m.regions.clear();
    std::vector<Gap> gaps;
    u8 *end = m.arena;
    for (u64 r = 0; r < region_count; ++r) {
        const u64 *region = regions + 4 * r;
        auto *original = reinterpret_cast<u8 *>(region[0]);
        const u64 used = static_cast<u64>(end - m.arena);
        u8 *begin = m.arena + (used + kLine - 1) / kLine * kLine + kGuard + region[0] % kLine;
        gaps.push_back({end, begin});
        end = begin + region[1];
        m.regions.push_back({begin, end, original, region[2], region[3] != 0});
        if (region[1] == 0) continue;
        std::memcpy(begin, original, region[1]);
        for (auto line = (begin - m.arena) / static_cast<std::ptrdiff_t>(kLine);
             line <= (end - 1 - m.arena) / static_cast<std::ptrdiff_t>(kLine); ++line)
            m.lines[static_cast<size_t>(line)] = static_cast<u16>(r + 1);
    }
    gaps.push_back({end, end + kGuard});
    m.arena_used = static_cast<u64>(end + kGuard - m.arena);
    for (const Gap &gap : gaps) {
        const auto phase = reinterpret_cast<uintptr_t>(gap.begin) % 4;
        std::memcpy(gap.begin, hostile.bytes + phase, static_cast<size_t>(gap.end - gap.begin));
        forbid(gap);
    }

    std::vector<u64> values(argument_count);
    m.arguments.resize(argument_count);
    for (u64 a = 0; a < argument_count; ++a) {
        const u64 *argument = arguments + 3 * a;
        values[a] = argument[1];
        if (argument[0] == kInRegion)
            values[a] = reinterpret_cast<u64>(m.regions[argument[1]].begin + argument[2]);
        m.arguments[a] = &values[a];
    }

    run_grid();
    allow_all();
    if (m.failed) return complain(m.error, m.culprit);
    m.thread = nullptr;
    m.block = nullptr;
    const std::string wrong = overwritten(gaps);
    if (!wrong.empty()) return complain(here() + ": " + wrong, nullptr);
    for (const Region &region : m.regions)
        if (region.copy_back && region.end != region.begin)
            std::memcpy(region.original, region.begin,
                        static_cast<size_t>(region.end - region.begin));
    return 0;
}
