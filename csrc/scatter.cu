// Sparse entries into a dense vector.
//
// scatter    1. the caller has set dense to zero
//            2. dense[indices[i]] = scale * values[i], rounded to dense's type
// give_back  1. residual[indices[i]] += values[i], where the mask says so or there is none
//
// Indices are distinct, so that no two threads meet and no atomics are needed. One entry a thread,
// neighbours read neighbours; the writes are as scattered as the indices are. Indices from numel
// on, which padding has, are passed over.

#include "common.cuh"

using namespace ddl;

extern "C" __global__ void __launch_bounds__(kThreads)
    scatter_float32(float *__restrict__ dense, Size numel, const Index *__restrict__ indices,
                    const float *__restrict__ values, float scale, Size count) {
    for (Size i = first_entry(); i < count; i += entry_stride())
        if (indices[i] < numel) dense[indices[i]] = __fmul_rn(scale, values[i]);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    scatter_bfloat16(HalfBits *__restrict__ dense, Size numel, const Index *__restrict__ indices,
                     const float *__restrict__ values, float scale, Size count) {
    for (Size i = first_entry(); i < count; i += entry_stride())
        if (indices[i] < numel) dense[indices[i]] = to_bfloat16(__fmul_rn(scale, values[i]));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    scatter_float16(HalfBits *__restrict__ dense, Size numel, const Index *__restrict__ indices,
                    const float *__restrict__ values, float scale, Size count) {
    for (Size i = first_entry(); i < count; i += entry_stride())
        if (indices[i] < numel) dense[indices[i]] = to_float16(__fmul_rn(scale, values[i]));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    give_back(float *__restrict__ residual, Size numel, const Index *__restrict__ indices,
              const float *__restrict__ values, const unsigned char *__restrict__ mask,
              Size count) {
    for (Size i = first_entry(); i < count; i += entry_stride()) {
        const Index index = indices[i];
        if (index < numel && (mask == nullptr || mask[i] != 0))
            residual[index] = __fadd_rn(residual[index], values[i]);
    }
}
