// What several instruction sets have in common. Each compiles its own copy: the anonymous namespace keeps the linker
// from sharing code between them, and no functions of the standard library are used for the same reason.
#pragma once

#include <cstring>
#if defined(__SSE2__) && !defined(DELTASYNC_SIMDE)  // SIMDe includes what it builds on
#include <immintrin.h>
#endif

#include "digest.hpp"
#include "isa.hpp"
#include "width.hpp"

namespace deltasync {
namespace {

inline int ones(u64 mask) { return __builtin_popcountll(mask); }

// Place of the lowest set bit; 0 if there is none.
inline u32 lowest_bit(u64 mask) {
#ifdef __BMI__
    return static_cast<u32>(_tzcnt_u64(mask)) & 63;
#else
    return mask ? static_cast<u32>(__builtin_ctzll(mask)) : 0;
#endif
}

// Place of the set bit that has `rank` set bits below it; there is one.
inline u32 select_bit(u64 mask, u32 rank) {
#ifdef __BMI2__
    return static_cast<u32>(_tzcnt_u64(_pdep_u64(u64{1} << rank, mask)));
#else
    // Halving by popcount: which half of the word holds the bit, and so on down.
    u32 at = 0;
    for (u32 half = 32; half; half /= 2) {
        u32 low = static_cast<u32>(ones(mask & ((u64{1} << half) - 1)));
        bool above = rank >= low;
        rank -= above ? low : 0;
        mask >>= above ? half : 0;
        at += above ? half : 0;
    }
    return at;
#endif
}

// Transposes an 8 by 8 matrix of 16-bit numbers. Rows begin at multiples of 16 bytes.
inline void transpose(const u16* from, u64 from_stride, u16* to, u64 to_stride) {
#ifdef __SSE2__
    // Each round interleaves the rows of the upper half with those of the lower half: three rounds exchange the three
    // bits of the row's number with those of the column's.
    __m128i rows[8], mixed[8];
    for (u64 i = 0; i < 8; ++i) rows[i] = _mm_load_si128(reinterpret_cast<const __m128i*>(from + i * from_stride));
    for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < 4; ++i) {
            mixed[2 * i] = _mm_unpacklo_epi16(rows[i], rows[i + 4]);
            mixed[2 * i + 1] = _mm_unpackhi_epi16(rows[i], rows[i + 4]);
        }
        for (int i = 0; i < 8; ++i) rows[i] = mixed[i];
    }
    for (u64 i = 0; i < 8; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(to + i * to_stride), rows[i]);
#else
    for (u64 i = 0; i < 8; ++i)
        for (u64 j = 0; j < 8; ++j) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

// One float32 as bfloat16, to nearest, ties to even: just under half a unit is added before the lower half is cut off,
// and one bit more where the result would be odd.
inline u16 rounded(u32 bits, u16 nan) {
    bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    return is_nan ? nan : static_cast<u16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Members of class c have an exponent field, in place, from `low` to `low + span`; `keep` cuts the field out.
struct MemberFields {
    u32 keep, low, span;

    MemberFields() = default;
    MemberFields(const Kind& kind, const Classes& classes, int c)
        : keep(kind.exponent_mask << kind.exponent_shift),
          low(classes.lowest(c) << kind.exponent_shift),
          span((classes.highest(c, kind) - classes.lowest(c)) << kind.exponent_shift) {}
};

// Running counts of the members of up to K classes, for instruction sets that look at one group of 64 at a time:
//   V::Exponents(const Kind&)                              takes the exponents of 64 elements at p as of(p)
//   int V::exceeding(exponents, const V::Bounds&, int t)   how many of them exceed bound t
template <class V, int K>
class GroupTally {
public:
    static constexpr u64 kGroups = 1;

    GroupTally(const Kind& kind, const typename V::Bounds& bounds) : exponents_(kind), bounds_(bounds) {}

    template <class U>
    void add(const U* p, u16* before, int) {
        store(before);
        const auto exponents = exponents_.of(p);
        int above = 64;
        for (int c = 0; c < K; ++c) {
            int next = c < K - 1 ? V::exceeding(exponents, bounds_, c) : 0;
            counts_[c] = static_cast<u16>(counts_[c] + above - next);
            above = next;
        }
    }

    void store(u16* counts) const { std::memcpy(counts, counts_, sizeof(counts_)); }

private:
    typename V::Exponents exponents_;
    const typename V::Bounds& bounds_;
    u16 counts_[(K + 7) / 8 * 8] = {};
};

// Adds key * bits of elements from..n-1, one by one.
template <class U>
void weigh_plainly(const U* p, u64 from, u64 n, u64 column, u64 sums[2]) {
    for (u64 i = from; i < n; ++i)
        for (int lane = 0; lane < 2; ++lane)
            sums[lane] += kColumnKeys[static_cast<std::size_t>(lane)][column + i] * static_cast<u64>(p[i]);
}

// Sums of key * bits over n elements, in vectors of 64-bit numbers:
//   V::Vector, V::kNumbers                    a vector, and how many numbers it has
//   load, store, zero, add                    what they say
//   Vector V::widen(const U* p)               kNumbers elements as 64-bit numbers
//   Vector V::multiply(Vector, Vector)        the products of the lower halves of the numbers
//   Vector V::upper(Vector)                   the upper halves of the numbers
// Keys have 64 bits and elements at most 32: the halves of a key are multiplied, and their sums joined at the end.
template <class V, class U>
inline void weigh_vectors(const U* p, u64 n, u64 column, u64 sums[2]) {
    using Vector = typename V::Vector;
    Vector low[2] = {V::zero(), V::zero()}, high[2] = {V::zero(), V::zero()};
    u64 i = 0;
    for (; i + V::kNumbers <= n; i += V::kNumbers) {
        Vector bits = V::widen(p + i);
        for (int lane = 0; lane < 2; ++lane) {
            Vector key = V::load(&kColumnKeys[static_cast<std::size_t>(lane)][column + i]);
            low[lane] = V::add(low[lane], V::multiply(bits, key));
            high[lane] = V::add(high[lane], V::multiply(bits, V::upper(key)));
        }
    }
    for (int lane = 0; lane < 2; ++lane) {
        alignas(64) u64 lows[V::kNumbers], highs[V::kNumbers];
        V::store(lows, low[lane]);
        V::store(highs, high[lane]);
        sums[lane] = 0;
        for (u64 j = 0; j < V::kNumbers; ++j) sums[lane] += lows[j] + (highs[j] << 32);
    }
    weigh_plainly(p, i, n, column, sums);
}

}  // namespace
}  // namespace deltasync
