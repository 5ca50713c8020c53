// Threads of a block and blocks of a grid that depend on each other; some of them forget to wait.

extern "C" __global__ void many_barriers(float *values, int rounds) {
    __shared__ float room[256];
    float value = values[blockIdx.x * 256 + threadIdx.x];
    for (int round = 0; round < rounds; ++round) {
        room[threadIdx.x] = value;
        __syncthreads();
        value = room[(threadIdx.x + 1) % 256];
        __syncthreads();
    }
    values[blockIdx.x * 256 + threadIdx.x] = value;
}

template <bool kWaits> __device__ void reverse_through(int *values, int *room) {
    room[threadIdx.x] = values[threadIdx.x];
    if (kWaits) __syncthreads();
    values[threadIdx.x] = room[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void reverse(int *values) {
    __shared__ int room[256];
    reverse_through<true>(values, room);
}

extern "C" __global__ void reverse_without_barrier(int *values) {
    __shared__ int room[256];
    reverse_through<false>(values, room);
}

extern "C" __global__ void reverse_in_dynamic_memory(int *values) {
    extern __shared__ int room[];
    reverse_through<true>(values, room);
}

// Within a warp the lanes need __syncwarp.
extern "C" __global__ void neighbours(int *values, int waits) {
    __shared__ int room[256];
    room[threadIdx.x] = values[threadIdx.x];
    if (waits != 0) __syncwarp();
    values[threadIdx.x] = room[threadIdx.x ^ 1u];
}

// Inclusive sums over a block of 256.
extern "C" __global__ void scan(const int *values, int *out) {
    __shared__ int of_warps[8];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = values[threadIdx.x];
    for (unsigned step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    for (unsigned w = 0; w < warp; ++w) sum += of_warps[w];
    out[threadIdx.x] = sum;
}

// The block that finishes last adds up what all have found.
template <bool kReleases, bool kAcquires>
__device__ void add_up(const int *values, int count, int *of_blocks, unsigned *finished,
                       int *total) {
    __shared__ int sum;
    __shared__ bool last;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < count;
         i += static_cast<int>(gridDim.x * blockDim.x))
        atomicAdd(&sum, values[i]);
    __syncthreads();
    if (threadIdx.x == 0) {
        of_blocks[blockIdx.x] = sum;
        if (kReleases) __threadfence();
        last = atomicAdd(finished, 1u) == gridDim.x - 1;
        if (kAcquires) __threadfence();
    }
    __syncthreads();
    if (!last || threadIdx.x != 0) return;
    int all = 0;
    for (unsigned block = 0; block < gridDim.x; ++block) all += of_blocks[block];
    *total = all;
}

extern "C" __global__ void last_block(const int *values, int count, int *of_blocks,
                                      unsigned *finished, int *total) {
    add_up<true, true>(values, count, of_blocks, finished, total);
}
extern "C" __global__ void last_block_without_fence(const int *values, int count, int *of_blocks,
                                                    unsigned *finished, int *total) {
    add_up<false, true>(values, count, of_blocks, finished, total);
}
extern "C" __global__ void last_block_without_second_fence(const int *values, int count,
                                                           int *of_blocks, unsigned *finished,
                                                           int *total) {
    add_up<true, false>(values, count, of_blocks, finished, total);
}

extern "C" __global__ void last_block_without_fences(const int *values, int count, int *of_blocks,
                                                     unsigned *finished, int *total) {
    add_up<false, false>(values, count, of_blocks, finished, total);
}

// Each block waits for the one that began before it, and adds its number of entries.
extern "C" __global__ void chain(volatile unsigned *flags, unsigned *tickets, int *sums) {
    if (threadIdx.x != 0) return;
    const unsigned ticket = atomicAdd(tickets, 1u);
    int sum = 1;
    if (ticket > 0) {
        while (flags[ticket - 1] == 0) {
        }
        __threadfence();
        sum += sums[ticket - 1];
    }
    sums[ticket] = sum;
    __threadfence();
    flags[ticket] = 1;
}

// Every block reads what another one writes.
extern "C" __global__ void shift_in_place(int *values, int count) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 1 < count) values[i] = values[i + 1];
}

extern "C" __global__ void same_value(int *flag, int *values) {
    __shared__ bool any;
    if (threadIdx.x == 0) any = false;
    __syncthreads();
    if (values[threadIdx.x] > 0) any = true; // allowed: whoever comes last, it is the same
    __syncthreads();
    if (threadIdx.x == 0) *flag = any;
}

extern "C" __global__ void barrier_for_some(int *values, int mode) {
    if (mode == 1 && threadIdx.x >= 100) return; // never comes
    if (mode == 2 && threadIdx.x >= 100)
        __syncthreads(); // another barrier
    else
        __syncthreads();
    values[threadIdx.x] = 1;
}

// Waits for a block that may not have begun: allowed where all blocks run at once.
extern "C" __global__ void spin(volatile int *flag) {
    while (*flag == 0) {
    }
}

extern "C" __global__ void garbage(unsigned *out) {
    __shared__ unsigned room[64];
    out[blockIdx.x * blockDim.x + threadIdx.x] = room[threadIdx.x % 64];
}
