// Plain C++ for every machine.
#include "scan.hpp"

namespace deltasync {
namespace {

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

    template <int K>
    class Tally {
    public:
        static constexpr u64 kGroups = 1;

        Tally(const Kind& kind, const Bounds& bounds) : kind_(kind), bounds_(bounds) {}

        template <class U>
        void add(const U* p, u16* before, int) {
            store(before);
            u8 exponents[64];
            for (int i = 0; i < 64; ++i)
                exponents[i] = static_cast<u8>(p[i] >> kind_.exponent_shift & kind_.exponent_mask);
            u16 above = 64;
            for (int c = 0; c < K; ++c) {
                u16 next = 0;
                if (c < K - 1)
                    for (int i = 0; i < 64; ++i) next = static_cast<u16>(next + (exponents[i] > bounds_.byte[c]));
                counts_[c] = static_cast<u16>(counts_[c] + above - next);
                above = next;
            }
        }

        void store(u16* counts) const { std::memcpy(counts, counts_, sizeof(counts_)); }

    private:
        Kind kind_;
        const Bounds& bounds_;
        u16 counts_[(K + 7) / 8 * 8] = {};
    };

    struct Member {
        u32 keep, low, span;

        Member() = default;
        Member(const Kind& kind, const Classes& classes, int c)
            : keep(kind.exponent_mask << kind.exponent_shift),
              low(classes.lowest(c) << kind.exponent_shift),
              span((classes.highest(c, kind) - classes.lowest(c)) << kind.exponent_shift) {}

        template <class U>
        u64 mask(const U* p) const {
            u64 bits = 0;
            for (int i = 0; i < 64; ++i) bits |= u64{(p[i] & keep) - low <= span} << i;
            return bits;
        }
    };

    static void transpose(const u16* from, int from_stride, u16* to, u64 to_stride) {
        for (int i = 0; i < 8; ++i)
            for (int j = 0; j < 8; ++j)
                to[static_cast<u64>(j) * to_stride + static_cast<u64>(i)] = from[i * from_stride + j];
    }

    static u64 group_of(const u16* first, u32 r) {
        u64 g = 0;
        // Arithmetic, not a branch: the way down cannot be predicted.
        for (u64 step = 32; step; step /= 2) g += step & (u64{first[g + step] > r} - 1);
        return g;
    }

    static u32 place(u64 mask) { return mask ? static_cast<u32>(__builtin_ctzll(mask)) : 0; }

    // Halving by popcount: which half of the word holds the bit, and so on down.
    static u32 select(u64 mask, u32 rank) {
        u32 place = 0;
        for (u32 half = 32; half; half /= 2) {
            u32 low = static_cast<u32>(ones(mask & ((u64{1} << half) - 1)));
            bool above = rank >= low;
            rank -= above ? low : 0;
            mask >>= above ? half : 0;
            place += above ? half : 0;
        }
        return place;
    }

    template <class U>
    static void weigh(const U* p, u64 n, u64 column, u64 sums[2]) {
        sums[0] = sums[1] = 0;
        weigh_plainly(p, 0, n, column, sums);
    }
};

constexpr Isa kIsa = Entry<Portable>::table("portable");

}  // namespace

const Isa* portable_isa() { return &kIsa; }

}  // namespace deltasync
