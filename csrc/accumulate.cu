// Accumulate x = scale * flat + residual in one pass over memory.
//
// Each block takes a contiguous range of tiles. For each tile:
// 1. Load groups of 16 bytes (entry by entry where a group is cut by an end of the vector, or where
//    flat is misaligned against the residual), compute x: product rounded, then sum rounded.
// 2. Write the residual: 0 where |x| reaches the prediction, x elsewhere, and its old value where x
//    is not finite.
// 3. Count what reached the prediction and reserve room for it: one atomic a tile.
// 4. Move it to the candidates, ascending within the tile. Without room, put it back.
// 5. With moments: add up the tile's x and their squares in float64, in a fixed order.
//
// take: the values at given indices, after a pass that selected nothing.

#include "selection.cuh"

using namespace ddl;

namespace {

// How flat is stored: entries to 16 bytes, and their values.
struct Float32 {
    using Stored = float;
    static constexpr int kVector = 4;
    static __device__ float widen(float stored) { return stored; }
    static __device__ void load(const float *flat, float *gradient) {
        const float4 four = *reinterpret_cast<const float4 *>(flat);
        gradient[0] = four.x, gradient[1] = four.y, gradient[2] = four.z, gradient[3] = four.w;
    }
};

template <float (*kWiden)(HalfBits)> struct Half {
    using Stored = HalfBits;
    static constexpr int kVector = 8;
    static __device__ float widen(HalfBits stored) { return kWiden(stored); }
    static __device__ void load(const HalfBits *flat, float *gradient) {
        const uint4 eight = *reinterpret_cast<const uint4 *>(flat);
        const Bits pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            gradient[2 * p] = kWiden(static_cast<HalfBits>(pairs[p] & 0xffffu));
            gradient[2 * p + 1] = kWiden(static_cast<HalfBits>(pairs[p] >> 16));
        }
    }
};
using BFloat16 = Half<from_bfloat16>;
using Float16 = Half<from_float16>;

constexpr int kOwn = kTile / kThreads; // entries of a thread in a tile

// The entries of one thread. A warp's are contiguous: rounds of kVector entries a lane.
template <class Form> class Part {
  public:
    static constexpr int kVector = Form::kVector;
    static constexpr int kRounds = kOwn / kVector;
    static constexpr int kFieldBits = 32 / kRounds; // of a count of up to kWarp * kVector

    // Steps 1 and 2. `shift` in places, see selection.cuh; `aligned`: of flat against it.
    __device__ void accumulate(const typename Form::Stored *flat, float *residual, Size numel,
                               float scale, Bits least, Size shift, Size tile, bool aligned) {
        first_ = tile * kTile + warp() * (kTile / kWarps) + lane() * kVector - shift;
        reached_ = poisoned_ = 0;
        float owed[kOwn];
        if (aligned && first_ >= 0 && entry(kRounds - 1) + kVector <= numel) {
            // All loads before the first use, so that enough are under way to fill the memory bus.
#pragma unroll
            for (int round = 0; round < kRounds; ++round)
                Form::load(flat + entry(round), x_ + round * kVector);
#pragma unroll
            for (int i = 0; i < kOwn; i += 4) {
                const float4 four = *reinterpret_cast<const float4 *>(residual + entry_of(i));
                owed[i] = four.x, owed[i + 1] = four.y, owed[i + 2] = four.z, owed[i + 3] = four.w;
            }
#pragma unroll
            for (int i = 0; i < kOwn; ++i) owed[i] = settle(i, x_[i], owed[i], scale, least);
#pragma unroll
            for (int i = 0; i < kOwn; i += 4)
                // A plain assignment the compiler is free to take apart, and it does.
                __stcg(reinterpret_cast<float4 *>(residual + entry_of(i)),
                       make_float4(owed[i], owed[i + 1], owed[i + 2], owed[i + 3]));
        } else {
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const Size e = entry_of(i);
                x_[i] = 0.0f;
                if (e < 0 || e >= numel) continue;
                residual[e] = settle(i, Form::widen(flat[e]), residual[e], scale, least);
            }
        }
    }

    __device__ bool any_reached() const { return reached_ != 0; }
    __device__ Count nonfinite() const { return static_cast<Count>(__popc(poisoned_)); }

    // Counts of each round's entries that reached the prediction, a field each.
    __device__ Count counts() const {
        Count fields = 0;
#pragma unroll
        for (int round = 0; round < kRounds; ++round)
            fields |= static_cast<Count>(__popc(reached_ & mask_of(round))) << round * kFieldBits;
        return fields;
    }

    static __device__ Count field(Count fields, int round) {
        return fields >> round * kFieldBits & ((1u << kFieldBits) - 1u);
    }

    // Step 4. `before` and `all`: fields of the counts of the lanes before and of the whole warp.
    __device__ void move(Count start, Count before, Count all, Index *indices,
                         float *values) const {
        Count place = start;
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            Count mine = place + field(before, round);
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                const int i = round * kVector + j;
                if ((reached_ >> i & 1u) == 0) continue;
                indices[mine] = static_cast<Index>(entry_of(i));
                values[mine] = x_[i];
                ++mine;
            }
            place += field(all, round);
        }
    }

    __device__ void put_back(float *residual) const {
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (reached_ >> i & 1u) residual[entry_of(i)] = x_[i];
    }

    __device__ void mark(unsigned char *poisoned, Size shift) const {
#pragma unroll
        for (int i = 0; i < kOwn; i += kGroup)
            poisoned[(entry_of(i) + shift) / kGroup] =
                static_cast<unsigned char>(poisoned_ >> i & 15u);
    }

    // Step 5: of the finite x.
    __device__ double2 moments() const {
        double2 sums = make_double2(0.0, 0.0);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const double x = (poisoned_ >> i & 1u) ? 0.0 : static_cast<double>(x_[i]);
            sums.x = __dadd_rn(sums.x, x);
            sums.y = __dadd_rn(sums.y, __dmul_rn(x, x));
        }
        return sums;
    }

  private:
    static __device__ Bits mask_of(int round) { return ((1u << kVector) - 1u) << round * kVector; }
    __device__ Size entry(int round) const { return first_ + round * (kWarp * kVector); }
    __device__ Size entry_of(int i) const { return entry(i / kVector) + i % kVector; }

    // Accumulate the i-th entry; return what the residual becomes.
    __device__ float settle(int i, float gradient, float owed, float scale, Bits least) {
        const float x = __fadd_rn(__fmul_rn(scale, gradient), owed);
        const Bits key = magnitude_key(x);
        x_[i] = x;
        if (key >= kInfinite) {
            poisoned_ |= 1u << i;
            return owed;
        }
        if (key < least) return x;
        reached_ |= 1u << i;
        return 0.0f;
    }

    Size first_; // entry, may lie before the vector
    float x_[kOwn];
    Bits reached_, poisoned_; // a bit an entry
};

// Sums over the block of two numbers a thread, in a fixed order; complete in thread 0.
__device__ double2 add_up(double2 sums, double2 *room) {
    for (int step = kWarp / 2; step > 0; step /= 2) {
        sums.x = __dadd_rn(sums.x, __shfl_down_sync(kAllLanes, sums.x, step));
        sums.y = __dadd_rn(sums.y, __shfl_down_sync(kAllLanes, sums.y, step));
    }
    if (lane() == 0) room[warp()] = sums;
    __syncthreads();
    for (int w = 1; w < kWarps; ++w) {
        sums.x = __dadd_rn(sums.x, room[w].x);
        sums.y = __dadd_rn(sums.y, room[w].y);
    }
    return sums;
}

template <class Form, bool kMoments>
__device__ void accumulate(const typename Form::Stored *flat, float *residual, Size numel,
                           float scale, Bits given, State *state, Tile *tiles, Size tile_count,
                           Count *passed_of_blocks, Buffers candidates, unsigned char *poisoned,
                           double2 *moments) {
    // Two of each, for tiles in turn: a fast warp may be at the next tile while a slow one reads.
    __shared__ Count counted[2][kWarps]; // of each warp: that reached the prediction
    __shared__ Count refused[2][kWarps]; // and that are not finite
    __shared__ Count reserved[2];
    __shared__ double2 room[2][kWarps];

    const Bits least = prediction(state, given);
    const Size shift = shift_of(residual);
    const bool aligned = (reinterpret_cast<Wide>(flat) - shift * sizeof(*flat)) % 16 == 0;
    const Range range = share_of_block(tile_count);
    Count passed = 0;
    int turn = 0;
    for (Size t = range.first; t < range.last; ++t, turn ^= 1) {
        Part<Form> part;
        part.accumulate(flat, residual, numel, scale, least, shift, t, aligned);

        const Count own = part.counts();
        Count upto = 0, nonfinite = 0; // fields of counts; few warps need any
        if (__any_sync(kAllLanes, own != 0)) upto = sum_up_to_lane(own);
        if (__any_sync(kAllLanes, part.nonfinite() != 0))
            nonfinite = sum_up_to_lane(part.nonfinite());
        const Count all = __shfl_sync(kAllLanes, upto, kWarp - 1);
        if (lane() == kWarp - 1) {
            Count count = 0;
            for (int round = 0; round < Part<Form>::kRounds; ++round)
                count += Part<Form>::field(all, round);
            counted[turn][warp()] = count;
            refused[turn][warp()] = nonfinite;
        }
        double2 sums;
        if (kMoments) sums = add_up(part.moments(), room[turn]);
        __syncthreads();

        Tile tile = {0, 0, 0};
        Count before = 0;
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp()) before += counted[turn][w];
            tile.count += counted[turn][w];
            tile.nonfinite += refused[turn][w];
        }
        passed += tile.count;
        if (tile.count != 0 || tile.nonfinite != 0) {
            if (threadIdx.x == 0)
                reserved[turn] = static_cast<Count>(atomicAdd(
                    &state->passed, static_cast<Wide>(tile.nonfinite) << 32 | tile.count));
            __syncthreads();
            tile.start = reserved[turn];
            if (candidates.holds(tile))
                part.move(tile.start + before, upto - own, all, candidates.indices,
                          candidates.values);
            else if (part.any_reached())
                part.put_back(residual);
            if (tile.nonfinite != 0) part.mark(poisoned, shift);
        }
        if (threadIdx.x == 0) {
            tiles[t] = tile;
            if (kMoments) moments[t] = sums;
        }
    }
    if (threadIdx.x == 0) passed_of_blocks[blockIdx.x] = passed;
}

} // namespace

#define DDL_ACCUMULATE(NAME, FORM, MOMENTS)                                                        \
    extern "C" __global__ void __launch_bounds__(kThreads, 4)                                      \
        NAME(const FORM::Stored *__restrict__ flat, float *__restrict__ residual, Size numel,      \
             float scale, Bits given, State *state, Tile *tiles, Size tile_count,                  \
             Count *passed_of_blocks, Index *indices, float *values, Count capacity,               \
             unsigned char *poisoned, double2 *moments) {                                          \
        accumulate<FORM, MOMENTS>(flat, residual, numel, scale, given, state, tiles, tile_count,   \
                                  passed_of_blocks, {indices, values, capacity}, poisoned,         \
                                  moments);                                                        \
    }

DDL_ACCUMULATE(accumulate_float32, Float32, false)
DDL_ACCUMULATE(accumulate_bfloat16, BFloat16, false)
DDL_ACCUMULATE(accumulate_float16, Float16, false)
DDL_ACCUMULATE(accumulate_with_moments_float32, Float32, true)
DDL_ACCUMULATE(accumulate_with_moments_bfloat16, BFloat16, true)
DDL_ACCUMULATE(accumulate_with_moments_float16, Float16, true)

// A sample for the prediction: one entry of each of `count` equal stretches, at a place that
// varies, so that it is in step with no pattern. Their keys, and the histogram of the first digit.
template <class Form>
__device__ void sample(const typename Form::Stored *flat, const float *residual, Size numel,
                       float scale, Bits *keys, Count count, State *state) {
    __shared__ Count bins[kMostBins];
    Histogram<1> histogram(bins);
    for (Size i = first_entry(); i < count; i += entry_stride()) {
        const Size low = numel * i / count, high = numel * (i + 1) / count;
        const Count mixed = static_cast<Count>(i) * 0x9e3779b9u;
        const Size e = low + (mixed ^ mixed >> 15) % (high - low);
        const float x = __fadd_rn(__fmul_rn(scale, Form::widen(flat[e])), residual[e]);
        const Bits key = is_finite(x) ? magnitude_key(x) : 0;
        keys[i] = key;
        histogram.add(key, 0);
    }
    histogram.add_to(&state->sampled);
}

#define DDL_SAMPLE(NAME, FORM)                                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads)                                         \
        NAME(const FORM::Stored *__restrict__ flat, const float *__restrict__ residual,            \
             Size numel, float scale, Bits *keys, Count count, State *state) {                     \
        sample<FORM>(flat, residual, numel, scale, keys, count, state);                            \
    }

DDL_SAMPLE(sample_float32, Float32)
DDL_SAMPLE(sample_bfloat16, BFloat16)
DDL_SAMPLE(sample_float16, Float16)

extern "C" __global__ void __launch_bounds__(kThreads)
    take(float *__restrict__ residual, const Index *__restrict__ indices, float *values, Size count,
         const State *state, const Tile *tiles, const unsigned char *poisoned, int *report) {
    const Size shift = shift_of(residual);
    for (Size i = first_entry(); i < count; i += entry_stride()) {
        const Index index = indices[i];
        float value = 0.0f;
        if (!is_poisoned(tiles, poisoned, index + shift)) {
            value = residual[index];
            residual[index] = 0.0f;
        }
        values[i] = value;
    }
    if (first_entry() == 0) {
        report[kReportCount] = static_cast<int>(count);
        report[kReportNonfinite] = static_cast<int>(state->passed >> 32);
    }
}
