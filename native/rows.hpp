// Rows of symbols through the entropy coder, eight lanes at a time, for instruction sets that have vectors of 256 bits:
//   __m256i P::take_words(__m256i x, const u8*& words)              moves words into the lanes that are too small
//   __m256i P::give_words(__m256i x, __m256i limit, u16*& words)    moves words out of the lanes that exceed the limit
// Each instruction set compiles its own copy, in an anonymous namespace.
#pragma once

#include "coder.hpp"
#include "isa_shared.hpp"

namespace deltasync {
namespace {

// For each set of lanes: which of the words that follow is due in a lane, if one is.
struct TakeOrder {
    alignas(64) u8 of[256][8];

    constexpr TakeOrder() : of{} {
        for (int lanes = 0; lanes < 256; ++lanes)
            for (int lane = 0, word = 0; lane < 8; word += lanes >> lane++ & 1) of[lanes][lane] = static_cast<u8>(word);
    }
};

// For each set of lanes: a byte shuffle that moves their words, in order, to the end of eight words.
struct GiveOrder {
    alignas(64) u8 of[256][16];

    constexpr GiveOrder() : of{} {
        for (int lanes = 0; lanes < 256; ++lanes)
            for (int lane = 7, word = 7; lane >= 0; --lane)
                if (lanes >> lane & 1) {
                    of[lanes][2 * word] = static_cast<u8>(2 * lane);
                    of[lanes][2 * word + 1] = static_cast<u8>(2 * lane + 1);
                    --word;
                }
    }
};

inline constexpr TakeOrder kTakeOrder;
inline constexpr GiveOrder kGiveOrder;

template <class P>
struct Rows {
    static constexpr int kVectors = kRow / 8;

    static __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
    static __m256i fill(u32 x) { return _mm256_set1_epi32(static_cast<int>(x)); }

    // Where the words lie that follow the rows that were decoded. Stops after a row that ends beyond `last`.
    static const u8* decode(const DecodeTable& table, u32* states, u64& rows, const u8* words, const u8* last,
                            u8* symbols) {
        const __m256i slot_mask = fill(kSlots - 1), byte = fill(0xFF);
        __m256i x[kVectors], entry[kVectors];
        for (int v = 0; v < kVectors; ++v) x[v] = load(states + 8 * v);
        u64 row = 0;
        for (; row < rows && words <= last; ++row) {
            for (int v = 0; v < kVectors; ++v)
                entry[v] = _mm256_i32gather_epi32(reinterpret_cast<const int*>(table.slots),
                                                  _mm256_and_si256(x[v], slot_mask), 4);
            for (int v = 0; v < kVectors; ++v) {
                __m256i high = _mm256_srli_epi32(x[v], kPrecision);
                __m256i less_one = _mm256_and_si256(_mm256_srli_epi32(entry[v], 8), slot_mask);
                x[v] = _mm256_add_epi32(_mm256_mullo_epi32(less_one, high),
                                        _mm256_add_epi32(high, _mm256_srli_epi32(entry[v], 20)));
                x[v] = P::take_words(x[v], words);
                entry[v] = _mm256_and_si256(entry[v], byte);
            }
            // Packing works on 128-bit halves; this puts their quarters back in order.
            const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            __m256i packed =
                _mm256_packus_epi16(_mm256_packus_epi32(entry[0], entry[1]), _mm256_packus_epi32(entry[2], entry[3]));
            store(symbols + kRow * row, _mm256_permutevar8x32_epi32(packed, order));
        }
        for (int v = 0; v < kVectors; ++v) store(states + 8 * v, x[v]);
        rows = row;
        return words;
    }

    // The entries of eight symbols: factors and fields. Plain loads are quicker than gathers.
    static void look_up(const EncodeTable& table, const u8* symbols, __m256i& factor, __m256i& fields) {
        __m128i pair[4];
        for (int i = 0; i < 4; ++i) {
            __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&table.packed[symbols[2 * i]]));
            __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&table.packed[symbols[2 * i + 1]]));
            pair[i] = _mm_unpacklo_epi64(first, second);
        }
        __m256 low = _mm256_castsi256_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(pair[0]), pair[2], 1));
        __m256 high = _mm256_castsi256_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(pair[1]), pair[3], 1));
        factor = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88));
        fields = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xDD));
    }

    // From the last row to the first; gives where the words begin.
    static u16* encode(const EncodeTable& table, u32* states, u64 rows, const u8* symbols, u16* words) {
        const __m256i slot_mask = fill(kSlots - 1), below_frequency = fill(0xFFFFF), one = fill(1), nibble = fill(15);
        __m256i x[kVectors];
        for (int v = 0; v < kVectors; ++v) x[v] = load(states + 8 * v);
        for (u64 row = rows; row-- > 0;)
            for (int v = kVectors - 1; v >= 0; --v) {
                __m256i factor, fields;
                look_up(table, symbols + kRow * row + 8 * static_cast<u64>(v), factor, fields);
                x[v] = P::give_words(x[v], _mm256_or_si256(fields, below_frequency), words);
                __m256i dividend = _mm256_add_epi32(x[v], _mm256_and_si256(_mm256_srli_epi32(fields, 16), one));
                __m256i even = _mm256_mul_epu32(dividend, factor);
                __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(dividend, 32), _mm256_srli_epi64(factor, 32));
                __m256i high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
                __m256i shift = _mm256_and_si256(_mm256_srli_epi32(fields, 12), nibble);
                __m256i others = _mm256_sub_epi32(slot_mask, _mm256_srli_epi32(fields, 20));
                x[v] = _mm256_add_epi32(_mm256_add_epi32(x[v], _mm256_and_si256(fields, slot_mask)),
                                        _mm256_mullo_epi32(_mm256_srlv_epi32(high, shift), others));
            }
        for (int v = 0; v < kVectors; ++v) store(states + 8 * v, x[v]);
        return words;
    }
};

}  // namespace
}  // namespace deltasync
