// What the launches of one selection hand on to each other.
//
// Tiles are counted from a 16-byte boundary: place 0 is the last such boundary at or before the
// residual's first entry, so entry e is at place e + shift. A group of four places is one load.

#pragma once

#include "settle.cuh"

namespace ddl {

constexpr int kTile =
    4096;                 // entries a block accumulates at a time; the launch wrappers' number too
constexpr int kRules = 6; // thresholds that Gaussian-k may come to try

// Zeroed before the first launch.
struct State {
    Search sampled;    // for the predicted threshold
    Search selected;   // for the selection
    Wide passed;       // entries that reach the prediction; from bit 32 on: that are not finite
    Count finished;    // blocks that have summed up moments
    Bits above;        // all ones minus the smallest key above the cutoff
    Bits rule[kRules]; // keys of Gaussian-k's thresholds
    Count above_rule[kRules]; // and how many keys exceed each
    Count rules;              // 1 if they apply
};

static_assert(sizeof(State) == 49272, "the launch wrappers allocate it: STATE_BYTES in cuda.py");

// What a tile left behind.
struct Tile {
    Count start;     // of its candidates in the buffer
    Count count;     // of them
    Count nonfinite; // of accumulated values; if any, `poisoned` tells which
};

static_assert(sizeof(Tile) == 12, "likewise: TILE_WORDS");

struct Buffers {
    Index *indices; // [capacity]
    float *values;  // [capacity]
    Count capacity;
    __device__ bool holds(const Tile &tile) const {
        return tile.count != 0 && static_cast<Size>(tile.start) + tile.count <= capacity;
    }
};

__device__ __forceinline__ Size shift_of(const float *residual) {
    return static_cast<Size>(reinterpret_cast<Wide>(residual) / sizeof(float) % kGroup);
}

// Poisoned places, a byte for each group of four; only of tiles that have any.
__device__ __forceinline__ bool is_poisoned(const Tile *tiles, const unsigned char *poisoned,
                                            Size place) {
    return tiles[place / kTile].nonfinite != 0 &&
           (poisoned[place / kGroup] >> (place % kGroup) & 1) != 0;
}

// The prediction was of no use: too few candidates below which there is something, or no room.
__device__ __forceinline__ bool failed(const State *state, Count k, Bits least, Count capacity) {
    const Count passed = static_cast<Count>(state->passed);
    return passed > capacity || (passed < k && least > 1);
}

// The caller's prediction, or where it is 0 the sampled one.
__device__ __forceinline__ Bits prediction(const State *state, Bits given) {
    if (given != 0) return given;
    const Found sampled = state->sampled.found[2];
    return sampled.rank == 0 ? 1 : sampled.digits; // a sample of zeros: any other value passes
}

} // namespace ddl
