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

    // The exponents of 64 elements as bytes.
    static __m512i exponents(const u8* p, __m128i shift, u32 mask) {
        return _mm512_and_si512(_mm512_srl_epi16(load(p), shift), _mm512_set1_epi8(static_cast<char>(mask)));
    }

    static __m512i exponents(const u16* p, __m128i shift, u32 mask) {
        __m512i keep = _mm512_set1_epi16(static_cast<short>(mask));
        __m256i low = _mm512_cvtepi16_epi8(_mm512_and_si512(_mm512_srl_epi16(load(p), shift), keep));
        __m256i high = _mm512_cvtepi16_epi8(_mm512_and_si512(_mm512_srl_epi16(load(p + 32), shift), keep));
        return join(low, high);
    }

    static __m512i exponents(const u32* p, __m128i shift, u32 mask) {
        __m512i keep = _mm512_set1_epi32(static_cast<int>(mask)), part[4];
        for (int i = 0; i < 4; ++i) part[i] = _mm512_and_si512(_mm512_srl_epi32(load(p + 16 * i), shift), keep);
        __m512i packed =
            _mm512_packus_epi16(_mm512_packs_epi32(part[0], part[1]), _mm512_packs_epi32(part[2], part[3]));
        // Packing works on 128-bit quarters; this puts their quarters back in order.
        const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        return _mm512_permutexvar_epi32(order, packed);
    }

    template <int K>
    class Tally {
    public:
        static constexpr u64 kGroups = 1;

        Tally(const Kind& kind, const Bounds& bounds)
            : shift_(_mm_cvtsi32_si128(kind.exponent_shift)), mask_(kind.exponent_mask), bounds_(bounds) {}

        template <class U>
        void add(const U* p, u16* before, int) {
            store(before);
            __m512i bytes = Avx512::exponents(p, shift_, mask_);
            int above = 64;
            for (int c = 0; c < K; ++c) {
                int next = c < K - 1 ? ones(_mm512_cmpgt_epu8_mask(bytes, bounds_.byte[c])) : 0;
                counts_[c] = static_cast<u16>(counts_[c] + above - next);
                above = next;
            }
        }

        void store(u16* counts) const { std::memcpy(counts, counts_, sizeof(counts_)); }

    private:
        __m128i shift_;
        u32 mask_;
        const Bounds& bounds_;
        u16 counts_[(K + 7) / 8 * 8] = {};
    };

    // Members have an exponent field, in place, from `low` to `low + span`.
    struct Member {
        __m512i keep, low, span;

        Member() = default;
        Member(const Kind& kind, const Classes& classes, int c)
            : keep(fill(kind, kind.exponent_mask)),
              low(fill(kind, classes.lowest(c))),
              span(fill(kind, classes.highest(c, kind) - classes.lowest(c))) {}

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

    private:
        static __m512i fill(const Kind& kind, u32 exponent) {
            int field = static_cast<int>(exponent << kind.exponent_shift);
            if (kind.width == 1) return _mm512_set1_epi8(static_cast<char>(field));
            if (kind.width == 2) return _mm512_set1_epi16(static_cast<short>(field));
            return _mm512_set1_epi32(field);
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
        __m512i next = _mm512_set1_epi16(static_cast<short>(r + 1));
        int above =
            ones(_mm512_cmpge_epi16_mask(load(first), next)) + ones(_mm512_cmpge_epi16_mask(load(first + 32), next));
        return static_cast<u64>(63 - above);
    }

    static u32 place(u64 mask) { return mask ? static_cast<u32>(__builtin_ctzll(mask)) : 0; }

    static u32 select(u64 mask, u32 rank) {
#ifdef __BMI2__
        return place(_pdep_u64(u64{1} << rank, mask));
#else
        for (; rank; --rank) mask &= mask - 1;
        return place(mask);
#endif
    }

    static __m512i join(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }

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

    static u64 sum(__m512i v) {
        alignas(64) u64 part[8];
        _mm512_store_si512(part, v);
        u64 total = 0;
        for (u64 x : part) total += x;
        return total;
    }

    // Keys have 64 bits and elements at most 32: multiply the halves of the key, join the sums at the end.
    template <class U>
    static void weigh(const U* p, u64 n, u64 column, u64 sums[2]) {
        __m512i low[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        __m512i high[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        u64 i = 0;
        for (; i + 8 <= n; i += 8) {
            __m512i bits = widen(p + i);
            for (int lane = 0; lane < 2; ++lane) {
                __m512i key = load(&kColumnKeys[static_cast<std::size_t>(lane)][column + i]);
                low[lane] = _mm512_add_epi64(low[lane], _mm512_mul_epu32(bits, key));
                high[lane] = _mm512_add_epi64(high[lane], _mm512_mul_epu32(bits, _mm512_srli_epi64(key, 32)));
            }
        }
        for (int lane = 0; lane < 2; ++lane) sums[lane] = sum(low[lane]) + (sum(high[lane]) << 32);
        weigh_plainly(p, i, n, column, sums);
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
