// Plain C++ for every machine.
#include "scan.hpp"

namespace deltasync {
namespace {

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

// Running counts of the members of up to K classes, one group of 64 elements at a time.
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

struct Portable {
    struct Bounds {
        u8 byte[kClassesMax];
        explicit Bounds(const Classes& classes) { std::memcpy(byte, classes.bounds, sizeof(byte)); }
    };

    template <class U>
    static u64 different(const U* a, const U* b) {
        u64 mask = 0;
        // Most groups do not change at all: look at them in one go first.
        if (std::memcmp(a, b, 64 * sizeof(U)) == 0) return 0;
        for (u64 i = 0; i < 64; ++i) mask |= u64{a[i] != b[i]} << i;
        return mask;
    }

    static void round(const u32* p, u16 nan, u16* to) {
        for (u64 i = 0; i < 64; ++i) to[i] = rounded(p[i], nan);
    }

    struct ExponentBytes {
        u8 byte[64];
    };

    class Exponents {
    public:
        explicit Exponents(const Kind& kind) : shift_(kind.exponent_shift), mask_(kind.exponent_mask) {}

        template <class U>
        ExponentBytes of(const U* p) const {
            ExponentBytes exponents;
            for (int i = 0; i < 64; ++i) exponents.byte[i] = static_cast<u8>(p[i] >> shift_ & mask_);
            return exponents;
        }

    private:
        int shift_;
        u32 mask_;
    };

    // A count of 16 bits, so that the compiler packs more of them into a vector.
    static int exceeding(const ExponentBytes& exponents, const Bounds& bounds, int t) {
        u16 count = 0;
        for (int i = 0; i < 64; ++i) count = static_cast<u16>(count + (exponents.byte[i] > bounds.byte[t]));
        return count;
    }

    template <int K>
    using Tally = GroupTally<Portable, K>;

    struct Member : MemberFields {
        using MemberFields::MemberFields;

        template <class U>
        u64 mask(const U* p) const {
            u64 bits = 0;
            for (int i = 0; i < 64; ++i) bits |= u64{(p[i] & keep) - low <= span} << i;
            return bits;
        }
    };

    static u64 group_of(const u16* first, u32 r) {
        u64 g = 0;
        // Arithmetic, not a branch: the way down cannot be predicted.
        for (u64 step = 32; step; step /= 2) g += step & (u64{first[g + step] > r} - 1);
        return g;
    }

    template <class U>
    static void weigh(const U* p, u64 n, u64 column, u64 sums[2]) {
        sums[0] = sums[1] = 0;
        weigh_plainly(p, 0, n, column, sums);
    }

    static const u8* decode_rows(const DecodeTable& table, u32* states, u64& rows, const u8* words, const u8* last,
                                 u8* symbols) {
        u64 row = 0;
        for (; row < rows && words <= last; ++row)
            for (u64 lane = 0; lane < kRow; ++lane)
                states[lane] = take_word(decode_step(table, states[lane], symbols + kRow * row + lane), words);
        rows = row;
        return words;
    }

    static u16* encode_rows(const EncodeTable& table, u32* states, u64 rows, const u8* symbols, u16* words) {
        for (u64 row = rows; row-- > 0;)
            for (u64 lane = kRow; lane-- > 0;)
                states[lane] = encode_step(table, states[lane], symbols[kRow * row + lane], words);
        return words;
    }
};

constexpr Isa kIsa = Entry<Portable>::table("portable");

}  // namespace

const Isa* portable_isa() { return &kIsa; }

}  // namespace deltasync
