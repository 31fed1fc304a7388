#include "sequence.hpp"

#include <algorithm>
#include <array>

namespace deltasync {
namespace {

constexpr u32 kSlots = 1u << kPrecision;

using Frequencies = std::array<u32, 256>;

u8 quantise(u64 count) {
    if (count < 16) return static_cast<u8>(count);
    int shift = 60 - std::countl_zero(count);
    return static_cast<u8>((shift << 3) + static_cast<int>(count >> shift));
}

u64 weight_of(u8 byte) { return byte < 16 ? byte : u64{8u + (byte & 7u)} << ((byte >> 3) - 1); }

// Frequencies that sum to 4096: one for each used symbol, the rest by weight, what is left to the heaviest.
Frequencies frequencies_of(std::span<const u8> weights) {
    u64 total = 0, used = 0, heaviest = 0;
    std::size_t heaviest_at = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        u64 w = weight_of(weights[i]);
        total += w;
        used += w != 0;
        if (w > heaviest) heaviest = w, heaviest_at = i;
    }
    Frequencies f{};
    u32 sum = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        u64 w = weight_of(weights[i]);
        if (w == 0) continue;
        f[i] = static_cast<u32>(1 + w * (kSlots - used) / total);
        sum += f[i];
    }
    f[heaviest_at] += kSlots - sum;
    return f;
}

int lanes_log2_for(u64 count) { return std::clamp(static_cast<int>(std::bit_width(count)) - 12, 0, kLanesLog2Max); }

struct EncodeSymbol {
    u64 reciprocal;  // 2^64 / frequency, rounded up; its high product with a 32-bit x is x / frequency
    u32 whole;       // all bits set if the frequency is 1, whose reciprocal does not fit
    u16 frequency;
    u16 start;

    u32 divide(u32 x) const {
        return static_cast<u32>(static_cast<unsigned __int128>(x) * reciprocal >> 64) + (x & whole);
    }
};

struct EncodeTable {
    std::array<EncodeSymbol, 256> symbols;

    explicit EncodeTable(const Frequencies& f) {
        u32 start = 0;
        for (int s = 0; s < 256; ++s) {
            symbols[s] = {f[s] > 1 ? ~u64{0} / f[s] + 1 : 0, f[s] == 1 ? ~u32{0} : 0, static_cast<u16>(f[s]),
                          static_cast<u16>(start)};
            start += f[s];
        }
    }
};

void write_table(Bytes& out, std::span<const u8> symbols, std::vector<EncodeTable>& tables) {
    std::array<u64, 256> counts = count_bytes(symbols);
    std::size_t size = 256;
    while (counts[size - 1] == 0) --size;
    std::array<u8, 256> weights;
    for (std::size_t s = 0; s < size; ++s) weights[s] = quantise(counts[s]);
    out.push_back(static_cast<u8>(size - 1));
    put_bytes(out, weights.data(), size);
    tables.emplace_back(frequencies_of({weights.data(), size}));
}

// For each of the 4096 slots: symbol, frequency - 1, and distance from the symbol's first slot.
struct DecodeTable {
    std::array<u32, kSlots> slots;

    explicit DecodeTable(const Frequencies& f) {
        u32 at = 0;
        for (u32 s = 0; s < 256; ++s)
            for (u32 i = 0; i < f[s]; ++i) slots[at++] = s | (f[s] - 1) << 8 | i << 20;
    }
};

DecodeTable read_table(ByteReader& in, int alphabet) {
    int size = in.byte() + 1;
    if (size > alphabet) throw Corrupt{"table.size", "a table has more symbols than exist"};
    auto weights = in.take(static_cast<u64>(size));
    if (weights.back() == 0) throw Corrupt{"table.end", "a table ends with an unused symbol"};
    return DecodeTable(frequencies_of(weights));
}

struct Words {
    const u8* at;
    const u8* end;

    u64 left() const { return static_cast<u64>(end - at) / 2; }
};

// Decodes symbols first..last-1 with one table; every symbol takes at most one word, so `Checked` is needed near the
// end of the words only.
template <bool Checked>
void decode_span(const DecodeTable& table, u32* states, u32 lane_mask, u64 first, u64 last, Words& words, u8* out) {
    const u8* at = words.at;
    for (u64 i = first; i < last; ++i) {
        u32 x = states[i & lane_mask];
        u32 entry = table.slots[x & (kSlots - 1)];
        out[i] = static_cast<u8>(entry);
        x = (((entry >> 8) & 0xFFFu) + 1) * (x >> kPrecision) + (entry >> 20);
        if constexpr (Checked) {
            if (x < kStateMin && at == words.end) throw Corrupt{"sequence.words", "the words end too early"};
            if (x < kStateMin) {
                u16 word;
                std::memcpy(&word, at, 2);
                x = x << 16 | word;
                at += 2;
            }
        } else {
            // Arithmetic, not a branch: whether a word is due cannot be predicted.
            u16 word;
            std::memcpy(&word, at, 2);
            u32 low = x < kStateMin;
            x = x << (16 * low) | (word & (0u - low));
            at += 2 * low;
        }
        states[i & lane_mask] = x;
    }
    words.at = at;
}

}  // namespace

void encode_symbols(Bytes& out, std::span<const u8> symbols, Counts counts) {
    int lanes_log2 = lanes_log2_for(symbols.size());
    u64 lanes = u64{1} << lanes_log2;
    out.push_back(static_cast<u8>(lanes_log2));
    std::vector<EncodeTable> tables;
    tables.reserve(counts.size());
    u64 first = 0;
    for (u64 count : counts) {
        if (count) write_table(out, symbols.subspan(first, count), tables);
        first += count;
    }
    std::array<u32, 1 << kLanesLog2Max> states;
    states.fill(kStateMin);
    std::vector<u16> words(symbols.size());
    u16* at = words.data() + words.size();
    u64 i = symbols.size();
    std::size_t table = tables.size();
    // Backwards, so that the decoder runs forwards.
    for (std::size_t c = counts.size(); c-- > 0;) {
        if (counts[c] == 0) continue;
        const EncodeTable& t = tables[--table];
        for (u64 stop = i - counts[c]; i-- > stop;) {
            const EncodeSymbol& s = t.symbols[symbols[i]];
            u32 x = states[i & (lanes - 1)];
            u32 full = x >= u64{s.frequency} << (32 - kPrecision);
            at[-1] = static_cast<u16>(x);
            at -= full;
            x >>= 16 * full;
            u32 q = s.divide(x);
            states[i & (lanes - 1)] = (q << kPrecision) + (x - q * s.frequency) + s.start;
        }
        ++i;
    }
    u64 word_count = static_cast<u64>(words.data() + words.size() - at);
    put_varint(out, word_count);
    put_bytes(out, states.data(), lanes * sizeof(u32));
    put_bytes(out, at, word_count * sizeof(u16));
}

void decode_symbols(ByteReader& in, Counts counts, int alphabet, std::span<u8> symbols) {
    int lanes_log2 = in.byte();
    if (lanes_log2 > kLanesLog2Max) throw Corrupt{"sequence.lanes", "too many lanes"};
    std::vector<DecodeTable> tables;
    tables.reserve(counts.size());
    for (u64 count : counts)
        if (count) tables.push_back(read_table(in, alphabet));
    u64 word_count = in.varint();
    u64 lanes = u64{1} << lanes_log2;
    std::array<u32, 1 << kLanesLog2Max> states;
    std::memcpy(states.data(), in.take(lanes * sizeof(u32)).data(), lanes * sizeof(u32));
    auto data = in.take(word_count * sizeof(u16));
    Words words{data.data(), data.data() + data.size()};
    for (u64 lane = 0; lane < lanes; ++lane)
        if (states[lane] < kStateMin) throw Corrupt{"sequence.state", "a state is out of range"};
    constexpr u64 kStrip = 4096;
    u64 i = 0;
    std::size_t table = 0;
    u32 lane_mask = static_cast<u32>(lanes - 1);
    for (u64 count : counts) {
        if (count == 0) continue;
        const DecodeTable& t = tables[table++];
        for (u64 stop = i + count; i < stop;) {
            u64 last = std::min(stop, i + kStrip);
            if (words.left() > last - i)
                decode_span<false>(t, states.data(), lane_mask, i, last, words, symbols.data());
            else
                decode_span<true>(t, states.data(), lane_mask, i, last, words, symbols.data());
            i = last;
        }
    }
    bool home = words.at == words.end;
    for (u64 lane = 0; lane < lanes; ++lane) home = home && states[lane] == kStateMin;
    if (!home) throw Corrupt{"sequence.state", "the states do not return to where they began"};
}

}  // namespace deltasync
