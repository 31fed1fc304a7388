#include "planes.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "classes.hpp"
#include "scratch.hpp"
#include "sequence.hpp"
#include "width.hpp"

namespace deltasync {
namespace {

enum Mode : u8 { kRaw = 0, kCoded = 1 };

// By byte, least significant first.
using Histograms = std::array<Histogram, kWidthMax>;

// Counts the bytes of elements two at a time, as numbers of 16 bits. That is half the work, and a byte that is common
// in one plane is spread over many counts: one does not wait for the last.
template <class U>
class PairCounts {
public:
    // With `few` elements bytes are counted one by one: clearing and adding up the counts of pairs would take longer.
    PairCounts(bool is_float, bool few)
        : is_float_(is_float), counts_(few ? nullptr : std::make_unique<u32[]>(kTables * kPairs)) {}

    void add(const U* elements, u64 count) {
        u64 i = 0, in_pairs = counts_ ? count / kAtOnce * kAtOnce : 0;
        for (; i < in_pairs; i += kAtOnce) {
            u64 word = load(elements + i);
            u32 times = 1;
            // Equal elements would wait for each other: count them once.
            for (; i + kAtOnce < in_pairs && load(elements + i + kAtOnce) == word; i += kAtOnce) ++times;
            if (kEarly && is_float_) word = rotated_in(word);
            for (std::size_t k = 0; k < 4; ++k) counts_[kPairs * (k % kTables) + (word >> (16 * k) & 0xFFFF)] += times;
        }
        for (; i < count; ++i) {
            u64 bits = is_float_ ? rotated_in(elements[i]) : elements[i];
            for (std::size_t byte = 0; byte < sizeof(U); ++byte) ++rest_[byte][bits >> (8 * byte) & 0xFF];
        }
    }

    Histograms histograms() const {
        Histograms sums = rest_;
        for (std::size_t t = 0; counts_ && t < kTables; ++t)
            for (u64 pair = 0; pair < kPairs; ++pair) {
                u64 count = counts_[kPairs * t + (kEarly || !is_float_ ? pair : rotated_out(pair) % kPairs)];
                sums[2 * t][pair & 0xFF] += count;
                sums[sizeof(U) == 1 ? 0 : 2 * t + 1][pair >> 8] += count;
            }
        return sums;
    }

private:
    static constexpr u64 kAtOnce = 8 / sizeof(U), kPairs = 1 << 16;
    static constexpr std::size_t kTables = sizeof(U) < 4 ? 1 : sizeof(U) / 2;
    // Whether elements must be rotated before they are counted: with one table, the counts can be instead.
    static constexpr bool kEarly = kTables > 1;
    static constexpr int kTop = 8 * sizeof(U) - 1;
    static constexpr u64 kLowest = sizeof(U) == 8 ? 1 : ~u64{0} / (~u64{0} >> (63 - kTop)), kHighest = kLowest << kTop;

    static u64 load(const U* elements) {
        u64 word;
        std::memcpy(&word, elements, 8);
        return word;
    }

    // All elements in a word at once: the sign becomes the lowest bit of each, or the highest one again.
    static u64 rotated_in(u64 word) { return (word << 1 & ~kLowest) | (word >> kTop & kLowest); }
    static u64 rotated_out(u64 word) { return (word >> 1 & ~kHighest) | (word << kTop & kHighest); }

    bool is_float_;
    std::unique_ptr<u32[]> counts_;
    Histograms rest_{};
};

Histograms count_planes(const Kind& kind, const Runs& runs) {
    constexpr u64 kFew = 1 << 16;
    return by_width(kind, [&]<class U>(U) {
        PairCounts<U> counts(kind.is_float(), runs.elements < kFew);
        for (const Run& run : runs.span()) counts.add(reinterpret_cast<const U*>(run.bits), run.count);
        return counts.histograms();
    });
}

void split(const Kind& kind, const Runs& runs, int byte, u8* to, const Isa& isa) {
    for (const Run& run : runs.span()) {
        isa.split(kind, run.bits, run.count, byte, to);
        to += run.count;
    }
}

// The bytes of a plane: where they came in, or decoded to `coded`.
const u8* decode_plane(ByteReader& in, u64 elements, Scratch<u8>& coded, const Isa& isa) {
    u8 mode = in.byte();
    if (mode == kRaw) return in.take(elements).data();
    if (mode != kCoded || elements == 0) throw Corrupt{"planes.mode", "a plane has an unknown mode"};
    u8* plane = coded.reserve(elements);
    decode_symbols(in, {&elements, 1}, 256, {plane, elements}, isa);
    return plane;
}

}  // namespace

EncodedPlanes::EncodedPlanes(const Kind& kind, const Runs& runs, const Isa& isa) : kind_(kind), runs_(runs), isa_(isa) {
    Histograms histograms = count_planes(kind, runs);
    u64 n = runs.elements;
    for (int byte = kind.width - 1; byte >= 0; --byte) {
        const Histogram& histogram = histograms[static_cast<std::size_t>(byte)];
        Bytes& coded = coded_[static_cast<std::size_t>(byte)];
        // A plane that would shrink by less than 1/64 stays raw: reading it is then free.
        if (entropy_q12(histogram) < (n * 8 - n / 8) << 12) {
            u8* plane = thread_coder_room().plane.reserve(n);
            split(kind, runs, byte, plane, isa);
            encode_symbols(coded, {plane, n}, histogram, isa);
            if (coded.size() >= n) coded.clear();
        }
        size_ += 1 + (coded.empty() ? n : coded.size());
    }
}

void EncodedPlanes::write(u8* to) const {
    for (int byte = kind_.width - 1; byte >= 0; --byte) {
        const Bytes& coded = coded_[static_cast<std::size_t>(byte)];
        if (coded.empty()) {
            *to++ = kRaw;
            split(kind_, runs_, byte, to, isa_);
            to += runs_.elements;
        } else {
            *to++ = kCoded;
            to = std::copy(coded.begin(), coded.end(), to);
        }
    }
}

void encode_planes(Bytes& out, const Kind& kind, const Runs& runs, const Isa& isa) {
    EncodedPlanes planes(kind, runs, isa);
    out.resize(out.size() + planes.size());
    planes.write(out.data() + out.size() - planes.size());
}

void decode_planes(ByteReader& in, const Kind& kind, u64 elements, void* values, const Isa& isa) {
    Scratch<u8>& high = thread_coder_room().plane;
    Scratch<u8> low;
    for (int pair = 0; 2 * pair < kind.width; ++pair) {
        const u8* first = kind.width > 1 ? decode_plane(in, elements, high, isa) : nullptr;
        isa.join(kind, first, decode_plane(in, elements, low, isa), elements, pair, values);
    }
}

}  // namespace deltasync
