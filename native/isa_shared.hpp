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

// Eight counts of 16 bits in a register: in memory, storing them one by one and loading them together would wait.
class EightCounts {
public:
#ifdef __SSE2__
    // A byte for each.
    void add(u64 bytes) {
        __m128i eight = _mm_cvtsi64_si128(static_cast<i64>(bytes));
        counts_ = _mm_add_epi16(counts_, _mm_unpacklo_epi8(eight, _mm_setzero_si128()));
    }

    void store(u16* to) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), counts_); }

private:
    __m128i counts_ = _mm_setzero_si128();
#else
    void add(u64 bytes) {
        for (int i = 0; i < 8; ++i) counts_[i] = static_cast<u16>(counts_[i] + (bytes >> (8 * i) & 0xFF));
    }

    void store(u16* to) const { std::memcpy(to, counts_, sizeof(counts_)); }

private:
    u16 counts_[8] = {};
#endif
};

// Running counts of the members of up to K classes, for instruction sets that look at one group of 64 at a time:
//   V::Exponents(const Kind&)                              takes the exponents of 64 elements at p, in any order, as
//   of(p) int V::exceeding(exponents, const V::Bounds&, int t)   how many of them exceed bound t
template <class V, int K>
class GroupTally {
public:
    static constexpr u64 kGroups = 1;

    GroupTally(const Kind& kind, const typename V::Bounds& bounds) : exponents_(kind), bounds_(bounds) {}

    template <class U>
    void add(const U* p, u16* before, int) {
        store(before);
        const auto exponents = exponents_.of(p);
        // How many exceed each bound, a byte each. All 64 exceed the bound before the first.
        u64 exceed[kWords] = {}, above = 64;
        for (int t = 0; t < K - 1; ++t)
            exceed[t / 8] |= static_cast<u64>(V::exceeding(exponents, bounds_, t)) << (8 * (t % 8));
        for (int w = 0; w < kWords; ++w) {
            counts_[w].add((exceed[w] << 8 | above) - exceed[w]);
            above = exceed[w] >> 56;
        }
    }

    void store(u16* counts) const {
        for (int w = 0; w < kWords; ++w) counts_[w].store(counts + 8 * w);
    }

private:
    static constexpr int kWords = (K + 7) / 8;

    typename V::Exponents exponents_;
    const typename V::Bounds& bounds_;
    EightCounts counts_[kWords];
};

// The bits of an element in the order of its planes: the sign of a float becomes the lowest bit.
template <bool Float, class U>
[[gnu::always_inline]] inline U rotated_in(U bits) {
    return Float ? U(bits << 1 | bits >> (8 * sizeof(U) - 1)) : bits;
}

template <bool Float, class U>
[[gnu::always_inline]] inline U rotated_out(U bits) {
    return Float ? U(bits >> 1 | bits << (8 * sizeof(U) - 1)) : bits;
}

// Plain loops, which compilers turn into shuffles.
template <bool Float, class U>
void split_plane(const U* __restrict elements, u64 count, int shift, u8* __restrict plane) {
    for (u64 i = 0; i < count; ++i) plane[i] = static_cast<u8>(rotated_in<Float>(elements[i]) >> shift);
}

// Appends two planes to the bits that elements have so far; elements of one byte have one plane, `low`.
template <bool First, bool Last, bool Float, class U>
void join_planes(const u8* __restrict high, const u8* __restrict low, u64 count, U* __restrict elements) {
    for (u64 i = 0; i < count; ++i) {
        U bits = low[i];
        if constexpr (sizeof(U) > 1) bits = U(bits | high[i] << 8);
        if constexpr (!First) bits = U(bits | u64{elements[i]} << 16);
        elements[i] = Last ? rotated_out<Float>(bits) : bits;
    }
}

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

// The same for elements of 16 bits, whose products with digits of keys fit into 32 bits:
//   Vector V::flip(Vector, u32 bits)          with these bits of each 32-bit number turned over
//   Vector V::multiply_pairs(Vector, Vector)  products of signed 16-bit numbers, each pair of neighbours added
//   Vector V::add_products(Vector, Vector)    sums of 32-bit numbers
//   Vector V::shift_left(Vector, int)         of 64-bit numbers
// Numbers are made signed, and sums unsigned again, by turning over the top bit: that takes away or adds a constant.
template <class V>
inline void weigh_digits(const u16* p, u64 n, u64 column, u64 sums[2]) {
    using Vector = typename V::Vector;
    constexpr u64 kNumbers = 4 * V::kNumbers, kAtOnce = 32 * kNumbers;
    alignas(64) u64 ones[V::kNumbers], parts[V::kNumbers];
    for (u64& one : ones) one = 1;
    const Vector one = V::load(ones);
    sums[0] = sums[1] = 0;
    u64 end = n / kNumbers * kNumbers;
    for (u64 first = 0; first < end; first += kAtOnce) {
        u64 last = end - first < kAtOnce ? end : first + kAtOnce;
        for (int lane = 0; lane < 2; ++lane) {
            Vector totals[kDigits], sum = V::zero();
            for (Vector& total : totals) total = V::zero();
            for (u64 i = first; i < last; i += kNumbers) {
                Vector bits = V::flip(V::load(p + i), 0x80008000u);
                for (int d = 0; d < kDigits; ++d) {
                    Vector digits = V::load(&kColumnDigits.of[lane][d][column + i]);
                    totals[d] = V::add_products(totals[d], V::multiply_pairs(bits, digits));
                }
            }
            for (int d = 0; d < kDigits; ++d) {
                Vector total = V::flip(totals[d], 0x80000000u);
                total = V::add(V::multiply(total, one), V::upper(total));
                sum = V::add(sum, V::shift_left(total, kDigitShift[d]));
                sums[lane] -= 2 * V::kNumbers * (u64{1} << 31) << kDigitShift[d];
            }
            V::store(parts, sum);
            for (u64 part : parts) sums[lane] += part;
            const u64* keys = kColumnDigits.sums[lane];
            sums[lane] += (keys[column + last] - keys[column + first]) << 15;
        }
    }
    weigh_plainly(p, end, n, column, sums);
}

}  // namespace
}  // namespace deltasync
