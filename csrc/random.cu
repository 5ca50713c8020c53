// The images of 0 .. k - 1 under a keyed permutation of [0, numel): distinct indices, unsorted.
//
// 1. A Feistel network permutes [0, 2^(2h)), the smallest such domain that holds numel.
// 2. An image outside [0, numel) is permuted again until it falls inside (cycle walking).
//
// The same arithmetic as everywhere, so that all ranks draw the same indices.

#include "common.cuh"

using namespace ddl;

namespace {

constexpr int kRounds = 8;

__device__ Wide mix(Wide state) { // splitmix64
    Wide mixed = (state ^ state >> 30) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebull;
    return mixed ^ mixed >> 31;
}

__device__ Wide permute(Wide number, Wide seed, int half_bits) {
    const Wide low = (1ull << half_bits) - 1;
    Wide left = number >> half_bits, right = number & low;
    Wide state = seed;
    for (int round = 0; round < kRounds; ++round) {
        state += 0x9e3779b97f4a7c15ull;
        Count mixed = static_cast<Count>(right) + static_cast<Count>(mix(state) >> 32);
        mixed = (mixed ^ mixed >> 16) * 0x45d9f3bu;
        mixed = (mixed ^ mixed >> 16) * 0x45d9f3bu;
        const Wide next = left ^ ((mixed ^ mixed >> 16) & low);
        left = right;
        right = next;
    }
    return left << half_bits | right;
}

} // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    draw(Index *__restrict__ indices, Size count, Size numel, Wide seed, int half_bits) {
    for (Size i = first_entry(); i < count; i += entry_stride()) {
        Wide number = static_cast<Wide>(i);
        do number = permute(number, seed, half_bits);
        while (number >= static_cast<Wide>(numel));
        indices[i] = static_cast<Index>(number);
    }
}
