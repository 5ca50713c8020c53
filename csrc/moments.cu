// Mean and standard deviation from the sums of accumulate.cu's tiles, and Gaussian-k's thresholds.
//
// 1. Each block adds up the sums of its tiles, in an order that depends on nothing else.
// 2. The block that finishes last adds up the blocks': mean, population standard deviation, and the
//    threshold mean + std * ppf(1 - density / 2) of arXiv 1911.08772.
// 3. The rule halves the threshold upon too few entries and raises it by half upon too many, three
//    evaluations at most: six thresholds that may be tried, as keys that selected ones exceed.

#include "selection.cuh"

using namespace ddl;

namespace {

// Thread by thread, then over the block; complete in thread 0. `room` [kThreads] is shared memory.
__device__ double2 add_up(double2 own, double2 *room) {
    room[threadIdx.x] = own;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < half) {
            const double2 other = room[threadIdx.x + half];
            own.x = __dadd_rn(own.x, other.x);
            own.y = __dadd_rn(own.y, other.y);
            room[threadIdx.x] = own;
        }
    }
    return own;
}

__device__ double2 sum_of(const double2 *sums, Size first, Size last) {
    double2 total = make_double2(0.0, 0.0);
    for (Size i = first + threadIdx.x; i < last; i += kThreads) {
        total.x = __dadd_rn(total.x, sums[i].x);
        total.y = __dadd_rn(total.y, sums[i].y);
    }
    return total;
}

__device__ Bits key_of(double threshold) {
    return __float_as_uint(__double2float_rn(threshold > 0.0 ? threshold : 0.0));
}

} // namespace

// quantile: ppf(1 - density / 2).
extern "C" __global__ void __launch_bounds__(kThreads)
    finish_moments(const double2 *of_tiles, Size tile_count, double2 *of_blocks, Size numel,
                   double quantile, State *state) {
    __shared__ double2 room[kThreads];
    __shared__ bool last;
    const Range range = share_of_block(tile_count);
    const double2 sums = add_up(sum_of(of_tiles, range.first, range.last), room);
    if (threadIdx.x == 0) {
        of_blocks[blockIdx.x] = sums;
        __threadfence(); // the last block must not see the count without the sums
        last = atomicAdd(&state->finished, 1u) == gridDim.x - 1;
        __threadfence(); // nor read sums that were there before it
    }
    __syncthreads();
    if (!last) return;
    const double2 total = add_up(sum_of(of_blocks, 0, gridDim.x), room);
    const Size finite = numel - static_cast<Size>(state->passed >> 32);
    if (threadIdx.x != 0 || finite == 0) return;
    const double mean = total.x / static_cast<double>(finite);
    const double square = total.y / static_cast<double>(finite);
    const double variance = __dadd_rn(square, -__dmul_rn(mean, mean));
    const double std = __dsqrt_rn(variance > 0.0 ? variance : 0.0);
    const double threshold = __dadd_rn(mean, __dmul_rn(std, quantile));
    state->rule[0] = key_of(threshold);
    state->rule[1] = key_of(threshold * 0.5);
    state->rule[2] = key_of(threshold * 1.5);
    state->rule[3] = key_of(threshold * 0.5 * 0.5);
    state->rule[4] = key_of(threshold * 0.5 * 1.5);
    state->rule[5] = key_of(threshold * 1.5 * 1.5);
    state->rules = 1;
}
