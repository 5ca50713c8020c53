// The k largest of a list of keys, exactly, ties to the lower place, in list order.
//
// A key is a magnitude's bits; key 0 means "not to be selected". A source hands out keys four at a
// time and takes the verdicts. Every step is a launch of its own, since it needs what all blocks of
// the step before have found; each block derives that anew, which costs less than handing it on.
//
// 1. histogram: count the keys' upper 11 bits (digit 1)
// 2. histogram: of the keys that share digit 1 with the k-th largest, count the next 10 bits
// 3. histogram: likewise the last 10 bits; now the k-th largest is known: the cutoff
// 4. count:     how many keys of each block's share lie above the cutoff, and how many equal it
// 5. emit:      a block knows from the counts before it where its entries go, and which of those
//               that equal the cutoff still fit

#pragma once

#include "common.cuh"

namespace ddl {

constexpr int kGroup = 4;                 // entries a source hands to a thread at a time
constexpr int kChunk = kThreads * kGroup; // entries a block handles at a time
constexpr int kMostBins = 2048;
constexpr Bits kNoKey = 0x7fffffffu; // above every key

// What is known of the k-th largest after a digit.
struct Found {
    Bits digits; // the digits so far, and after the last one the key itself
    Count rank;  // which of the keys that share them it is, 1 being the largest; 0: there is none
};

// Zeroed before step 1.
struct Search {
    Count bins[3][kMostBins];
    Found found[3]; // written one step after the bins
};

static_assert(sizeof(Search) == 24600, "the launch wrappers allocate it: SEARCH_BYTES in cuda.py");

// Digit 1, 2 or 3 of a key.
template <int digit> struct Digit;
template <> struct Digit<1> {
    static constexpr int kBins = 2048;
    static __device__ Bits of(Bits key) { return key >> 20; }
    static __device__ bool shared(Bits, Bits) { return true; }
    static __device__ Bits append(Bits, Bits bin) { return bin; }
};
template <> struct Digit<2> {
    static constexpr int kBins = 1024;
    static __device__ Bits of(Bits key) { return key >> 10 & 1023u; }
    static __device__ bool shared(Bits key, Bits digits) { return key >> 20 == digits; }
    static __device__ Bits append(Bits digits, Bits bin) { return digits << 10 | bin; }
};
template <> struct Digit<3> {
    static constexpr int kBins = 1024;
    static __device__ Bits of(Bits key) { return key & 1023u; }
    static __device__ bool shared(Bits key, Bits digits) { return key >> 10 == digits; }
    static __device__ Bits append(Bits digits, Bits bin) { return digits << 10 | bin; }
};

// A block's histogram, added to the one of all blocks at the end.
template <int digit> class Histogram {
  public:
    __device__ explicit Histogram(Count *bins) : bins_(bins) {
        for (int bin = threadIdx.x; bin < Digit<digit>::kBins; bin += kThreads) bins_[bin] = 0;
        __syncthreads();
    }
    __device__ void add(Bits key, Bits digits) {
        if (key != 0 && Digit<digit>::shared(key, digits))
            atomicAdd(&bins_[Digit<digit>::of(key)], 1u);
    }
    __device__ void add_to(Search *search) {
        __syncthreads();
        for (int bin = threadIdx.x; bin < Digit<digit>::kBins; bin += kThreads)
            if (bins_[bin] != 0) atomicAdd(&search->bins[digit - 1][bin], bins_[bin]);
    }

  private:
    Count *bins_; // shared memory
};

// Steps 1 to 3, each over the whole source; `bins` [kMostBins] is shared memory.
template <int digit, class Source>
__device__ void count_digit(const Source &source, Bits digits, Search *search, Count *bins) {
    const Range chunks = share_of_block((source.size() + kChunk - 1) / kChunk);
    if (chunks.first == chunks.last) return;
    Histogram<digit> histogram(bins);
    for (Size chunk = chunks.first; chunk < chunks.last; ++chunk) {
        Bits keys[kGroup];
        source.load(chunk * kChunk + threadIdx.x * kGroup, keys);
        for (int j = 0; j < kGroup; ++j) histogram.add(keys[j], digits);
    }
    histogram.add_to(search);
}

// Find the digit of the key of a rank, counted from the largest. Every thread of the block calls
// it and gets the answer; block 0 leaves it for the step after the next.
template <int digit> __device__ Found find_digit(Search *search, Found before) {
    __shared__ Count room[kWarps];
    __shared__ Found found;
    constexpr int kOwn = Digit<digit>::kBins / kThreads; // bins of a thread
    const Count *bins = search->bins[digit - 1];
    const int highest = Digit<digit>::kBins - 1 - static_cast<int>(threadIdx.x) * kOwn;
    Count own = 0;
    for (int i = 0; i < kOwn; ++i) own += bins[highest - i];
    const Sums<Count> sums = block_sums(own, room);
    // Fewer keys than wanted: the last of them all.
    const Count rank = before.rank < sums.all ? before.rank : sums.all;
    if (threadIdx.x == 0) found = {kNoKey, 0}; // stays if there is no key at all
    __syncthreads();
    if (sums.before < rank && rank <= sums.before + own) {
        Count above = sums.before;
        int bin = highest;
        while (above + bins[bin] < rank) above += bins[bin--];
        found = {Digit<digit>::append(before.digits, static_cast<Bits>(bin)), rank - above};
    }
    __syncthreads();
    const Found answer = found;
    if (blockIdx.x == 0 && threadIdx.x == 0) search->found[digit - 1] = answer;
    return answer;
}

// The digits found before digit 2, 3, and behind the last: each from the bins of the launch before.
__device__ __forceinline__ Found find_first(Search *search, Count k) {
    return find_digit<1>(search, {0, k});
}
__device__ __forceinline__ Found find_second(Search *search) {
    return find_digit<2>(search, search->found[0]);
}
__device__ __forceinline__ Found find_third(Search *search) {
    return find_digit<3>(search, search->found[1]);
}

// Keys above the cutoff in the upper half, keys equal to it in the lower.
__device__ __forceinline__ Wide pack(Count above, Count equal) {
    return static_cast<Wide>(above) << 32 | equal;
}
__device__ __forceinline__ Count above_of(Wide pair) { return static_cast<Count>(pair >> 32); }
__device__ __forceinline__ Count equal_of(Wide pair) { return static_cast<Count>(pair); }

// Where entries go when so many above the cutoff, and so many equal to it, come before.
__device__ __forceinline__ Count place_after(Count above, Count equal, Count ties) {
    return above + (equal < ties ? equal : ties);
}

// Step 4. Returns the smallest key of the warp's above the cutoff, kNoKey if there is none.
template <class Source>
__device__ Bits count_kept(const Source &source, Bits cutoff, Wide *counts_of_blocks) {
    __shared__ Wide room[kWarps];
    const Range chunks = share_of_block((source.size() + kChunk - 1) / kChunk);
    Count above = 0, equal = 0;
    Bits least = kNoKey;
    for (Size chunk = chunks.first; chunk < chunks.last; ++chunk) {
        Bits keys[kGroup];
        source.load(chunk * kChunk + threadIdx.x * kGroup, keys);
        for (int j = 0; j < kGroup; ++j) {
            above += keys[j] > cutoff;
            equal += keys[j] == cutoff;
            if (keys[j] > cutoff && keys[j] < least) least = keys[j];
        }
    }
    const Sums<Wide> sums = block_sums(pack(above, equal), room);
    if (threadIdx.x == 0) counts_of_blocks[blockIdx.x] = sums.all;
    for (int step = kWarp / 2; step > 0; step /= 2) {
        const Bits other = __shfl_xor_sync(kAllLanes, least, step);
        if (other < least) least = other;
    }
    return least;
}

// Step 5. Tells the source of every key other than 0 whether it is kept, and where it then goes.
// Returns the number of entries kept, by all blocks.
template <class Source>
__device__ Count emit(Source &source, Bits cutoff, Count ties, const Wide *counts_of_blocks) {
    __shared__ Wide room[kWarps];
    Wide mine = 0, everyones = 0;
    for (unsigned block = threadIdx.x; block < gridDim.x; block += kThreads) {
        everyones += counts_of_blocks[block];
        if (block < blockIdx.x) mine += counts_of_blocks[block];
    }
    Wide upto = block_sums(mine, room).all;
    const Wide all = block_sums(everyones, room).all;
    const Range chunks = share_of_block((source.size() + kChunk - 1) / kChunk);
    for (Size chunk = chunks.first; chunk < chunks.last; ++chunk) {
        const Size first = chunk * kChunk + threadIdx.x * kGroup;
        Bits keys[kGroup];
        source.load(first, keys);
        Wide own = 0;
        for (int j = 0; j < kGroup; ++j) own += pack(keys[j] > cutoff, keys[j] == cutoff);
        const Sums<Wide> sums = block_sums(own, room);
        Count above = above_of(upto + sums.before), equal = equal_of(upto + sums.before);
        for (int j = 0; j < kGroup; ++j) {
            if (keys[j] == 0) continue;
            const bool ties_in = keys[j] == cutoff && equal < ties;
            if (keys[j] > cutoff || ties_in)
                source.keep(first + j, place_after(above, equal, ties));
            else
                source.drop(first + j);
            above += keys[j] > cutoff;
            equal += keys[j] == cutoff;
        }
        upto += sums.all;
    }
    return place_after(above_of(all), equal_of(all), ties);
}

// What the caller learns; the launch wrappers' order too.
enum Report {
    kReportCount,     // entries kept; a merge reports nothing else
    kReportNonfinite, // accumulated values that are not finite
    kReportThreshold, // smallest key selected, 0 if none was
    kReportPassed,    // entries that reached the prediction
    kReportRepaired,  // 1 if the prediction was of no use
};

// Behind the last entry of a vector of fixed capacity stands padding.
__device__ __forceinline__ void pad(Index *indices, float *values, Size count, Size capacity) {
    for (Size i = count + first_entry(); i < capacity; i += entry_stride()) {
        indices[i] = kPadding;
        values[i] = 0.0f;
    }
}

} // namespace ddl
