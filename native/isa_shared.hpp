// What several instruction sets have in common. Each compiles its own copy: the anonymous namespace keeps the linker
// from sharing code between them, and no functions of the standard library are used for the same reason.
#pragma once

#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
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

}  // namespace
}  // namespace deltasync
