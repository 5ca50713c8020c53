// Every loop, over the blocks of one level. Included once by each level's file.
//
// Everything lies in an unnamed namespace and no standard template is used: a function shared
// between levels would be linked once, perhaps with instructions that the processor lacks.

namespace ddl_cpu {
namespace {

// --- Selection ------------------------------------------------------------------------------

// Radix select from the most significant digit (11, 10 and 10 bits).
Key kth_by_digits(const Key *keys, Size count, Size k, Size *ties) {
    uint32_t histogram[2048];
    Key prefix = 0; // the digits found so far
    int above = 31; // their position
    for (int shift = 20; shift >= 0; shift -= 10) {
        const Key digits = shift == 20 ? 2047 : 1023;
        std::memset(histogram, 0, sizeof histogram);
        for (Size i = 0; i < count; ++i) {
            const Key key = keys[i] & kMagnitude;
            if (static_cast<int64_t>(key) >> above == prefix) ++histogram[key >> shift & digits];
        }
        Key digit = digits;
        for (; histogram[digit] < k; --digit) k -= histogram[digit];
        prefix = prefix << (above - shift) | digit;
        above = shift;
    }
    *ties = k;
    return prefix;
}

constexpr Size kFew = 2048;      // keys that are not worth narrowing
constexpr Size kNarrowing = 512; // sampled keys
constexpr Size kMargin = 44;     // ranks of the sample, about four standard deviations

// The k-th largest key and its share of the k.
//
// 1. Two ranks of a small sample bracket the key, most probably.
// 2. One pass counts the keys above the bracket and copies those inside.
// 3. Again, while the bracket holds the key and gets smaller; then digit by digit.
Size kth_largest(const Key *keys, Size count, Size k, Size *ties) {
    const Size room = count / 2 + kBlock;
    Key *inner = count > kFew ? static_cast<Key *>(std::malloc(room * sizeof(Key))) : nullptr;
    const Key *left = keys; // the keys inside the bracket, their number, and the rank there
    Size left_count = count, left_k = k;
    while (inner && left_count > kFew) {
        Key sample[kNarrowing];
        for (Size i = 0; i < kNarrowing; ++i)
            sample[i] = left[i * left_count / kNarrowing] & kMagnitude;
        const Size rank = left_k * kNarrowing / left_count;
        Size unused, inside;
        const Key high = rank > kMargin
                             ? kth_by_digits(sample, kNarrowing, rank - kMargin, &unused)
                             : kMagnitude;
        const Key low = rank + kMargin < kNarrowing
                            ? kth_by_digits(sample, kNarrowing, rank + kMargin, &unused)
                            : 0;
        const Size above = narrow(left, left_count, low, high, inner, room, &inside);
        if (left_k <= above || left_k > above + inside || inside > left_count / 2) {
            left = keys; // no bracket; `inner` is spoiled
            left_count = count;
            left_k = k;
            break;
        }
        left = inner;
        left_count = inside;
        left_k -= above;
    }
    const Key key = kth_by_digits(left, left_count, left_k, ties);
    std::free(inner);
    return key;
}

// A full buffer keeps its k largest, in order. Returns the key from which on later entries may
// still be among them: one more than the k-th, because a tie goes to the lower index.
Key tighten(float *residual, Index *indices, float *values, Size count, Size k) {
    Size ties;
    Key *keys = reinterpret_cast<Key *>(values);
    const Key cutoff = static_cast<Key>(kth_largest(keys, count, k, &ties));
    partition(residual, indices, values, count, cutoff, ties, indices, values);
    return cutoff + 1;
}

Size settle(float *residual, const Index *indices, const float *values, Size count, Size cutoff,
            Size ties, Index *out_indices, float *out_values) {
    const Size kept = partition(residual, indices, values, count, static_cast<Key>(cutoff), ties,
                                out_indices, out_values);
    Key least = kMagnitude;
    for (Size i = 0; i < kept; ++i) {
        const Key key = bits_of(out_values[i]) & kMagnitude;
        least = key < least ? key : least;
    }
    return kept ? least : 0;
}

Size count_from(const float *values, Size count, Size least) {
    Size total = 0;
    for (Size i = 0; i < count; ++i) total += (bits_of(values[i]) & kMagnitude) >= least;
    return total;
}

// --- One pass over gradient and residual ----------------------------------------------------

struct Pass {
    const void *flat;
    float *residual;
    Size hi;
    float scale;
    Size k;
    Index *indices; // candidates of this thread
    float *values;
    Size room;
    Word *poisoned; // nullptr: not made yet
    double *sums;   // nullptr: not wanted
    Size *state;
};

// Entry by entry: the last block, and blocks with entries that are not finite. `x` holds the
// accumulated values; afterwards 0 where not finite. Returns false if the map is needed first.
template <bool fresh>
bool carefully(const Pass &pass, float *x, Size position, Size size, Key least, Size *place) {
    Word mask = 0;
    if (fresh) {
        for (Size j = 0; j < size; ++j)
            mask |= static_cast<Word>((bits_of(x[j]) & kMagnitude) >= kInfinite) << j;
        if (mask && !pass.poisoned) return false;
        if (mask) pass.poisoned[position / kBlock] = mask;
    } else if (pass.poisoned) {
        mask = pass.poisoned[position / kBlock];
    }
    for (Size j = 0; j < size; ++j) {
        if (mask >> j & 1) {
            x[j] = 0.0f;
            pass.state[kNonfinite] += fresh;
        } else if ((bits_of(x[j]) & kMagnitude) >= least) {
            pass.indices[*place] = static_cast<Index>(position + j);
            pass.values[*place] = x[j];
            ++*place;
            pass.residual[position + j] = 0.0f;
        } else if (fresh) {
            pass.residual[position + j] = x[j];
        }
    }
    return true;
}

template <Form form, bool fresh, bool moments> Size collect_as(const Pass &pass) {
    Size position = pass.state[kPosition];
    Size place = pass.state[kCount];
    Size passed = pass.state[kPassed];
    Key least = static_cast<Key>(pass.state[kLeast]);
    const Size full = pass.room - kBlock;
    bool stopped = false;
    while (position < pass.hi && !stopped) {
        const Size next = (position / kChunk + 1) * kChunk;
        const Size end = next < pass.hi ? next : pass.hi;
        double unused[2 * kLanes] = {};
        double *lanes = moments ? pass.sums + position / kChunk * 2 * kLanes : unused;
        Sums sums(lanes);
        for (; position < end; position += kBlock) {
            const bool whole = position + kBlock <= end;
            Block block;
            if (whole) {
                block = fresh ? accumulate<form>(pass.flat, pass.residual, position, pass.scale)
                              : load(pass.residual + position);
                const bool mapped = !fresh && pass.poisoned && pass.poisoned[position / kBlock];
                if (!any_reaches(block, least) && !mapped) {
                    if (fresh) store(block, pass.residual + position);
                    if (moments) sums.add(block);
                    continue;
                }
            }
            if (place > full) {
                least = tighten(pass.residual, pass.indices, pass.values, place, pass.k);
                place = pass.k;
            }
            if (!whole || !fresh || any_reaches(block, kInfinite)) {
                alignas(64) float x[kBlock] = {};
                const Size size = whole ? kBlock : end - position;
                if (whole)
                    store(block, x);
                else
                    for (Size j = 0; j < size; ++j)
                        x[j] = fresh ? pass.scale * gradient<form>(pass.flat, position + j) +
                                           pass.residual[position + j]
                                     : pass.residual[position + j];
                const Size before = place;
                if (!carefully<fresh>(pass, x, position, size, least, &place)) {
                    stopped = true;
                    break;
                }
                passed += place - before;
                if (moments) sums.add(load(x));
                if (!whole) {
                    position = end;
                    break;
                }
                continue;
            }
            const Size more =
                pick(block, least, position, pass.indices + place, pass.values + place);
            store_rest(block, least, pass.residual + position);
            place += more;
            passed += more;
            if (moments) sums.add(block);
        }
        if (moments) sums.put(lanes);
    }
    pass.state[kPosition] = position;
    pass.state[kCount] = place;
    pass.state[kLeast] = least;
    pass.state[kPassed] = passed;
    return stopped;
}

template <Form form> Size collect_form(const Pass &pass, bool fresh) {
    if (!fresh) return collect_as<form, false, false>(pass);
    if (pass.sums) return collect_as<form, true, true>(pass);
    return collect_as<form, true, false>(pass);
}

Size collect(const void *flat, float *residual, Size hi, float scale, Size form, Size fresh, Size k,
             Index *indices, float *values, Size start, Size room, Word *poisoned, double *sums,
             Size *state) {
    const Pass pass{flat, residual,         hi,   scale,    k,    indices + start,
                    values + start, room, poisoned, sums, state};
    if (!fresh || form == kFloat32) return collect_form<kFloat32>(pass, fresh);
    return form == kBFloat16 ? collect_form<kBFloat16>(pass, true)
                             : collect_form<kFloat16>(pass, true);
}

template <Form form>
void sample_as(const void *flat, const float *residual, Size numel, float scale, bool fresh,
               Key *keys, Size wanted) {
    const Word runs = (wanted + kSampleRun - 1) / kSampleRun;
    const Word n = numel;
    Word noise = 0x9E3779B97F4A7C15u;
    Size taken = 0;
    for (Word i = 0; i < runs; ++i) {
        Word position = i * kSampleRun;
        const Size size = kSampleRun < wanted - taken ? kSampleRun : wanted - taken;
        if (wanted < numel) {
            position = i * n / runs;
            const Word free = (i + 1) * n / runs - position;
            noise ^= noise << 13; // xorshift64
            noise ^= noise >> 7;
            noise ^= noise << 17;
            if (free > kSampleRun) position += (noise >> 32) % (free - kSampleRun + 1);
            if (position > n - kSampleRun) position = n - kSampleRun;
        }
        for (Size j = 0; j < size; ++j) {
            const float owed = residual[position + j];
            const float x = fresh ? scale * gradient<form>(flat, position + j) + owed : owed;
            const Key key = bits_of(x) & kMagnitude;
            keys[taken + j] = key < kInfinite ? key : 0;
        }
        taken += size;
    }
}

void sample(const void *flat, const float *residual, Size numel, float scale, Size form, Size fresh,
            Key *keys, Size wanted) {
    const auto as = form == kFloat32    ? sample_as<kFloat32>
                    : form == kBFloat16 ? sample_as<kBFloat16>
                                        : sample_as<kFloat16>;
    as(flat, residual, numel, scale, fresh, keys, wanted);
}

void take(float *residual, const Index *indices, Size count, const Word *poisoned,
          float *out_values) {
    for (Size i = 0; i < count; ++i) {
        const Size index = indices[i];
        if (poisoned && poisoned[index / kBlock] >> (index % kBlock) & 1) {
            out_values[i] = 0.0f;
        } else {
            out_values[i] = residual[index];
            residual[index] = 0.0f;
        }
    }
}

// --- Sparse vectors -------------------------------------------------------------------------

Size join(const Index *a_indices, const float *a_values, Size a_count, const Index *b_indices,
          const float *b_values, Size b_count, Index *indices, float *values, Index *place_a,
          Index *place_b) {
    Size a = 0, b = 0, to = 0;
    while (a < a_count && b < b_count) {
        // No branch on the data: which vector comes next is as random as a coin.
        const Index from_a = a_indices[a], from_b = b_indices[b];
        const bool use_a = from_a <= from_b, use_b = from_b <= from_a;
        // Not the sum with 0, which would turn -0 into 0.
        const float sum = a_values[a] + b_values[b];
        const float one = use_a ? a_values[a] : b_values[b];
        indices[to] = use_a ? from_a : from_b;
        values[to] = use_a & use_b ? sum : one;
        place_a[a] = static_cast<Index>(to); // the last write to a place is the right one
        place_b[b] = static_cast<Index>(to);
        a += use_a;
        b += use_b;
        ++to;
    }
    for (; a < a_count; ++a, ++to) {
        indices[to] = a_indices[a];
        values[to] = a_values[a];
        place_a[a] = static_cast<Index>(to);
    }
    for (; b < b_count; ++b, ++to) {
        indices[to] = b_indices[b];
        values[to] = b_values[b];
        place_b[b] = static_cast<Index>(to);
    }
    return to;
}

void ranks(const float *values, Size count, Key *keys) {
    for (Size i = 0; i < count; ++i) {
        const Key key = bits_of(values[i]) & kMagnitude;
        keys[i] = key < kInfinite ? key : kInfinite;
    }
}

void keep(const Index *indices, const float *values, Key *keys, Size count, Size cutoff, Size ties,
          Index *out_indices, float *out_values, Index *place_a, Size a_count, Index *place_b,
          Size b_count) {
    cut(indices, values, keys, count, cutoff, ties, out_indices, out_values);
    for (Size i = 0; i < a_count; ++i) place_a[i] = keys[place_a[i]];
    for (Size i = 0; i < b_count; ++i) place_b[i] = keys[place_b[i]];
}

template <typename Bits>
void put(Bits *dense, const Index *indices, const Bits *values, Size count) {
    for (Size i = 0; i < count; ++i) dense[indices[i]] = values[i];
}

void add(float *dense, const Index *indices, const float *values, Size count) {
    for (Size i = 0; i < count; ++i) dense[indices[i]] += values[i];
}

// The images of 0, 1, .. under a permutation of [0, numel); see kernels/reference.py.
void permute(Size numel, Size half_bits, const Word *keys, Size rounds, Index *out, Size count) {
    const Word low = (Word{1} << half_bits) - 1;
    const Word word = 0xffffffffu;
    for (Size i = 0; i < count; ++i) {
        Word number = i;
        do {
            Word left = number >> half_bits, right = number & low;
            for (Size r = 0; r < rounds; ++r) {
                Word mixed = (right + keys[r]) & word;
                mixed = (mixed ^ mixed >> 16) * 0x45D9F3Bu & word;
                mixed = (mixed ^ mixed >> 16) * 0x45D9F3Bu & word;
                const Word other = left ^ ((mixed ^ mixed >> 16) & low);
                left = right;
                right = other;
            }
            number = left << half_bits | right;
        } while (number >= static_cast<Word>(numel));
        out[i] = static_cast<Index>(number);
    }
}

constexpr Loops kLoops = {
    collect, sample, take, kth_largest,   settle,        count_from, join,
    ranks,   keep,   put<uint32_t>, put<uint16_t>, add,        permute,
};

} // namespace
} // namespace ddl_cpu
