// What lanes tell each other, one kernel a function.

extern "C" __global__ void shuffles(const int *values, int *out, int width) {
    const int i = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
    const unsigned all = 0xffffffffu;
    const int value = values[i];
    out[i] = __shfl_sync(all, value, 5, width);
    out[n + i] = __shfl_up_sync(all, value, 3, width);
    out[2 * n + i] = __shfl_down_sync(all, value, 3, width);
    out[3 * n + i] = __shfl_xor_sync(all, value, 5, width);
}

extern "C" __global__ void wide_shuffles(const double *values, double *out,
                                         const long long *numbers, long long *out_numbers) {
    const unsigned i = threadIdx.x;
    out[i] = __shfl_down_sync(0xffffffffu, values[i], 1);
    out_numbers[i] = __shfl_xor_sync(0xffffffffu, numbers[i], 16);
}

extern "C" __global__ void votes(const int *values, unsigned *out) {
    const unsigned i = threadIdx.x, n = blockDim.x, all = 0xffffffffu;
    out[i] = __ballot_sync(all, values[i] & 1);
    out[n + i] = static_cast<unsigned>(__any_sync(all, values[i] > 60));
    out[2 * n + i] = static_cast<unsigned>(__all_sync(all, values[i] >= 0));
    out[3 * n + i] = __match_any_sync(all, values[i] % 5);
    int same = 0;
    out[4 * n + i] = __match_all_sync(all, values[i] >> 5, &same);
    out[5 * n + i] = __reduce_add_sync(all, static_cast<unsigned>(values[i]));
    out[6 * n + i] = static_cast<unsigned>(__reduce_min_sync(all, values[i] - 40));
    out[7 * n + i] = __reduce_max_sync(all, static_cast<unsigned>(values[i] - 40));
}

// Halves of a warp go different ways, then meet again.
extern "C" __global__ void halves(const int *values, int *out) {
    const unsigned lane = threadIdx.x % 32;
    int sum = values[threadIdx.x];
    if (lane < 16) {
        for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0x0000ffffu, sum, step);
    } else {
        for (int step = 1; step < 16; step *= 2) sum += __shfl_xor_sync(0xffff0000u, sum, step);
    }
    out[threadIdx.x] = sum + __shfl_sync(0xffffffffu, sum, 31 - static_cast<int>(lane));
}

extern "C" __global__ void barriers_with_votes(const int *values, int *out) {
    const int value = values[threadIdx.x];
    out[threadIdx.x] = __syncthreads_count(value > 10);
    out[blockDim.x + threadIdx.x] = __syncthreads_and(value >= 0);
    out[2 * blockDim.x + threadIdx.x] = __syncthreads_or(value == 77);
}

// The mask is a lie in one way or the other; 0: it is not.
extern "C" __global__ void masks(int *out, int lie) {
    const unsigned lane = threadIdx.x % 32;
    unsigned mask = 0xffffffffu;
    if (lie == 1 && lane == 7) return;              // named, but gone
    if (lie == 2 && lane == 7) mask = 0xff7fffffu;  // another mask than the others'
    if (lie == 3) mask = 0xffffff7fu;               // does not name lane 7
    if (lie == 4 && lane == 7) __syncthreads();     // named, but waits elsewhere
    if (lie == 5 && lane >= 16) mask = 0x0000ffffu; // names only the others
    const int source = lie == 6 ? 20 : 3;
    if (lie == 6) mask = 0x0000ffffu; // does not name the source
    if (lie == 6 && lane >= 16) return;
    if (lie == 7 && lane == 7) mask = __ballot_sync(mask, 1); // meets the others' shuffle
    out[threadIdx.x] = __shfl_sync(mask, static_cast<int>(lane), source);
    if (lie == 4 && lane != 7) __syncthreads();
}
