// Shared memory by pointers, which hide where an array ends.

template <int n> __device__ void fill(int *room, int offset) {
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x))
        room[i + offset] = i;
    __syncthreads();
}

template <int n> __device__ int filled(int offset) {
    __shared__ int before[4];
    __shared__ int room[n];
    __shared__ bool behind[3];
    if (threadIdx.x < 3) behind[threadIdx.x] = true, before[threadIdx.x] = 1;
    fill<n>(room, offset);
    return room[(threadIdx.x + 1) % n] + behind[1] + before[0];
}

extern "C" __global__ void beyond_pointer(int *out, int offset) {
    out[threadIdx.x] = filled<100>(offset);
}
