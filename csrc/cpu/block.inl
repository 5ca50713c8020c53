// A block of 64 accumulated values in memory, and picking from few: plain loops.
//
// avx512.cpp has the same functions over registers; loops.inl uses either.

namespace ddl_cpu {
namespace {

struct Block {
    alignas(64) float x[kBlock];
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

// float16 to float32. The exponent's bias differs by 112, and a product with 2^112 is exact, also
// for denormals; infinity and NaN get float32's exponent of ones.
inline float widen_float16(uint16_t half) {
    const uint32_t special = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const float scaled = from_bits(static_cast<uint32_t>(half & 0x7fffu) << 13) * 0x1p112f;
    return from_bits(static_cast<uint32_t>(bits_of(scaled)) | sign | special);
}

template <Form form> inline float gradient(const void *flat, Size i) {
    if constexpr (form == kFloat32) return static_cast<const float *>(flat)[i];
    const uint16_t half = static_cast<const uint16_t *>(flat)[i];
    if constexpr (form == kBFloat16) return from_bits(static_cast<uint32_t>(half) << 16);
    return widen_float16(half);
}

inline Block load(const float *source) {
    Block block;
    std::memcpy(block.x, source, sizeof block.x);
    return block;
}

inline void store(const Block &block, float *target) {
    std::memcpy(target, block.x, sizeof block.x);
}

template <Form form>
inline Block accumulate(const void *flat, const float *residual, Size position, float scale) {
    Block block;
#ifdef DDL_F16C
    if constexpr (form == kFloat16) {
        const uint16_t *half = static_cast<const uint16_t *>(flat) + position;
        for (Size j = 0; j < kBlock; j += 8) {
            const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i *>(half + j));
            const __m256 scaled = _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_cvtph_ps(eight));
            const __m256 owed = _mm256_loadu_ps(residual + position + j);
            _mm256_store_ps(block.x + j, _mm256_add_ps(scaled, owed));
        }
        return block;
    }
#endif
    for (Size j = 0; j < kBlock; ++j)
        block.x[j] = scale * gradient<form>(flat, position + j) + residual[position + j];
    return block;
}

// Whether any key reaches `least`, which is at least 1.
inline bool any_reaches(const Block &block, Key least) {
    Key below_zero = 0;
    for (Size j = 0; j < kBlock; ++j)
        below_zero |= (least - 1) - (bits_of(block.x[j]) & kMagnitude);
    return below_zero < 0;
}

// Append what reaches `least` to the candidates; return how many. Writes up to kBlock entries.
inline Size pick(const Block &block, Key least, Size position, Index *indices, float *values) {
    Size count = 0;
    for (Size j = 0; j < kBlock; ++j) {
        indices[count] = static_cast<Index>(position + j);
        values[count] = block.x[j];
        count += (bits_of(block.x[j]) & kMagnitude) >= least;
    }
    return count;
}

// Store the block with zeros where the key reaches `least`.
inline void store_rest(const Block &block, Key least, float *target) {
    for (Size j = 0; j < kBlock; ++j)
        target[j] = (bits_of(block.x[j]) & kMagnitude) >= least ? 0.0f : block.x[j];
}

// Sums and sums of squares of a chunk, by lane. The squares are exact in float64.
class Sums {
  public:
    explicit Sums(const double *lanes) {
        for (Size l = 0; l < kLanes; ++l) total_[l] = lanes[l], squares_[l] = lanes[kLanes + l];
    }
    void add(const Block &block) {
        for (Size j = 0; j < kBlock; j += kLanes)
            for (Size l = 0; l < kLanes; ++l) {
                const double value = block.x[j + l];
                total_[l] += value;
                squares_[l] += value * value;
            }
    }
    void put(double *lanes) const {
        for (Size l = 0; l < kLanes; ++l) lanes[l] = total_[l], lanes[kLanes + l] = squares_[l];
    }

  private:
    double total_[kLanes], squares_[kLanes];
};

// Count keys above `high` and copy those in [low, high] to `out` as far as they fit; `out` may be
// the keys themselves.
inline Size narrow(const Key *keys, Size count, Key low, Key high, Key *out, Size room,
                   Size *inside) {
    Size above = 0, within = 0;
    for (Size i = 0; i < count; ++i) {
        const Key key = keys[i] & kMagnitude;
        above += key > high;
        out[within < room ? within : room - 1] = key;
        within += key >= low && key <= high;
    }
    *inside = within;
    return above;
}

// Move candidates above the cutoff, and the first `ties` equal to it, to the front of `out`, which
// may be the candidates themselves; give the others back to the residual.
inline Size partition(float *residual, const Index *indices, const float *values, Size count,
                      Key cutoff, Size ties, Index *out_indices, float *out_values) {
    Size kept = 0;
    for (Size i = 0; i < count; ++i) {
        const Key key = bits_of(values[i]) & kMagnitude;
        if (key > cutoff || (key == cutoff && ties > 0)) {
            ties -= key == cutoff;
            out_indices[kept] = indices[i];
            out_values[kept] = values[i];
            ++kept;
        } else {
            residual[indices[i]] = values[i];
        }
    }
    return kept;
}

// Copy entries above the cutoff and its first ties to `out`; keys become places there, or -1.
inline void cut(const Index *indices, const float *values, Key *keys, Size count, Size cutoff,
                Size ties, Index *out_indices, float *out_values) {
    Size kept = 0;
    for (Size i = 0; i < count; ++i) {
        const Key key = keys[i];
        if (key > cutoff || (key == cutoff && ties > 0)) {
            ties -= key == cutoff;
            out_indices[kept] = indices[i];
            out_values[kept] = values[i];
            keys[i] = static_cast<Key>(kept++);
        } else {
            keys[i] = -1;
        }
    }
}

} // namespace
} // namespace ddl_cpu
