// AVX-512 (F, BW, VL, DQ) and BMI2. Compiled with those instructions on: nothing here may run before avx512_isa() said
// yes.
#include "isa.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__BMI2__)
#include <immintrin.h>
#define DELTASYNC_AVX512 1
#elif defined(DELTASYNC_SIMDE)
// The same source on emulated instructions, so that it is tested on machines that lack them.
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
// SIMDe 0.7.4 gives one alias four arguments, and lacks others.
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#define _mm256_cmple_epu8_mask(a, b) simde_mm256_cmple_epu8_mask(a, b)
#define _mm256_cmple_epu32_mask(a, b) simde_mm256_cmple_epu32_mask(a, b)
#define DELTASYNC_AVX512 1
#endif

#ifdef DELTASYNC_AVX512

#include "rows.hpp"
#include "scan.hpp"

namespace deltasync {
namespace {

// Words into and out of eight lanes of the coder.
struct Avx512Words {
    static __m256i take_words(__m256i x, const u8*& words) {
        u8 low = _mm256_cmple_epu32_mask(x, _mm256_set1_epi32(kStateMin - 1));
        __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
        words += 2 * ones(low);
        return _mm256_or_si256(_mm256_mask_mov_epi32(x, low, _mm256_slli_epi32(x, 16)),
                               _mm256_maskz_expand_epi32(low, next));
    }

    static __m256i give_words(__m256i x, __m256i limit, u16*& words) {
        u8 full = static_cast<u8>(~_mm256_cmple_epu32_mask(x, limit));
        __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xFFFF));
        __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
        __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(kGiveOrder.of[full]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(words - 8), _mm_shuffle_epi8(packed, order));
        words -= ones(full);
        return _mm256_mask_mov_epi32(x, full, _mm256_srli_epi32(x, 16));
    }
};

// Shuffles that turn the order round: from bytes to 32-bit numbers, and from 32-bit numbers to their lower halves.
struct Descending {
    alignas(64) u8 bytes[64];
    alignas(64) u16 low_halves[32];

    constexpr Descending() : bytes{}, low_halves{} {
        for (int i = 0; i < 64; ++i) bytes[i] = static_cast<u8>(i % 4 ? 0x80 : 15 - i / 4);
        for (int i = 0; i < 16; ++i) low_halves[i] = static_cast<u16>(2 * (15 - i));
    }
};

inline constexpr Descending kDescending;

// Encodes rows sixteen lanes at a time. The entries of the symbols in the table's window are in registers.
class WindowRows {
public:
    explicit WindowRows(const EncodeTable& table) : table_(table), first_(fill(static_cast<u8>(table.window))) {
        // A symbol's place is its number modulo the size of the window.
        alignas(64) u32 factor[kWindow], fields[kWindow];
        for (u32 s = table.window; s < table.window + kWindow; ++s) {
            factor[s % kWindow] = static_cast<u32>(table.packed[s]);
            fields[s % kWindow] = static_cast<u32>(table.packed[s] >> 32);
        }
        for (int i = 0; i < 4; ++i) {
            factor_[i] = _mm512_load_si512(factor + 16 * i);
            fields_[i] = _mm512_load_si512(fields + 16 * i);
        }
    }

    u16* encode(u32* states, u64 rows, const u8* symbols, u16* words) const {
        // Lanes are held in descending order: compressing moves them to the front, and turning them round to the end.
        const __m512i descending = _mm512_set_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __m512i x[2];
        for (int v = 0; v < 2; ++v) x[v] = _mm512_permutexvar_epi32(descending, _mm512_loadu_si512(states + 16 * v));
        for (u64 row = rows; row-- > 0;) {
            const u8* p = symbols + kRow * row;
            __m256i offsets = _mm256_sub_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), first_);
            bool inside = _mm256_cmple_epu8_mask(offsets, fill(static_cast<u8>(kWindow - 1))) == 0xFFFFFFFF;
            for (int v = 1; v >= 0; --v) {
                __m512i factor, fields;
                if (inside) [[likely]]
                    look_up(p + 16 * v, factor, fields);
                else
                    gather(p + 16 * v, factor, fields);
                x[v] = step(x[v], factor, fields, words);
            }
        }
        for (int v = 0; v < 2; ++v) _mm512_storeu_si512(states + 16 * v, _mm512_permutexvar_epi32(descending, x[v]));
        return words;
    }

private:
    static __m256i fill(u8 x) { return _mm256_set1_epi8(static_cast<char>(x)); }
    static __m512i fill(u32 x) { return _mm512_set1_epi32(static_cast<int>(x)); }

    // Sixteen symbols as 32-bit numbers, the last one first.
    static __m512i load_descending(const u8* p) {
        __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm512_shuffle_epi8(all, _mm512_load_si512(kDescending.bytes));
    }

    void look_up(const u8* p, __m512i& factor, __m512i& fields) const {
        __m512i symbols = load_descending(p);
        u16 upper = _mm512_test_epi32_mask(symbols, fill(kWindow / 2));
        factor = entry_of(factor_, symbols, upper);
        fields = entry_of(fields_, symbols, upper);
    }

    // Of a table in four vectors; `upper` says which symbols are in the last two.
    static __m512i entry_of(const __m512i* table, __m512i symbols, u16 upper) {
        return _mm512_mask_mov_epi32(_mm512_permutex2var_epi32(table[0], symbols, table[1]), upper,
                                     _mm512_permutex2var_epi32(table[2], symbols, table[3]));
    }

    void gather(const u8* p, __m512i& factor, __m512i& fields) const {
        alignas(64) u32 factors[16], all_fields[16];
        for (int i = 0; i < 16; ++i) {
            factors[i] = static_cast<u32>(table_.packed[p[15 - i]]);
            all_fields[i] = static_cast<u32>(table_.packed[p[15 - i]] >> 32);
        }
        factor = _mm512_load_si512(factors);
        fields = _mm512_load_si512(all_fields);
    }

    static __m512i step(__m512i x, __m512i factor, __m512i fields, u16*& words) {
        u16 full = static_cast<u16>(~_mm512_cmple_epu32_mask(x, _mm512_or_si512(fields, fill(0xFFFFFu))));
        __m512i turned =
            _mm512_permutexvar_epi16(_mm512_load_si512(kDescending.low_halves), _mm512_maskz_compress_epi32(full, x));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(words - 16), _mm512_castsi512_si256(turned));
        words -= ones(full);
        x = _mm512_mask_mov_epi32(x, full, _mm512_srli_epi32(x, 16));
        u16 add = _mm512_test_epi32_mask(fields, fill(1u << 16));
        __m512i dividend = _mm512_mask_add_epi32(x, add, x, fill(1u));
        __m512i even = _mm512_mul_epu32(dividend, factor);
        __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(dividend, 32), _mm512_srli_epi64(factor, 32));
        __m512i high = _mm512_mask_mov_epi32(odd, 0x5555, _mm512_srli_epi64(even, 32));
        __m512i shift = _mm512_and_si512(_mm512_srli_epi32(fields, 12), fill(15u));
        __m512i others = _mm512_sub_epi32(fill(kSlots - 1), _mm512_srli_epi32(fields, 20));
        return _mm512_add_epi32(_mm512_add_epi32(x, _mm512_and_si512(fields, fill(kSlots - 1))),
                                _mm512_mullo_epi32(_mm512_srlv_epi32(high, shift), others));
    }

    const EncodeTable& table_;
    __m256i first_;
    __m512i factor_[4], fields_[4];
};

struct Avx512 {
    using Vector = __m512i;
    static constexpr u64 kNumbers = 8;

    struct Bounds {
        __m512i byte[kClassesMax];
        explicit Bounds(const Classes& classes) {
            for (int t = 0; t < kClassesMax; ++t) byte[t] = _mm512_set1_epi8(static_cast<char>(classes.bounds[t]));
        }
    };

    static __m512i load(const void* p) { return _mm512_loadu_si512(p); }

    static u64 different(const u8* a, const u8* b) {
        return ~static_cast<u64>(_mm512_cmpeq_epi8_mask(load(a), load(b)));
    }

    static u64 different(const u16* a, const u16* b) {
        __m512i low = _mm512_xor_si512(load(a), load(b)), high = _mm512_xor_si512(load(a + 32), load(b + 32));
        return _mm512_test_epi16_mask(low, low) | static_cast<u64>(_mm512_test_epi16_mask(high, high)) << 32;
    }

    static u64 different(const u32* a, const u32* b) {
        u64 equal = 0;
        for (int i = 0; i < 4; ++i)
            equal |= static_cast<u64>(_mm512_cmpeq_epi32_mask(load(a + 16 * i), load(b + 16 * i))) << (16 * i);
        return ~equal;
    }

    static u64 different(const u64* a, const u64* b) {
        u64 equal = 0;
        for (int i = 0; i < 8; ++i)
            equal |= static_cast<u64>(_mm512_cmpeq_epi64_mask(load(a + 8 * i), load(b + 8 * i))) << (8 * i);
        return ~equal;
    }

    static __m512i join(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }

    // The exponents of 64 elements as bytes, in any order. Always inlined: GCC 12 warns about its own headers where
    // they are not.
    class Exponents {
    public:
        explicit Exponents(const Kind& kind)
            : shift_(_mm_cvtsi32_si128(kind.exponent_shift)), mask_(kind.exponent_mask) {}

        [[gnu::always_inline]] __m512i of(const u8* p) const {
            return _mm512_and_si512(_mm512_srl_epi16(load(p), shift_), fill(static_cast<u8>(mask_)));
        }

        [[gnu::always_inline]] __m512i of(const u16* p) const {
            __m512i keep = fill(static_cast<u16>(mask_)), half[2];
            for (int i = 0; i < 2; ++i) half[i] = _mm512_and_si512(_mm512_srl_epi16(load(p + 32 * i), shift_), keep);
            return _mm512_packus_epi16(half[0], half[1]);
        }

        [[gnu::always_inline]] __m512i of(const u32* p) const {
            __m512i keep = fill(mask_), quarter[4];
            for (int i = 0; i < 4; ++i) quarter[i] = _mm512_and_si512(_mm512_srl_epi32(load(p + 16 * i), shift_), keep);
            return _mm512_packus_epi16(_mm512_packs_epi32(quarter[0], quarter[1]),
                                       _mm512_packs_epi32(quarter[2], quarter[3]));
        }

    private:
        __m128i shift_;
        u32 mask_;
    };

    static int exceeding(__m512i exponents, const Bounds& bounds, int t) {
        return ones(_mm512_cmpgt_epu8_mask(exponents, bounds.byte[t]));
    }

    template <int K>
    using Tally = GroupTally<Avx512, K>;

    static __m512i fill(u8 x) { return _mm512_set1_epi8(static_cast<char>(x)); }
    static __m512i fill(u16 x) { return _mm512_set1_epi16(static_cast<short>(x)); }
    static __m512i fill(u32 x) { return _mm512_set1_epi32(static_cast<int>(x)); }

    struct Member {
        __m512i keep, low, span;

        Member() = default;
        Member(const Kind& kind, const Classes& classes, int c) {
            MemberFields fields(kind, classes, c);
            by_float_width(kind, [&]<class U>(U) {
                keep = fill(static_cast<U>(fields.keep));
                low = fill(static_cast<U>(fields.low));
                span = fill(static_cast<U>(fields.span));
            });
        }

        u64 mask(const u8* p) const {
            return _mm512_cmple_epu8_mask(_mm512_sub_epi8(_mm512_and_si512(load(p), keep), low), span);
        }

        u64 mask(const u16* p) const {
            u64 bits = 0;
            for (int i = 0; i < 2; ++i) {
                __m512i above = _mm512_sub_epi16(_mm512_and_si512(load(p + 32 * i), keep), low);
                bits |= static_cast<u64>(_mm512_cmple_epu16_mask(above, span)) << (32 * i);
            }
            return bits;
        }

        u64 mask(const u32* p) const {
            u64 bits = 0;
            for (int i = 0; i < 4; ++i) {
                __m512i above = _mm512_sub_epi32(_mm512_and_si512(load(p + 16 * i), keep), low);
                bits |= static_cast<u64>(_mm512_cmple_epu32_mask(above, span)) << (16 * i);
            }
            return bits;
        }
    };

    // Eight elements as 64-bit numbers.
    static __m512i widen(const u8* p) {
        __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
        return join(_mm256_cvtepu8_epi64(eight), _mm256_cvtepu8_epi64(_mm_srli_si128(eight, 4)));
    }
    static __m512i widen(const u16* p) {
        __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return join(_mm256_cvtepu16_epi64(eight), _mm256_cvtepu16_epi64(_mm_srli_si128(eight, 8)));
    }
    static __m512i widen(const u32* p) {
        return join(_mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                    _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 4))));
    }

    static __m512i zero() { return _mm512_setzero_si512(); }
    static __m512i add(__m512i a, __m512i b) { return _mm512_add_epi64(a, b); }
    static __m512i multiply(__m512i a, __m512i b) { return _mm512_mul_epu32(a, b); }
    static __m512i upper(__m512i v) { return _mm512_srli_epi64(v, 32); }
    static void store(void* to, __m512i v) { _mm512_store_si512(to, v); }

    static __m512i flip(__m512i v, u32 bits) { return _mm512_xor_si512(v, fill(bits)); }
    static __m512i shift_left(__m512i v, int bits) { return _mm512_sll_epi64(v, _mm_cvtsi32_si128(bits)); }
    static __m512i multiply_pairs(__m512i a, __m512i b) { return _mm512_madd_epi16(a, b); }
    static __m512i add_products(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }

    template <class U>
    static void weigh(const U* p, u64 n, u64 column, u64 sums[2]) {
        if constexpr (sizeof(U) == 2)
            weigh_digits<Avx512>(p, n, column, sums);
        else
            weigh_vectors<Avx512>(p, n, column, sums);
    }
};

u16* encode_rows(const EncodeTable& table, u32* states, u64 rows, const u8* symbols, u16* words) {
    if (table.narrow) return WindowRows(table).encode(states, rows, symbols, words);
    return Rows<Avx512Words>::encode(table, states, rows, symbols, words);
}

// What AVX-512 does faster than AVX2; the rest is left to AVX2. benchmarks/kernel_sets.py measures both.
Isa over(const Isa& rest) {
    Isa isa = rest;
    isa.name = "avx512";
    isa.rank = Entry<Avx512>::rank;
    isa.find = Entry<Avx512>::find;
    isa.digest = Entry<Avx512>::digest;
    isa.decode_rows = Rows<Avx512Words>::decode;
    isa.encode_rows = encode_rows;
    return isa;
}

}  // namespace

const Isa* avx512_isa() {
#ifndef DELTASYNC_SIMDE
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("bmi2"))
        return nullptr;
#endif
    static const Isa isa = over(avx2_isa() ? *avx2_isa() : *portable_isa());
    return &isa;
}

}  // namespace deltasync

#else

namespace deltasync {
const Isa* avx512_isa() { return nullptr; }
}  // namespace deltasync

#endif
