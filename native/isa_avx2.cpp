// AVX2 and BMI2. Compiled with those instructions on: nothing here may run before avx2_isa() said yes.
#include "isa.hpp"

#if defined(__AVX2__) && defined(__BMI2__)

#include <immintrin.h>

#include "scan.hpp"

namespace deltasync {
namespace {

struct Avx2 {
    // Bytes compare as signed numbers only: both sides are shifted by 128.
    struct Bounds {
        __m256i shifted[kClassesMax];
        explicit Bounds(const Classes& classes) {
            for (int t = 0; t < kClassesMax; ++t)
                shifted[t] = _mm256_set1_epi8(static_cast<char>(classes.bounds[t] ^ 0x80));
        }
    };

    static __m256i kShift() { return _mm256_set1_epi8(static_cast<char>(0x80)); }

    static __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

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

    // The exponents of 32 elements as bytes.
    static __m256i exponents(const u8* p, __m128i shift, u32 mask) {
        return _mm256_and_si256(_mm256_srl_epi16(load(p), shift), _mm256_set1_epi8(static_cast<char>(mask)));
    }

    static __m256i exponents(const u16* p, __m128i shift, u32 mask) {
        __m256i keep = _mm256_set1_epi16(static_cast<short>(mask));
        __m256i low = _mm256_and_si256(_mm256_srl_epi16(load(p), shift), keep);
        __m256i high = _mm256_and_si256(_mm256_srl_epi16(load(p + 16), shift), keep);
        return in_order(_mm256_packus_epi16(low, high));
    }

    static __m256i exponents(const u32* p, __m128i shift, u32 mask) {
        __m256i keep = _mm256_set1_epi32(static_cast<int>(mask)), part[4];
        for (int i = 0; i < 4; ++i) part[i] = _mm256_and_si256(_mm256_srl_epi32(load(p + 8 * i), shift), keep);
        __m256i packed =
            _mm256_packus_epi16(_mm256_packs_epi32(part[0], part[1]), _mm256_packs_epi32(part[2], part[3]));
        return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }

    // Counts of members of each class, eight 16-bit numbers in a register.
    template <int K>
    class Tally {
    public:
        Tally(const Kind& kind, const Bounds& bounds)
            : shift_(_mm_cvtsi32_si128(kind.exponent_shift)), mask_(kind.exponent_mask), bounds_(bounds) {
            for (__m128i& eight : counts_) eight = _mm_setzero_si128();
        }

        template <class U>
        void add(const U* p, u8* exponents) {
            __m256i low = Avx2::exponents(p, shift_, mask_), high = Avx2::exponents(p + 32, shift_, mask_);
            _mm256_store_si256(reinterpret_cast<__m256i*>(exponents), low);
            _mm256_store_si256(reinterpret_cast<__m256i*>(exponents + 32), high);
            low = _mm256_xor_si256(low, kShift());
            high = _mm256_xor_si256(high, kShift());
            // All 64 exceed the bound before the first.
            __m128i above = _mm_cvtsi32_si128(64);
            for (int v = 0; v < kVectors; ++v) {
                __m128i exceed = exceeding(low, high, 8 * v);
                __m128i shifted = _mm_or_si128(_mm_slli_si128(exceed, 2), above);
                counts_[v] = _mm_add_epi16(counts_[v], _mm_sub_epi16(shifted, exceed));
                above = _mm_srli_si128(exceed, 14);
            }
        }

        void store(u16* counts) const {
            for (int v = 0; v < kVectors; ++v) _mm_store_si128(reinterpret_cast<__m128i*>(counts) + v, counts_[v]);
        }

    private:
        static constexpr int kVectors = (K + 7) / 8;

        // How many exceed bounds t to t + 7, in eight 16-bit numbers; 0 for bounds that are not there.
        __m128i exceeding(__m256i low, __m256i high, int t) const {
            __m256i packed[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            for (int i = 0; i < 8 && t + i < K - 1; ++i) {
                // Bytes are 0, -1 or -2. The sum of eight as unsigned numbers is minus the count, modulo 256.
                __m256i both = _mm256_add_epi8(_mm256_cmpgt_epi8(low, bounds_.shifted[t + i]),
                                               _mm256_cmpgt_epi8(high, bounds_.shifted[t + i]));
                __m256i sums = _mm256_sad_epu8(both, _mm256_setzero_si256());
                packed[i / 4] = _mm256_or_si256(packed[i / 4], _mm256_slli_epi64(sums, 16 * (i % 4)));
            }
            __m256i halves = _mm256_add_epi16(_mm256_unpacklo_epi64(packed[0], packed[1]),
                                              _mm256_unpackhi_epi64(packed[0], packed[1]));
            __m128i minus = _mm_add_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
            return _mm_and_si128(_mm_sub_epi16(_mm_setzero_si128(), minus), _mm_set1_epi16(0xFF));
        }

        __m128i shift_;
        u32 mask_;
        const Bounds& bounds_;
        __m128i counts_[kVectors];
    };

    struct Member {
        __m256i above, upto;
        u64 all;  // class 0 has no lower bound
        Member(const Bounds& bounds, int c)
            : above(bounds.shifted[c ? c - 1 : 0]), upto(bounds.shifted[c]), all(c ? 0 : ~u64{0}) {}

        u64 mask(const u8* exponents) const {
            __m256i low = _mm256_xor_si256(load(exponents), kShift());
            __m256i high = _mm256_xor_si256(load(exponents + 32), kShift());
            return (all | mask64(_mm256_cmpgt_epi8(low, above), _mm256_cmpgt_epi8(high, above))) &
                   ~mask64(_mm256_cmpgt_epi8(low, upto), _mm256_cmpgt_epi8(high, upto));
        }
    };

    static void transpose(const u16* from, int from_stride, u16* to, u64 to_stride) {
        __m128i a[8], b[8];
        for (int i = 0; i < 8; ++i) a[i] = _mm_load_si128(reinterpret_cast<const __m128i*>(from + i * from_stride));
        for (int i = 0; i < 4; ++i) {
            b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
            b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
        }
        for (int i = 0; i < 4; ++i) {
            a[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]);
            a[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
        }
        for (int i = 0; i < 4; ++i) {
            b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
            b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
        }
        for (u64 i = 0; i < 8; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(to + i * to_stride), b[i]);
    }

    static u64 group_of(const u16* first, u32 r) {
        __m256i bound = _mm256_set1_epi16(static_cast<short>(r)), above[4];
        for (int i = 0; i < 4; ++i) above[i] = _mm256_cmpgt_epi16(load(first + 16 * i), bound);
        // The order inside does not matter: only how many there are.
        u64 mask = mask64(_mm256_packs_epi16(above[0], above[1]), _mm256_packs_epi16(above[2], above[3]));
        return static_cast<u64>(63 - ones(mask));
    }

    static u32 place(u64 mask) { return static_cast<u32>(_tzcnt_u64(mask)) & 63; }

    static u32 select(u64 mask, u32 rank) { return static_cast<u32>(_tzcnt_u64(_pdep_u64(u64{1} << rank, mask))); }

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

    static u64 sum(__m256i v) {
        alignas(32) u64 part[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(part), v);
        return part[0] + part[1] + part[2] + part[3];
    }

    // Keys have 64 bits and elements at most 32: multiply the halves of the key, join the sums at the end.
    template <class U>
    static void weigh(const U* p, u64 n, u64 column, u64 sums[2]) {
        __m256i low[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        __m256i high[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        u64 i = 0;
        for (; i + 4 <= n; i += 4) {
            __m256i bits = widen(p + i);
            for (int lane = 0; lane < 2; ++lane) {
                __m256i key = load(&kColumnKeys[static_cast<std::size_t>(lane)][column + i]);
                low[lane] = _mm256_add_epi64(low[lane], _mm256_mul_epu32(bits, key));
                high[lane] = _mm256_add_epi64(high[lane], _mm256_mul_epu32(bits, _mm256_srli_epi64(key, 32)));
            }
        }
        for (int lane = 0; lane < 2; ++lane) sums[lane] = sum(low[lane]) + (sum(high[lane]) << 32);
        weigh_plainly(p, i, n, column, sums);
    }
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
