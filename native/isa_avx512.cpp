// AVX-512 (F, BW, VL) and BMI2. Compiled with those instructions on: nothing here may run before avx512_isa() said yes.
#include "isa.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__BMI2__)
#include <immintrin.h>
#define DELTASYNC_AVX512 1
#elif defined(DELTASYNC_SIMDE)
// The same source on emulated instructions, so that it is tested on machines that lack them.
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#define DELTASYNC_AVX512 1
#endif

#ifdef DELTASYNC_AVX512

#include "scan.hpp"

namespace deltasync {
namespace {

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

    static __m512i rounded_sixteen(const u32* p, __m512i nan) {
        __m512i bits = load(p), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
        __m512 number = _mm512_castsi512_ps(bits);
        auto is_nan = _mm512_cmp_ps_mask(number, number, _CMP_UNORD_Q);
        return _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), is_nan, nan);
    }

    static void round(const u32* p, u16 nan, u16* to) {
        __m512i nans = _mm512_set1_epi32(nan);
        // Packing works on 128-bit quarters; this puts their halves back in order.
        const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
        for (int i = 0; i < 64; i += 32) {
            __m512i packed = _mm512_packus_epi32(rounded_sixteen(p + i, nans), rounded_sixteen(p + i + 16, nans));
            _mm512_storeu_si512(to + i, _mm512_permutexvar_epi64(order, packed));
        }
    }

    static __m512i join(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }

    // The exponents of 64 elements as bytes. Always inlined: GCC 12 warns about its own headers where they are not.
    class Exponents {
    public:
        explicit Exponents(const Kind& kind)
            : shift_(_mm_cvtsi32_si128(kind.exponent_shift)), mask_(kind.exponent_mask) {}

        [[gnu::always_inline]] __m512i of(const u8* p) const {
            return _mm512_and_si512(_mm512_srl_epi16(load(p), shift_), fill(static_cast<u8>(mask_)));
        }

        [[gnu::always_inline]] __m512i of(const u16* p) const {
            __m512i keep = fill(static_cast<u16>(mask_));
            __m256i low = _mm512_cvtepi16_epi8(_mm512_and_si512(_mm512_srl_epi16(load(p), shift_), keep));
            __m256i high = _mm512_cvtepi16_epi8(_mm512_and_si512(_mm512_srl_epi16(load(p + 32), shift_), keep));
            return join(low, high);
        }

        [[gnu::always_inline]] __m512i of(const u32* p) const {
            __m512i keep = fill(mask_), quarter[4];
            for (int i = 0; i < 4; ++i) quarter[i] = _mm512_and_si512(_mm512_srl_epi32(load(p + 16 * i), shift_), keep);
            __m512i packed = _mm512_packus_epi16(_mm512_packs_epi32(quarter[0], quarter[1]),
                                                 _mm512_packs_epi32(quarter[2], quarter[3]));
            // Packing works on 128-bit lanes; this puts their quarters back in order.
            const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
            return _mm512_permutexvar_epi32(order, packed);
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

    static u64 group_of(const u16* first, u32 r) {
        __m512i next = _mm512_set1_epi16(static_cast<short>(r + 1));
        int above =
            ones(_mm512_cmpge_epi16_mask(load(first), next)) + ones(_mm512_cmpge_epi16_mask(load(first + 32), next));
        return static_cast<u64>(63 - above);
    }

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
    static void store(u64* to, __m512i v) { _mm512_store_si512(to, v); }

    template <class U>
    static void weigh(const U* p, u64 n, u64 column, u64 sums[2]) {
        weigh_vectors<Avx512>(p, n, column, sums);
    }
};

constexpr Isa kIsa = Entry<Avx512>::table("avx512");

}  // namespace

const Isa* avx512_isa() {
#ifdef DELTASYNC_SIMDE
    return &kIsa;
#else
    bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2");
    return runs ? &kIsa : nullptr;
#endif
}

}  // namespace deltasync

#else

namespace deltasync {
const Isa* avx512_isa() { return nullptr; }
}  // namespace deltasync

#endif
