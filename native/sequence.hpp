// A coded sequence: symbols under static tables, one for each context, through interleaved rANS.
#pragma once

#include <array>
#include <span>

#include "coder.hpp"
#include "constants.hpp"
#include "isa.hpp"
#include "types.hpp"
#include "wire.hpp"

namespace deltasync {

struct Bucket {
    u8 symbol;
    u8 width;
    u64 extra;
};

// 0..15 are buckets of their own; from there on there are two for each power of two. Without branches: which kind a
// value is cannot be predicted.
inline Bucket bucket_of(u64 value) {
    int exponent = 63 - std::countl_zero(value | 8);
    int width = exponent - 1;
    bool big = value >= kExact;
    int symbol = kExact - 8 + 2 * exponent + static_cast<int>((value >> width) & 1);
    return {static_cast<u8>(big ? symbol : static_cast<int>(value)), static_cast<u8>(big ? width : 0),
            big ? value & ((u64{1} << width) - 1) : 0};
}

inline int bucket_width(u8 symbol) { return symbol < kExact ? 0 : (symbol - kExact) / 2 + 3; }

inline u64 bucket_base(u8 symbol) {
    return symbol < kExact ? symbol : u64{2u + ((symbol - kExact) & 1u)} << bucket_width(symbol);
}

// Counts of symbols under each context, in context order.
using Counts = std::span<const u64>;

// How often each byte occurs.
using Histogram = std::array<u64, 256>;

// Neighbours are often equal: four histograms keep one count from waiting for the last.
inline Histogram count_bytes(std::span<const u8> bytes) {
    std::array<std::array<u32, 256>, 4> parts{};
    for (std::size_t i = 0; i < bytes.size(); ++i) ++parts[i % 4][bytes[i]];
    Histogram counts;
    for (std::size_t b = 0; b < 256; ++b) counts[b] = u64{parts[0][b]} + parts[1][b] + parts[2][b] + parts[3][b];
    return counts;
}

void encode_symbols(Bytes& out, std::span<const u8> symbols, Counts counts, const Isa&);
// Symbols under one context, which have been counted already.
void encode_symbols(Bytes& out, std::span<const u8> symbols, const Histogram&, const Isa&);
void decode_symbols(ByteReader& in, Counts counts, int alphabet, std::span<u8> symbols, const Isa&);

// The words of a sequence. Loops over rows read beyond them, so the last ones are moved to where there is room.
class Words {
public:
    Words() = default;
    Words(const Words&) = delete;
    Words& operator=(const Words&) = delete;

    void open(std::span<const u8> data) {
        at_ = data.data();
        end_ = at_ + data.size();
    }

    // Rows may begin up to here.
    const u8* last() {
        if (!moved_ && left() < kReach) {
            u64 bytes = 2 * left();
            if (bytes) std::memcpy(tail_, at_, bytes);
            at_ = tail_;
            end_ = tail_ + bytes;
            moved_ = true;
        }
        return moved_ ? end_ : end_ - 2 * kReach;
    }

    u64 left() const { return static_cast<u64>(end_ - at_) / 2; }
    const u8* at() const { return at_; }
    bool at_end() const { return at_ == end_; }

    void require_word(const u8* at) const {
        if (at == end_) throw Corrupt{"sequence.words", "the words end too early"};
    }

    void go_on(const u8* at) {
        if (at > end_) throw Corrupt{"sequence.words", "the words end too early"};
        at_ = at;
    }

private:
    static constexpr u64 kReach = kRow + kWordSlack;

    const u8* at_ = nullptr;
    const u8* end_ = nullptr;
    bool moved_ = false;
    u8 tail_[4 * kReach] = {};
};

// A sequence whose symbols are decoded in order, some at a time. Everything before them is read at once.
class SymbolReader {
public:
    // One table for each count that is not 0.
    SymbolReader(ByteReader& in, Counts counts, int alphabet);

    // The next symbols, which are under one table.
    void read(std::size_t table, std::span<u8> symbols, const Isa&);
    // Throws unless the words are used up and the states are where an encoder begins.
    void require_end() const;

private:
    std::vector<DecodeTable> tables_;
    u64 lanes_;
    std::array<u32, kRow> states_;
    Words words_;
    u64 at_ = 0;
};

template <class Value>
void encode_buckets(Bytes& out, std::span<const Value> values, Counts counts, const Isa& isa = *portable_isa()) {
    Bytes symbols(values.size());
    BitWriter extra(values.size() * (8 * sizeof(Value) - 2));
    for (std::size_t i = 0; i < values.size(); ++i) {
        Bucket b = bucket_of(values[i]);
        symbols[i] = b.symbol;
        extra.put<8 * sizeof(Value) - 2>(b.extra, b.width);
    }
    encode_symbols(out, symbols, counts, isa);
    put_varint(out, extra.bytes().size());
    put_bytes(out, extra.bytes().data(), extra.bytes().size());
}

// Numbers of at most `value_bits` bits, one for each symbol that `counts` promises.
template <class Value>
void decode_buckets(ByteReader& in, Counts counts, int value_bits, std::span<Value> values,
                    const Isa& isa = *portable_isa()) {
    Bytes symbols(values.size());
    int alphabet = kExact + 2 * (value_bits - 4);
    decode_symbols(in, counts, alphabet, symbols, isa);
    std::array<u64, kBucketsMax> base;
    std::array<u8, 256> width{};
    for (int s = 0; s < alphabet; ++s) {
        base[static_cast<std::size_t>(s)] = bucket_base(static_cast<u8>(s));
        width[static_cast<std::size_t>(s)] = static_cast<u8>(bucket_width(static_cast<u8>(s)));
    }
    u64 bits = 0;
    for (u8 symbol : symbols) bits += width[symbol];
    auto data = in.take(in.varint());
    if (data.size() != (bits + 7) / 8) throw Corrupt{"sequence.extra", "the extra bits have another length"};
    BitReader extra(data);
    for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<Value>(base[symbols[i]] + extra.get<8 * sizeof(Value) - 2>(width[symbols[i]]));
    if (!extra.padding_is_zero()) throw Corrupt{"sequence.extra", "the padding is not zero"};
}

}  // namespace deltasync
