// Add two index-sorted sparse vectors, keep the k largest magnitudes of the sum, and say what
// became of every entry.
//
// Both together are a list of len(a) + len(b) slots in index order; where both have an index, the
// entry of a holds the sum and the slot behind it stays empty. Padding comes last and stays empty.
//
// 1. merge_slots    by binary search in the other vector every entry finds its slot; count digit 1
// 2. merge_settle   phase 2 to 5: the steps of settle.cuh
// 3. merge_fates    an entry's fate is that of its slot
//
// Sums that are not finite rank as the largest, all alike; zeros are entries like others, so that a
// key is a magnitude's bits plus one.

#include "settle.cuh"

using namespace ddl;

namespace {

struct Slots {
    Index *indices;
    float *values;
    Bits *keys;   // 0: empty
    Index *fates; // place in the output, or -1
};

__device__ __forceinline__ Bits rank_of(float sum) {
    return (is_finite(sum) ? magnitude_key(sum) : kInfinite) + 1;
}

// How many of `indices` lie below `index`.
__device__ __forceinline__ Size count_below(const Index *indices, Size count, Index index) {
    Size low = 0, high = count;
    while (low < high) {
        const Size middle = (low + high) / 2;
        if (indices[middle] < index)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct Merged {
    Slots slots;
    Size count;
    Index *out_indices;
    float *out_values;

    __device__ Size size() const { return count; }
    __device__ void load(Size first, Bits *keys) const {
        for (int j = 0; j < kGroup; ++j) keys[j] = first + j < count ? slots.keys[first + j] : 0;
    }
    __device__ void keep(Size slot, Count place) const {
        out_indices[place] = slots.indices[slot];
        out_values[place] = slots.values[slot];
        slots.fates[slot] = static_cast<Index>(place);
    }
    __device__ void drop(Size) const {} // -1 already
};

} // namespace

// slot_of_a, slot_of_b: the slot that decides each entry's fate.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_slots(const Index *__restrict__ a_indices, const float *__restrict__ a_values,
                Size a_count, const Index *__restrict__ b_indices,
                const float *__restrict__ b_values, Size b_count, Index *slot_indices,
                float *slot_values, Bits *slot_keys, Index *slot_fates, Index *slot_of_a,
                Index *slot_of_b, Search *search) {
    __shared__ Count bins[kMostBins];
    Histogram<1> histogram(bins);
    for (Size i = first_entry(); i < a_count + b_count; i += entry_stride()) {
        const bool of_a = i < a_count;
        const Size own = of_a ? i : i - a_count;
        const Index index = of_a ? a_indices[own] : b_indices[own];
        const bool padding = index == kPadding;
        Size slot, decides;
        float value = of_a ? a_values[own] : b_values[own];
        bool empty = padding;
        if (of_a) {
            const Size other = count_below(b_indices, b_count, index);
            slot = decides = own + other;
            if (!padding && other < b_count && b_indices[other] == index)
                value = __fadd_rn(value, b_values[other]);
        } else {
            // All of a, its padding too, comes before b's padding.
            const Size other = padding ? a_count : count_below(a_indices, a_count, index);
            const bool met = !padding && other < a_count && a_indices[other] == index;
            slot = own + other + met;
            decides = own + other;
            empty = padding || met;
        }
        const Bits key = empty ? 0 : rank_of(value);
        slot_indices[slot] = index;
        slot_values[slot] = value;
        slot_keys[slot] = key;
        slot_fates[slot] = -1;
        (of_a ? slot_of_a : slot_of_b)[own] = static_cast<Index>(decides);
        histogram.add(key, 0);
    }
    histogram.add_to(search);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    merge_settle(int phase, Count k, Index *slot_indices, float *slot_values, Bits *slot_keys,
                 Index *slot_fates, Size slots, Search *search, Wide *kept_of_blocks,
                 Index *out_indices, float *out_values, Size capacity, int *report) {
    __shared__ Count bins[kMostBins];
    Merged source = {
        {slot_indices, slot_values, slot_keys, slot_fates}, slots, out_indices, out_values};
    if (phase == 2) count_digit<2>(source, find_first(search, k).digits, search, bins);
    if (phase == 3) count_digit<3>(source, find_second(search).digits, search, bins);
    if (phase == 4) count_kept(source, find_third(search).digits, kept_of_blocks);
    if (phase == 5) {
        const Found cutoff = search->found[2];
        const Count count = emit(source, cutoff.digits, cutoff.rank, kept_of_blocks);
        pad(out_indices, out_values, count, capacity);
        if (first_entry() == 0) report[kReportCount] = static_cast<int>(count);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    merge_fates(const Index *__restrict__ slot_fates, Index *fate_a, Size a_count, Index *fate_b,
                Size b_count) {
    for (Size i = first_entry(); i < a_count + b_count; i += entry_stride()) {
        Index *fate = i < a_count ? fate_a + i : fate_b + (i - a_count);
        *fate = slot_fates[*fate];
    }
}
