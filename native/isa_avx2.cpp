// AVX2 and BMI2. Compiled with those instructions on: nothing here may run before avx2_isa() said yes.
#include "isa.hpp"

#if defined(__AVX2__) && defined(__BMI2__)

#include <immintrin.h>

#include "scan.hpp"

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

// Rows of symbols through the entropy coder, eight lanes at a time.
struct Rows {
    static constexpr int kVectors = kRow / 8;

    static __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
    static __m256i fill(u32 x) { return _mm256_set1_epi32(static_cast<int>(x)); }

    static int lanes_of(__m256i set) { return _mm256_movemask_ps(_mm256_castsi256_ps(set)); }

    // Moves words into the lanes that are too small.
    static __m256i take_words(__m256i x, const u8*& words) {
        __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), _mm256_setzero_si256());
        int lanes = lanes_of(low);
        __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
        __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kTakeOrder.of[lanes])));
        words += 2 * ones(static_cast<u64>(lanes));
        __m256i filled = _mm256_or_si256(_mm256_slli_epi32(x, 16), _mm256_permutevar8x32_epi32(next, order));
        return _mm256_blendv_epi8(x, filled, low);
    }

    // Moves words out of the lanes that exceed the limit.
    static __m256i give_words(__m256i x, __m256i limit, u16*& words) {
        __m256i fits = _mm256_cmpeq_epi32(_mm256_max_epu32(x, limit), limit);
        int full = lanes_of(fits) ^ 0xFF;
        __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xFFFF));
        __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
        __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(kGiveOrder.of[full]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(words - 8), _mm_shuffle_epi8(packed, order));
        words -= ones(static_cast<u64>(full));
        return _mm256_blendv_epi8(_mm256_srli_epi32(x, 16), x, fits);
    }

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
                x[v] = take_words(x[v], words);
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
                x[v] = give_words(x[v], _mm256_or_si256(fields, below_frequency), words);
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

struct Avx2 {
    // Bytes compare as signed numbers only: both sides are shifted by 128.
    struct Bounds {
        __m256i shifted[kClassesMax];
        explicit Bounds(const Classes& classes) {
            for (int t = 0; t < kClassesMax; ++t)
                shifted[t] = _mm256_set1_epi8(static_cast<char>(classes.bounds[t] ^ 0x80));
        }
    };

    static __m256i shifted(__m256i bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(static_cast<char>(0x80))); }

    static __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

    static __m256i load_halves(const void* low, const void* high) {
        return _mm256_loadu2_m128i(static_cast<const __m128i*>(high), static_cast<const __m128i*>(low));
    }

    static i64 eight_bytes(const u8* p) {
        i64 eight;
        std::memcpy(&eight, p, 8);
        return eight;
    }

    static u64 mask64(__m256i low, __m256i high) {
        return static_cast<u32>(_mm256_movemask_epi8(low)) | u64{static_cast<u32>(_mm256_movemask_epi8(high))} << 32;
    }

    // Packing works on 128-bit halves; this puts the quarters back in order.
    static __m256i in_order(__m256i packed) { return _mm256_permute4x64_epi64(packed, 0xD8); }

    static u64 different(const u8* a, const u8* b) {
        return ~mask64(_mm256_cmpeq_epi8(load(a), load(b)), _mm256_cmpeq_epi8(load(a + 32), load(b + 32)));
    }

    static u64 different(const u16* a, const u16* b) {
        __m256i equal[4];
        for (int i = 0; i < 4; ++i) equal[i] = _mm256_cmpeq_epi16(load(a + 16 * i), load(b + 16 * i));
        return ~mask64(in_order(_mm256_packs_epi16(equal[0], equal[1])),
                       in_order(_mm256_packs_epi16(equal[2], equal[3])));
    }

    static u64 different(const u32* a, const u32* b) {
        u64 mask = 0;
        for (int i = 0; i < 8; ++i) {
            __m256i equal = _mm256_cmpeq_epi32(load(a + 8 * i), load(b + 8 * i));
            mask |= u64{static_cast<u32>(_mm256_movemask_ps(_mm256_castsi256_ps(equal)))} << (8 * i);
        }
        return ~mask;
    }

    static u64 different(const u64* a, const u64* b) {
        u64 mask = 0;
        for (int i = 0; i < 16; ++i) {
            __m256i equal = _mm256_cmpeq_epi64(load(a + 4 * i), load(b + 4 * i));
            mask |= u64{static_cast<u32>(_mm256_movemask_pd(_mm256_castsi256_pd(equal)))} << (4 * i);
        }
        return ~mask;
    }

    static __m256i rounded_eight(const u32* p, __m256i nan) {
        __m256i bits = load(p), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
        __m256 number = _mm256_castsi256_ps(bits);
        __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(number, number, _CMP_UNORD_Q));
        return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), nan, is_nan);
    }

    static void round(const u32* p, u16 nan, u16* to) {
        __m256i nans = _mm256_set1_epi32(nan);
        for (int i = 0; i < 64; i += 16) {
            __m256i packed = _mm256_packus_epi32(rounded_eight(p + i, nans), rounded_eight(p + i + 8, nans));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), in_order(packed));
        }
    }

    // Eight exponents of each of four groups as bytes, less 128: group i in the i-th quarter.
    static __m256i exponents(const u8* p, __m128i shift, u32 mask) {
        __m256i bits =
            _mm256_setr_epi64x(eight_bytes(p), eight_bytes(p + 64), eight_bytes(p + 128), eight_bytes(p + 192));
        return shifted(_mm256_and_si256(_mm256_srl_epi16(bits, shift), _mm256_set1_epi8(static_cast<char>(mask))));
    }

    static __m256i exponents(const u16* p, __m128i shift, u32 mask) {
        __m256i keep = _mm256_set1_epi16(static_cast<short>(mask));
        __m256i even = _mm256_and_si256(_mm256_srl_epi16(load_halves(p, p + 128), shift), keep);
        __m256i odd = _mm256_and_si256(_mm256_srl_epi16(load_halves(p + 64, p + 192), shift), keep);
        return shifted(_mm256_packus_epi16(even, odd));
    }

    static __m256i exponents(const u32* p, __m128i shift, u32 mask) {
        __m256i keep = _mm256_set1_epi32(static_cast<int>(mask)), part[4];
        for (int i = 0; i < 4; ++i) part[i] = _mm256_and_si256(_mm256_srl_epi32(load(p + 64 * i), shift), keep);
        __m256i packed =
            _mm256_packus_epi16(_mm256_packs_epi32(part[0], part[1]), _mm256_packs_epi32(part[2], part[3]));
        return shifted(_mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    }

    // Counts of members of each class: four 16-bit numbers in a word.
    template <int K>
    class Tally {
    public:
        static constexpr u64 kGroups = 4;

        Tally(const Kind& kind, const Bounds& bounds)
            : shift_(_mm_cvtsi32_si128(kind.exponent_shift)), mask_(kind.exponent_mask), bounds_(bounds) {}

        template <class U>
        void add(const U* p, u16* before, int stride) {
            __m256i eights[8];
            for (int i = 0; i < 8; ++i) eights[i] = exponents(p + 8 * i, shift_, mask_);
            // All 64 exceed the bound before the first.
            __m256i above = _mm256_set1_epi64x(64);
            for (int w = 0; w < kWords; ++w) {
                __m256i exceed = exceeding(eights, 4 * w);
                __m256i members = _mm256_sub_epi16(_mm256_or_si256(_mm256_slli_epi64(exceed, 16), above), exceed);
                above = _mm256_srli_epi64(exceed, 48);
                alignas(32) u64 of_group[kGroups];
                _mm256_store_si256(reinterpret_cast<__m256i*>(of_group), members);
                for (u64 g = 0; g < kGroups; ++g) {
                    std::memcpy(before + g * static_cast<u64>(stride) + 4 * w, &counts_[w], 8);
                    counts_[w] += of_group[g];
                }
            }
        }

        void store(u16* counts) const { std::memcpy(counts, counts_, sizeof(counts_)); }

    private:
        static constexpr int kWords = (K + 3) / 4;

        // How many of each group exceed bounds t to t + 3, in four 16-bit numbers; 0 for bounds that are not there.
        __m256i exceeding(const __m256i* eights, int t) const {
            __m256i packed = _mm256_setzero_si256();
            for (int i = 0; i < 4 && t + i < K - 1; ++i) {
                __m256i bound = bounds_.shifted[t + i], minus = _mm256_cmpgt_epi8(eights[0], bound);
                for (int e = 1; e < 8; ++e) minus = _mm256_add_epi8(minus, _mm256_cmpgt_epi8(eights[e], bound));
                __m256i count = _mm256_sub_epi8(_mm256_setzero_si256(), minus);
                __m256i sums = _mm256_sad_epu8(count, _mm256_setzero_si256());
                packed = _mm256_or_si256(packed, _mm256_slli_epi64(sums, 16 * i));
            }
            return packed;
        }

        __m128i shift_;
        u32 mask_;
        const Bounds& bounds_;
        u64 counts_[kWords] = {};
    };

    static __m256i fill(u8 x) { return _mm256_set1_epi8(static_cast<char>(x)); }
    static __m256i fill(u16 x) { return _mm256_set1_epi16(static_cast<short>(x)); }
    static __m256i fill(u32 x) { return _mm256_set1_epi32(static_cast<int>(x)); }

    struct Member {
        __m256i keep, low, span;

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
            __m256i beyond[2];
            for (int i = 0; i < 2; ++i)
                beyond[i] = _mm256_subs_epu8(_mm256_sub_epi8(_mm256_and_si256(load(p + 32 * i), keep), low), span);
            return zeros(beyond[0], beyond[1]);
        }

        u64 mask(const u16* p) const {
            __m256i beyond[4];
            for (int i = 0; i < 4; ++i)
                beyond[i] = _mm256_subs_epu16(_mm256_sub_epi16(_mm256_and_si256(load(p + 16 * i), keep), low), span);
            // Saturation keeps what is not 0 from becoming 0.
            return zeros(in_order(_mm256_packs_epi16(beyond[0], beyond[1])),
                         in_order(_mm256_packs_epi16(beyond[2], beyond[3])));
        }

        u64 mask(const u32* p) const {
            u64 bits = 0;
            for (int i = 0; i < 8; ++i) {
                __m256i above = _mm256_sub_epi32(_mm256_and_si256(load(p + 8 * i), keep), low);
                __m256i inside = _mm256_cmpeq_epi32(_mm256_min_epu32(above, span), above);
                bits |= u64{static_cast<u32>(_mm256_movemask_ps(_mm256_castsi256_ps(inside)))} << (8 * i);
            }
            return bits;
        }

    private:
        static u64 zeros(__m256i low, __m256i high) {
            __m256i zero = _mm256_setzero_si256();
            return mask64(_mm256_cmpeq_epi8(low, zero), _mm256_cmpeq_epi8(high, zero));
        }
    };

    static u64 group_of(const u16* first, u32 r) {
        __m256i bound = _mm256_set1_epi16(static_cast<short>(r)), above[4];
        for (int i = 0; i < 4; ++i) above[i] = _mm256_cmpgt_epi16(load(first + 16 * i), bound);
        // The order inside does not matter: only how many there are.
        u64 mask = mask64(_mm256_packs_epi16(above[0], above[1]), _mm256_packs_epi16(above[2], above[3]));
        return static_cast<u64>(63 - ones(mask));
    }

    // Four elements as 64-bit numbers.
    static __m256i widen(const u8* p) {
        u32 four;
        std::memcpy(&four, p, 4);
        return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(static_cast<int>(four)));
    }
    static __m256i widen(const u16* p) {
        return _mm256_cvtepu16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static __m256i widen(const u32* p) {
        return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }

    // Keys have 64 bits and elements at most 32: the halves of a key are multiplied, and their sums joined at the end.
    template <class U>
    static void weigh(const U* p, u64 n, u64 column, u64 sums[2]) {
        __m256i low[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, high[2] = {low[0], low[1]};
        u64 i = 0;
        for (; i + 4 <= n; i += 4) {
            __m256i bits = widen(p + i);
            for (int lane = 0; lane < 2; ++lane) {
                __m256i key = load(&kColumnKeys[static_cast<std::size_t>(lane)][column + i]);
                low[lane] = _mm256_add_epi64(low[lane], _mm256_mul_epu32(bits, key));
                high[lane] = _mm256_add_epi64(high[lane], _mm256_mul_epu32(bits, _mm256_srli_epi64(key, 32)));
            }
        }
        for (int lane = 0; lane < 2; ++lane) {
            alignas(32) u64 parts[4];
            __m256i both = _mm256_add_epi64(low[lane], _mm256_slli_epi64(high[lane], 32));
            _mm256_store_si256(reinterpret_cast<__m256i*>(parts), both);
            sums[lane] = parts[0] + parts[1] + parts[2] + parts[3];
        }
        weigh_plainly(p, i, n, column, sums);
    }

    static constexpr auto decode_rows = Rows::decode;
    static constexpr auto encode_rows = Rows::encode;
};

constexpr Isa kIsa = Entry<Avx2>::table("avx2");

}  // namespace

const Isa* avx2_isa() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") ? &kIsa : nullptr; }

}  // namespace deltasync

#else

namespace deltasync {
const Isa* avx2_isa() { return nullptr; }
}  // namespace deltasync

#endif
