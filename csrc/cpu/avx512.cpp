// The loops for x86 with AVX-512 (F, DQ, BW, VL): a block is four registers.
//
// Candidates are compressed in a register, which is then stored whole: compressing straight into
// memory is microcoded on Zen 4 and several times slower.

#include "loops.h"

#ifdef DDL_X86

#include <cstdlib>
#include <cstring>
#include <immintrin.h>

// The target has FMA: products and sums must be kept apart by -ffp-contract=off.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,f16c,bmi,bmi2,popcnt"))),           \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,f16c,bmi,bmi2,popcnt")
#endif

namespace ddl_cpu {
namespace {

constexpr Size kVector = 16;
constexpr Size kVectors = kBlock / kVector;

struct Block {
    __m512 x[kVectors];
};

inline Key bits_of(float value) {
    Key bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <Form form> inline float gradient(const void *flat, Size i) {
    if constexpr (form == kFloat32) return static_cast<const float *>(flat)[i];
    const uint16_t half = static_cast<const uint16_t *>(flat)[i];
    if constexpr (form == kBFloat16) return from_bits(static_cast<uint32_t>(half) << 16);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

template <Form form> inline __m512 gradients(const void *flat, Size i) {
    if constexpr (form == kFloat32) return _mm512_loadu_ps(static_cast<const float *>(flat) + i);
    const __m256i half = _mm256_loadu_si256(
        reinterpret_cast<const __m256i *>(static_cast<const uint16_t *>(flat) + i));
    if constexpr (form == kBFloat16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    return _mm512_cvtph_ps(half);
}

inline Block load(const float *source) {
    Block block;
    for (Size v = 0; v < kVectors; ++v) block.x[v] = _mm512_loadu_ps(source + v * kVector);
    return block;
}

inline void store(const Block &block, float *target) {
    for (Size v = 0; v < kVectors; ++v) _mm512_storeu_ps(target + v * kVector, block.x[v]);
}

template <Form form>
inline Block accumulate(const void *flat, const float *residual, Size position, float scale) {
    Block block;
    for (Size v = 0; v < kVectors; ++v) {
        const Size i = position + v * kVector;
        const __m512 scaled = _mm512_mul_ps(_mm512_set1_ps(scale), gradients<form>(flat, i));
        block.x[v] = _mm512_add_ps(scaled, _mm512_loadu_ps(residual + i));
    }
    return block;
}

inline __m512i keys_of(__m512 x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(kMagnitude));
}

inline __mmask16 reaching(__m512 x, Key least) {
    return _mm512_cmpge_epi32_mask(keys_of(x), _mm512_set1_epi32(least));
}

inline bool any_reaches(const Block &block, Key least) {
    // The largest key decides: three maxima are cheaper than three more compares into masks.
    const __m512i one = _mm512_max_epi32(keys_of(block.x[0]), keys_of(block.x[1]));
    const __m512i two = _mm512_max_epi32(keys_of(block.x[2]), keys_of(block.x[3]));
    return _mm512_cmpge_epi32_mask(_mm512_max_epi32(one, two), _mm512_set1_epi32(least)) != 0;
}

inline Size pick(const Block &block, Key least, Size position, Index *indices, float *values) {
    const __m512i lanes =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    Size count = 0;
    for (Size v = 0; v < kVectors; ++v) {
        const __mmask16 mask = reaching(block.x[v], least);
        const __m512i at =
            _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(position + v * kVector)));
        _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(mask, block.x[v]));
        _mm512_storeu_si512(indices + count, _mm512_maskz_compress_epi32(mask, at));
        count += _mm_popcnt_u32(mask);
    }
    return count;
}

inline void store_rest(const Block &block, Key least, float *target) {
    for (Size v = 0; v < kVectors; ++v)
        _mm512_storeu_ps(target + v * kVector,
                         _mm512_mask_mov_ps(block.x[v], reaching(block.x[v], least),
                                            _mm512_setzero_ps()));
}

class Sums {
  public:
    explicit Sums(const double *lanes) {
        for (Size h = 0; h < 2; ++h) {
            total_[h] = _mm512_loadu_pd(lanes + h * 8);
            squares_[h] = _mm512_loadu_pd(lanes + kLanes + h * 8);
        }
    }
    void add(const Block &block) {
        for (Size v = 0; v < kVectors; ++v) {
            const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(block.x[v]));
            const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(block.x[v], 1));
            total_[0] = _mm512_add_pd(total_[0], low);
            total_[1] = _mm512_add_pd(total_[1], high);
            // Squares of float32 are exact in float64: fused or not is the same.
            squares_[0] = _mm512_fmadd_pd(low, low, squares_[0]);
            squares_[1] = _mm512_fmadd_pd(high, high, squares_[1]);
        }
    }
    void put(double *lanes) const {
        for (Size h = 0; h < 2; ++h) {
            _mm512_storeu_pd(lanes + h * 8, total_[h]);
            _mm512_storeu_pd(lanes + kLanes + h * 8, squares_[h]);
        }
    }

  private:
    __m512d total_[2], squares_[2];
};

inline __mmask16 first(Size count) {
    return static_cast<__mmask16>(count >= kVector ? 0xffff : (1u << count) - 1);
}

inline Size narrow(const Key *keys, Size count, Key low, Key high, Key *out, Size room,
                   Size *inside) {
    Size above = 0, within = 0;
    const Size last = room - kVector;
    for (Size i = 0; i < count; i += kVector) {
        const __mmask16 real = first(count - i);
        const __m512i key = _mm512_and_si512(_mm512_maskz_loadu_epi32(real, keys + i),
                                             _mm512_set1_epi32(kMagnitude));
        const __mmask16 over = _mm512_mask_cmpgt_epi32_mask(real, key, _mm512_set1_epi32(high));
        const __mmask16 in = _mm512_mask_cmpge_epi32_mask(real, key, _mm512_set1_epi32(low)) & ~over;
        _mm512_storeu_si512(out + (within < last ? within : last),
                            _mm512_maskz_compress_epi32(in, key));
        above += _mm_popcnt_u32(over);
        within += _mm_popcnt_u32(in);
    }
    *inside = within;
    return above;
}

// Lanes above the cutoff and, lowest first, as many equal to it as there are ties left.
inline __mmask16 chosen(__m512i key, __mmask16 real, Key cutoff, Size *ties) {
    const __m512i at = _mm512_set1_epi32(cutoff);
    const __mmask16 equal = _mm512_mask_cmpeq_epi32_mask(real, key, at);
    const uint32_t left = *ties >= 32 ? ~0u : (1u << *ties) - 1;
    const __mmask16 tied = static_cast<__mmask16>(_pdep_u32(left, equal));
    *ties -= _mm_popcnt_u32(tied);
    return _mm512_mask_cmpgt_epi32_mask(real, key, at) | tied;
}

inline Size partition(float *residual, const Index *indices, const float *values, Size count,
                      Key cutoff, Size ties, Index *out_indices, float *out_values) {
    alignas(64) Index back_indices[kVector];
    alignas(64) float back_values[kVector];
    Size kept = 0;
    for (Size i = 0; i < count; i += kVector) {
        const __mmask16 real = first(count - i);
        const __m512 x = _mm512_maskz_loadu_ps(real, values + i);
        const __m512i index = _mm512_maskz_loadu_epi32(real, indices + i);
        const __mmask16 mask = chosen(keys_of(x), real, cutoff, &ties);
        const __mmask16 others = real & ~mask;
        const Size more = _mm_popcnt_u32(mask);
        // The output has no room beyond its last entry.
        _mm512_mask_storeu_ps(out_values + kept, first(more), _mm512_maskz_compress_ps(mask, x));
        _mm512_mask_storeu_epi32(out_indices + kept, first(more),
                                 _mm512_maskz_compress_epi32(mask, index));
        kept += more;
        _mm512_store_ps(back_values, _mm512_maskz_compress_ps(others, x));
        _mm512_store_si512(back_indices, _mm512_maskz_compress_epi32(others, index));
        for (Size j = 0, back = _mm_popcnt_u32(others); j < back; ++j)
            residual[back_indices[j]] = back_values[j];
    }
    return kept;
}

inline void cut(const Index *indices, const float *values, Key *keys, Size count, Size cutoff,
                Size ties, Index *out_indices, float *out_values) {
    const __m512i lanes =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    Size kept = 0;
    for (Size i = 0; i < count; i += kVector) {
        const __mmask16 real = first(count - i);
        const __m512i key = _mm512_maskz_loadu_epi32(real, keys + i);
        const __mmask16 mask = chosen(key, real, static_cast<Key>(cutoff), &ties);
        const Size more = _mm_popcnt_u32(mask);
        const __m512 x = _mm512_maskz_loadu_ps(real, values + i);
        const __m512i index = _mm512_maskz_loadu_epi32(real, indices + i);
        _mm512_mask_storeu_ps(out_values + kept, first(more), _mm512_maskz_compress_ps(mask, x));
        _mm512_mask_storeu_epi32(out_indices + kept, first(more),
                                 _mm512_maskz_compress_epi32(mask, index));
        const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(kept)));
        _mm512_mask_storeu_epi32(
            keys + i, real, _mm512_mask_expand_epi32(_mm512_set1_epi32(-1), mask, places));
        kept += more;
    }
}

} // namespace
} // namespace ddl_cpu

#include "loops.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace ddl_cpu {
extern const Loops avx512_loops = kLoops;
}

#endif
