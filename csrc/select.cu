// Settle the selection among the candidates of accumulate.cu, or where the prediction failed, among
// the whole residual. No launch waits for the host: each looks at the state and does its part.
//
// settle, launched with phase 0, 1, ... 5:
//
//     phase           0          1        2        3        4        5
//     candidates      gather     digit 2  digit 3  count    emit     -
//     residual        give back  digit 1  digit 2  digit 3  count    emit
//
// gather     candidates lie as their tiles were served; copy them in the order of their indices,
//            and count their digit 1
// give back  every candidate returns to the residual
// the others are the steps of settle.cuh; Gaussian-k's thresholds are tried beside digit 2
//
// narrow: the first digits of sampled keys, for the prediction: phase 1 digit 2, 2 digit 3, 3 done.

#include "selection.cuh"

using namespace ddl;

namespace {

struct Output {
    Index *indices; // [capacity]
    float *values;  // [capacity]
    Size capacity;
    __device__ void put(Count place, Index index, float value) const {
        indices[place] = index;
        values[place] = value;
    }
};

// Candidates in the order of their indices. What is dropped returns to the residual.
struct Candidates {
    const Index *indices;
    const float *values;
    Size count;
    float *residual;
    Output output;

    __device__ Size size() const { return count; }
    __device__ void load(Size first, Bits *keys) const {
        for (int j = 0; j < kGroup; ++j)
            keys[j] = first + j < count ? magnitude_key(values[first + j]) : 0;
    }
    __device__ void keep(Size entry, Count place) const {
        output.put(place, indices[entry], values[entry]);
    }
    __device__ void drop(Size entry) const { residual[indices[entry]] = values[entry]; }
};

// The residual itself, in places (see selection.cuh). What is kept leaves a zero behind.
struct Residual {
    float *residual;
    Size numel, shift;
    const Tile *tiles;
    const unsigned char *poisoned;
    Output output;

    __device__ Size size() const { return numel + shift; }
    __device__ void load(Size first, Bits *keys) const {
        const Size e = first - shift;
        for (int j = 0; j < kGroup; ++j) keys[j] = 0;
        if (e >= 0 && e + kGroup <= numel) {
            const float4 four = *reinterpret_cast<const float4 *>(residual + e);
            keys[0] = magnitude_key(four.x), keys[1] = magnitude_key(four.y);
            keys[2] = magnitude_key(four.z), keys[3] = magnitude_key(four.w);
        } else {
            for (int j = 0; j < kGroup; ++j)
                if (e + j >= 0 && e + j < numel) keys[j] = magnitude_key(residual[e + j]);
        }
        if (tiles[first / kTile].nonfinite == 0) return;
        for (int j = 0; j < kGroup; ++j)
            if (is_poisoned(tiles, poisoned, first + j)) keys[j] = 0; // still holds its old value
    }
    __device__ void keep(Size place_in, Count place) const {
        const Size e = place_in - shift;
        output.put(place, static_cast<Index>(e), residual[e]);
        residual[e] = 0.0f;
    }
    __device__ void drop(Size) const {}
};

// Calls visit(source, destination) for every candidate of the block's tiles: where it lies in the
// buffer and where it comes in the order of indices. Tiles hold few or many, so the candidates of
// kThreads tiles at a time are dealt out evenly.
template <class Visit>
__device__ void visit_candidates(const Tile *tiles, Size tile_count, const Count *passed_of_blocks,
                                 Buffers candidates, Visit visit) {
    __shared__ Count room[kWarps];
    __shared__ Count starts[kThreads], upto[kThreads]; // of tiles: in the buffer; before them
    Count before_block = 0;
    for (unsigned block = threadIdx.x; block < blockIdx.x; block += kThreads)
        before_block += passed_of_blocks[block];
    Count before = block_sums(before_block, room).all;
    const Range range = share_of_block(tile_count);
    for (Size first = range.first; first < range.last; first += kThreads) {
        const Size t = first + threadIdx.x;
        Tile tile = {0, 0, 0};
        if (t < range.last) tile = tiles[t];
        const Count stored = candidates.holds(tile) ? tile.count : 0;
        const Sums<Count> sums = block_sums(stored, room);
        starts[threadIdx.x] = tile.start;
        upto[threadIdx.x] = sums.before;
        __syncthreads();
        for (Count i = threadIdx.x; i < sums.all; i += kThreads) {
            int low = 0; // the last tile that begins at or before i
            for (int step = kThreads / 2; step > 0; step /= 2)
                if (upto[low + step] <= i) low += step;
            visit(starts[low] + (i - upto[low]), before + i);
        }
        before += sums.all; // block_sums has a barrier before the tables are written again
    }
}

// What Gaussian-k decides: the rule of arXiv 1911.08772 over the counts above its thresholds, of
// which 1 and 2 follow upon too few and too many at 0, and 3 to 5 upon those.
__device__ Found gaussian_cutoff(const State *state, Count k, Found exact) {
    if (state->rules == 0) return exact;
    int rule = 0;
    for (int attempt = 0; attempt < 3; ++attempt) {
        const Size count = state->above_rule[rule];
        if (3 * count < 2 * static_cast<Size>(k))
            rule = rule == 0 ? 1 : rule == 1 ? 3 : 4;
        else if (3 * count > 4 * static_cast<Size>(k))
            rule = rule == 0 ? 2 : rule == 1 ? 4 : 5;
        else
            return {state->rule[rule], 0};
    }
    return exact;
}

// How many keys exceed each of Gaussian-k's thresholds.
template <class Source> __device__ void count_above_rules(const Source &source, State *state) {
    const Range chunks = share_of_block((source.size() + kChunk - 1) / kChunk);
    Count above[kRules] = {};
    for (Size chunk = chunks.first; chunk < chunks.last; ++chunk) {
        Bits keys[kGroup];
        source.load(chunk * kChunk + threadIdx.x * kGroup, keys);
        for (int j = 0; j < kGroup; ++j)
            for (int rule = 0; rule < kRules; ++rule)
                above[rule] += keys[j] != 0 && keys[j] > state->rule[rule];
    }
    for (int rule = 0; rule < kRules; ++rule) {
        const Count of_warp = sum_up_to_lane(above[rule]);
        if (lane() == kWarp - 1 && of_warp != 0) atomicAdd(&state->above_rule[rule], of_warp);
    }
}

// Steps 2 to 5 of settle.cuh, and step 1 for the residual.
template <class Source>
__device__ void step(int number, Source source, Count k, State *state, Wide *kept_of_blocks,
                     Count *bins, int *report, bool repaired) {
    Search *search = &state->selected;
    switch (number) {
    case 1:
        count_digit<1>(source, 0, search, bins);
        break;
    case 2:
        count_digit<2>(source, find_first(search, k).digits, search, bins);
        if (state->rules != 0) count_above_rules(source, state);
        break;
    case 3:
        count_digit<3>(source, find_second(search).digits, search, bins);
        break;
    case 4: {
        const Found cutoff = gaussian_cutoff(state, k, find_third(search));
        // Zero stands for nothing yet, so the smallest is sought as the largest complement.
        const Bits above = ~count_kept(source, cutoff.digits, kept_of_blocks);
        if (lane() == 0 && above != ~kNoKey) atomicMax(&state->above, above);
        break;
    }
    case 5: {
        const Found cutoff = gaussian_cutoff(state, k, search->found[2]);
        const Count ties = cutoff.rank;
        const Count count = emit(source, cutoff.digits, ties, kept_of_blocks);
        pad(source.output.indices, source.output.values, count, source.output.capacity);
        if (first_entry() == 0) {
            const Bits above = state->above == 0 ? 0 : ~state->above;
            report[kReportCount] = static_cast<int>(count);
            report[kReportNonfinite] = static_cast<int>(state->passed >> 32);
            report[kReportThreshold] = static_cast<int>(ties != 0 ? cutoff.digits : above);
            report[kReportPassed] = static_cast<int>(static_cast<Count>(state->passed));
            report[kReportRepaired] = repaired;
        }
        break;
    }
    }
}

} // namespace

// k: entries asked for; wanted: candidates that settle it, k or for Gaussian-k 4k/3 + 1.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    settle(int phase, float *residual, Size numel, Count k, Count wanted, Bits given, State *state,
           const Tile *tiles, Size tile_count, const Count *passed_of_blocks, Index *indices,
           float *values, Count capacity, Index *sorted_indices, float *sorted_values,
           const unsigned char *poisoned, Wide *kept_of_blocks, Index *out_indices,
           float *out_values, Size out_capacity, int *report) {
    __shared__ Count bins[kMostBins];
    const Buffers candidates = {indices, values, capacity};
    const Output output = {out_indices, out_values, out_capacity};
    const Bits least = prediction(state, given);
    if (failed(state, wanted, least, capacity)) {
        const Residual source = {residual, numel, shift_of(residual), tiles, poisoned, output};
        if (phase > 0) {
            step(phase, source, k, state, kept_of_blocks, bins, report, true);
            return;
        }
        visit_candidates(tiles, tile_count, passed_of_blocks, candidates,
                         [&](Count from, Count) { residual[indices[from]] = values[from]; });
        return;
    }
    if (phase > 0) {
        const Size count = static_cast<Count>(state->passed);
        const Candidates source = {sorted_indices, sorted_values, count, residual, output};
        if (phase < 5) step(phase + 1, source, k, state, kept_of_blocks, bins, report, false);
        return;
    }
    Histogram<1> histogram(bins);
    visit_candidates(tiles, tile_count, passed_of_blocks, candidates, [&](Count from, Count to) {
        const float value = values[from];
        sorted_indices[to] = indices[from];
        sorted_values[to] = value;
        histogram.add(magnitude_key(value), 0);
    });
    histogram.add_to(&state->selected);
}

namespace {

struct Keys {
    const Bits *keys;
    Size count;
    __device__ Size size() const { return count; }
    __device__ void load(Size first, Bits *group) const {
        for (int j = 0; j < kGroup; ++j) group[j] = first + j < count ? keys[first + j] : 0;
    }
};

} // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    narrow(int phase, const Bits *keys, Size count, Count rank, State *state) {
    __shared__ Count bins[kMostBins];
    Search *search = &state->sampled;
    const Keys source = {keys, count};
    if (phase == 1) count_digit<2>(source, find_first(search, rank).digits, search, bins);
    if (phase == 2) count_digit<3>(source, find_second(search).digits, search, bins);
    if (phase == 3) find_third(search);
}
