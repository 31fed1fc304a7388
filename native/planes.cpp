#include "planes.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>

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

// A plane whose bytes are read in order, some at a time.
class PlaneReader {
public:
    PlaneReader(ByteReader& in, u64 elements) {
        u8 mode = in.byte();
        if (mode == kRaw)
            raw_ = in.take(elements).data();
        else if (mode == kCoded && elements != 0)
            coded_.emplace(in, Counts{&elements, 1}, 256);
        else
            throw Corrupt{"planes.mode", "a plane has an unknown mode"};
    }

    // The next bytes: where they came in, or decoded to `room`.
    const u8* read(u64 count, u8* room, const Isa& isa) {
        if (coded_) {
            coded_->read(0, {room, count}, isa);
            return room;
        }
        const u8* bytes = raw_;
        raw_ += count;
        return bytes;
    }

    void require_end() const {
        if (coded_) coded_->require_end();
    }

private:
    const u8* raw_ = nullptr;
    std::optional<SymbolReader> coded_;
};

// Planes are decoded side by side, so many elements at a time: what is made of them is still in the cache when it is
// used. A multiple of kRow.
constexpr u64 kPiece = 1 << 13;

// The error of the first plane that has one, as if planes were decoded one after the other.
void require_sound(ByteReader in, const Kind& kind, u64 elements, const Isa& isa) {
    Scratch<u8> room(kPiece);
    for (int plane = 0; plane < kind.width; ++plane) {
        PlaneReader reader(in, elements);
        for (u64 at = 0; at < elements; at += kPiece) reader.read(std::min(kPiece, elements - at), room.get(), isa);
        reader.require_end();
    }
}

// Calls use(run, offset, count) after elements of a run have been written.
template <class Use>
void decode_pieces(ByteReader& in, const Kind& kind, std::span<const WritableRun> runs, u64 elements, const Isa& isa,
                   Use&& use) {
    std::array<std::optional<PlaneReader>, kWidthMax> readers;
    std::array<const u8*, kWidthMax> planes;
    std::size_t width = static_cast<std::size_t>(kind.width), run = 0;
    for (std::size_t p = 0; p < width; ++p) readers[p].emplace(in, elements);
    u8* room = thread_coder_room().plane.reserve(width * kPiece);
    u64 offset = 0;
    for (u64 first = 0; first < elements; first += kPiece) {
        u64 count = std::min(kPiece, elements - first);
        for (std::size_t p = 0; p < width; ++p) planes[p] = readers[p]->read(count, room + p * kPiece, isa);
        for (u64 done = 0; done < count;) {
            for (; offset == runs[run].count; offset = 0) ++run;
            u64 n = std::min(count - done, runs[run].count - offset);
            u8* to = runs[run].bits + offset * width;
            for (std::size_t pair = 0; 2 * pair < width; ++pair) {
                const u8* high = width > 1 ? planes[2 * pair] + done : nullptr;
                isa.join(kind, high, planes[std::min(2 * pair + 1, width - 1)] + done, n, static_cast<int>(pair), to);
            }
            use(run, offset, n);
            offset += n;
            done += n;
        }
    }
    for (std::size_t p = 0; p < width; ++p) readers[p]->require_end();
}

template <class Use>
void decode_runs(ByteReader& in, const Kind& kind, std::span<const WritableRun> runs, u64 elements, const Isa& isa,
                 Use&& use) {
    const ByteReader start = in;
    try {
        decode_pieces(in, kind, runs, elements, isa, use);
    } catch (const Corrupt&) {
        require_sound(start, kind, elements, isa);
        throw;
    }
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
    WritableRun run{static_cast<u8*>(values), elements};
    decode_runs(in, kind, {&run, 1}, elements, isa, [](std::size_t, u64, u64) {});
}

Lanes decode_planes_into(ByteReader& in, const Kind& kind, std::span<const WritableRun> to, const Runs& keys,
                         const Isa& isa) {
    Lanes lanes;
    decode_runs(in, kind, to, keys.elements, isa, [&](std::size_t run, u64 offset, u64 count) {
        Run piece = keys.data[run];
        piece.bits += offset * static_cast<u64>(kind.width);
        piece.index += offset;
        piece.count = count;
        Lanes part = isa.digest(kind, {&piece, 1, count});
        for (int lane = 0; lane < 2; ++lane) lanes.sum[lane] += part.sum[lane];
    });
    return lanes;
}

}  // namespace deltasync
