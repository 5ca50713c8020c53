// Accesses that memory does not allow, and all that atomics do.

struct Pair {
    float value;
    int index;
};

extern "C" __global__ void copy(float *out, const float *in, long long count) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = in[i];
}

extern "C" __global__ void copy_vectors(float *out, const float *in, int count) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) reinterpret_cast<float4 *>(out)[i] = reinterpret_cast<const float4 *>(in)[i];
}

extern "C" __global__ void copy_bytes(unsigned char *out, const unsigned char *in, int count) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) out[i] = in[i];
}

extern "C" __global__ void copy_halves(unsigned short *out, const unsigned short *in, int count) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) out[i] = in[i];
}

extern "C" __global__ void beyond_shared(int *out, int offset) {
    __shared__ int room[256];
    room[threadIdx.x + offset] = 1;
    __syncthreads();
    out[threadIdx.x] = room[threadIdx.x];
}

extern "C" __global__ void beyond_dynamic(int *out, int offset) {
    extern __shared__ int room[];
    room[threadIdx.x + offset] = static_cast<int>(threadIdx.x);
    out[threadIdx.x] = room[threadIdx.x + offset];
}

extern "C" __global__ void all_kinds(float f, double d, int i, unsigned u, long long l,
                                     unsigned long long w, bool b, const Pair *pairs, double *out) {
    if (threadIdx.x != 0) return;
    out[0] = f, out[1] = d, out[2] = i, out[3] = u, out[4] = static_cast<double>(l);
    out[5] = static_cast<double>(w), out[6] = b;
    out[7] = pairs == nullptr ? -1 : static_cast<double>(pairs[1].value) + pairs[1].index;
}

extern "C" __global__ void write_through_const(const float *in) {
    const_cast<float *>(in)[threadIdx.x] = 1.0f;
}

extern "C" __global__ void shift_too_far(int *out, int by) { out[threadIdx.x] = 1 << by; }

// out: 12 numbers that start as 100 each, changed by every thread of every block.
extern "C" __global__ void atomics(int *out, unsigned *unsigneds, unsigned long long *wides,
                                   float *floats, double *doubles) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const auto u = static_cast<unsigned>(i);
    atomicAdd(&out[0], i);
    atomicSub(&out[1], i);
    atomicMax(&out[2], i);
    atomicMin(&out[3], -i);
    atomicOr(&out[4], i);
    atomicAnd(&out[5], ~i);
    atomicXor(&out[6], i);
    atomicAdd(&unsigneds[0], u);
    atomicMax(&unsigneds[1], u);
    atomicInc(&unsigneds[2], 1000000u);
    atomicAdd(&wides[0], static_cast<unsigned long long>(i) << 32);
    atomicMax(&wides[1], static_cast<unsigned long long>(i) << 32);
    atomicAdd(&floats[0], 1.0f);
    atomicAdd(&doubles[0], 0.5);
    unsigned long long old = wides[2], seen;
    do { // an addition by compare and swap
        seen = old;
        old = atomicCAS(&wides[2], seen, seen + 3);
    } while (old != seen);
}

extern "C" __global__ void constant_loads(float *values, float *out, int writes) {
    if (writes != 0) values[threadIdx.x] = 2.0f;
    out[threadIdx.x] = __ldg(&values[threadIdx.x]);
}

// Bits and rounding that the host must have as the device has them.
extern "C" __global__ void arithmetic(const float *x, const float *y, float *out, int *bits) {
    const unsigned i = threadIdx.x, n = blockDim.x;
    out[i] = __fadd_rn(__fmul_rn(x[i], y[i]), x[i]);
    out[n + i] = __fmaf_rn(x[i], y[i], x[i]);
    out[2 * n + i] = static_cast<float>(__dsqrt_rn(__dmul_rn(x[i], x[i])));
    out[3 * n + i] = max(x[i], y[i]);
    const unsigned word = __float_as_uint(x[i]);
    bits[i] = __popc(word);
    bits[n + i] = __clz(static_cast<int>(word));
    bits[2 * n + i] = __ffs(static_cast<int>(word));
    bits[3 * n + i] = static_cast<int>(__brev(word));
    bits[4 * n + i] = isfinite(x[i]) ? 1 : 0;
}
