#include "sequence.hpp"

#include <algorithm>
#include <array>

#include "scratch.hpp"

namespace deltasync {
namespace {

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

EncodeTable encode_table(const Frequencies& f) {
    EncodeTable table{};
    u32 start = 0;
    for (u32 s = 0; s < 256; ++s) {
        if (f[s] == 0) continue;
        table.symbols[s] = {f[s] > 1 ? ~u64{0} / f[s] + 1 : 0, f[s] == 1 ? ~u32{0} : 0, static_cast<u16>(f[s]),
                            static_cast<u16>(start)};
        Division by = division_by(f[s]);
        u32 fields = start | by.shift << 12 | by.add << 16 | (f[s] - 1) << 20;
        table.packed[s] = u64{fields} << 32 | by.factor;
        start += f[s];
    }
    return table;
}

EncodeTable write_table(Bytes& out, const Histogram& counts) {
    std::size_t size = 256;
    while (counts[size - 1] == 0) --size;
    std::array<u8, 256> weights;
    for (std::size_t s = 0; s < size; ++s) weights[s] = quantise(counts[s]);
    out.push_back(static_cast<u8>(size - 1));
    put_bytes(out, weights.data(), size);
    return encode_table(frequencies_of({weights.data(), size}));
}

// Symbols first to last-1 under one table, from the last to the first.
u16* encode_span(const EncodeTable& table, u32* states, u64 lanes, u64 first, u64 last, const u8* symbols, u16* words,
                 const Isa& isa) {
    while (last > first) {
        u64 rows = lanes == kRow && last % kRow == 0 ? (last - first) / kRow : 0;
        if (rows) {
            last -= rows * kRow;
            words = isa.encode_rows(table, states, rows, symbols + last, words);
        } else {
            u64 stop = lanes == kRow ? std::max(first, (last - 1) / kRow * kRow) : first;
            while (last-- > stop) {
                u32& x = states[last & (lanes - 1)];
                x = encode_step(table, x, symbols[last], words);
            }
            ++last;
        }
    }
    return words;
}

// Lanes and tables are written; what follows are the number of words, final states, words.
void write_symbols(Bytes& out, std::span<const u8> symbols, Counts counts, int lanes_log2,
                   std::span<const EncodeTable> tables, const Isa& isa) {
    u64 lanes = u64{1} << lanes_log2;
    std::array<u32, kRow> states;
    states.fill(kStateMin);
    u16* words = thread_coder_room().words.reserve(symbols.size() + kWordSlack);
    u16 *end = words + symbols.size() + kWordSlack, *at = end;
    u64 i = symbols.size();
    std::size_t table = tables.size();
    // Backwards, so that the decoder runs forwards.
    for (std::size_t c = counts.size(); c-- > 0; i -= counts[c])
        if (counts[c])
            at = encode_span(tables[--table], states.data(), lanes, i - counts[c], i, symbols.data(), at, isa);
    u64 word_count = static_cast<u64>(end - at);
    put_varint(out, word_count);
    put_bytes(out, states.data(), lanes * sizeof(u32));
    put_bytes(out, at, word_count * sizeof(u16));
}

DecodeTable read_table(ByteReader& in, int alphabet) {
    int size = in.byte() + 1;
    if (size > alphabet) throw Corrupt{"table.size", "a table has more symbols than exist"};
    auto weights = in.take(static_cast<u64>(size));
    if (weights.back() == 0) throw Corrupt{"table.end", "a table ends with an unused symbol"};
    Frequencies f = frequencies_of(weights);
    DecodeTable table;
    u32 at = 0;
    for (u32 s = 0; s < 256; ++s)
        for (u32 i = 0; i < f[s]; ++i) table.slots[at++] = s | (f[s] - 1) << 8 | i << 20;
    return table;
}

// Decodes symbols first to last-1 with one table, one at a time.
template <bool Checked>
void decode_few(const DecodeTable& table, u32* states, u64 lanes, u64 first, u64 last, Words& words, u8* symbols) {
    const u8* at = words.at();
    for (u64 i = first; i < last; ++i) {
        u32& x = states[i & (lanes - 1)];
        x = decode_step(table, x, symbols++);
        if constexpr (Checked) {
            if (x >= kStateMin) continue;  // at the end there is no word to look at
            words.require_word(at);
        }
        x = take_word(x, at);
    }
    words.go_on(at);
}

}  // namespace

void encode_symbols(Bytes& out, std::span<const u8> symbols, Counts counts, const Isa& isa) {
    int lanes_log2 = lanes_log2_for(symbols.size());
    out.push_back(static_cast<u8>(lanes_log2));
    std::vector<EncodeTable> tables;
    tables.reserve(counts.size());
    u64 first = 0;
    for (u64 count : counts) {
        if (count) tables.push_back(write_table(out, count_bytes(symbols.subspan(first, count))));
        first += count;
    }
    write_symbols(out, symbols, counts, lanes_log2, tables, isa);
}

void encode_symbols(Bytes& out, std::span<const u8> symbols, const Histogram& histogram, const Isa& isa) {
    int lanes_log2 = lanes_log2_for(symbols.size());
    out.push_back(static_cast<u8>(lanes_log2));
    EncodeTable table = write_table(out, histogram);
    u64 count = symbols.size();
    write_symbols(out, symbols, {&count, 1}, lanes_log2, {&table, 1}, isa);
}

SymbolReader::SymbolReader(ByteReader& in, Counts counts, int alphabet) {
    int lanes_log2 = in.byte();
    if (lanes_log2 > kLanesLog2Max) throw Corrupt{"sequence.lanes", "too many lanes"};
    lanes_ = u64{1} << lanes_log2;
    tables_.reserve(counts.size());
    for (u64 count : counts)
        if (count) tables_.push_back(read_table(in, alphabet));
    u64 word_count = in.varint();
    std::memcpy(states_.data(), in.take(lanes_ * sizeof(u32)).data(), lanes_ * sizeof(u32));
    words_.open(in.take(word_count * sizeof(u16)));
    for (u64 lane = 0; lane < lanes_; ++lane)
        if (states_[lane] < kStateMin) throw Corrupt{"sequence.state", "a state is out of range"};
}

void SymbolReader::read(std::size_t table, std::span<u8> symbols, const Isa& isa) {
    u8* to = symbols.data();
    for (u64 last = at_ + symbols.size(); at_ < last;) {
        u64 rows = lanes_ == kRow && at_ % kRow == 0 ? (last - at_) / kRow : 0, from = at_;
        if (rows) {
            const u8* stop = words_.last();
            words_.go_on(isa.decode_rows(tables_[table], states_.data(), rows, words_.at(), stop, to));
            at_ += rows * kRow;
        } else {
            constexpr u64 kStrip = 4096;
            at_ = std::min(last, lanes_ == kRow ? (at_ / kRow + 1) * kRow : at_ + kStrip);
            // Every symbol takes at most one word: only near the end of the words each of them must be checked.
            if (words_.left() > at_ - from)
                decode_few<false>(tables_[table], states_.data(), lanes_, from, at_, words_, to);
            else
                decode_few<true>(tables_[table], states_.data(), lanes_, from, at_, words_, to);
        }
        to += at_ - from;
    }
}

void SymbolReader::require_end() const {
    bool home = words_.at_end();
    for (u64 lane = 0; lane < lanes_; ++lane) home = home && states_[lane] == kStateMin;
    if (!home) throw Corrupt{"sequence.state", "the states do not return to where they began"};
}

void decode_symbols(ByteReader& in, Counts counts, int alphabet, std::span<u8> symbols, const Isa& isa) {
    SymbolReader reader(in, counts, alphabet);
    u64 first = 0;
    std::size_t table = 0;
    for (u64 count : counts) {
        if (count) reader.read(table++, symbols.subspan(first, count), isa);
        first += count;
    }
    reader.require_end();
}

}  // namespace deltasync
