// The steps of the entropy coder and the tables that they read. Always inlined: files that are compiled for different
// instruction sets use these, and must not share a copy.
#pragma once

#include "constants.hpp"
#include "types.hpp"

namespace deltasync {

constexpr u32 kSlots = 1u << kPrecision;

// A row: one symbol for each lane of a sequence that has as many lanes as there can be.
constexpr u64 kRow = u64{1} << kLanesLog2Max;

// Loops over rows read and write whole vectors of words, and so up to this many words too far.
constexpr u64 kWordSlack = 16;

// For each slot: symbol, frequency - 1, and distance from the symbol's first slot.
struct DecodeTable {
    u32 slots[kSlots];
};

struct EncodeSymbol {
    u64 reciprocal;  // 2^64 / frequency, rounded up; its high product with a 32-bit x is x / frequency
    u32 whole;       // all bits set if the frequency is 1, whose reciprocal does not fit
    u16 frequency;
    u16 start;
};

struct EncodeTable {
    EncodeSymbol symbols[256];
    // The same for vectors, whose numbers have 32 bits: a factor in the lower half, and in the upper half
    //   bits 0 to 11: the first slot; 12 to 15: a shift; 16: 0 or 1, to add; 20 to 31: frequency - 1.
    // (x + add) * factor >> 32 >> shift is x / frequency for every x below frequency << 20.
    u64 packed[256];
};

struct Division {
    u32 factor;
    u32 shift;
    u32 add;
};

// With 2^shift < frequency <= 2^(shift + 1), a factor that is rounded up is too large by e / frequency, with
// e < frequency, and one that is rounded down is too small by (frequency - e) / frequency, which adding 1 to x makes up
// for. The quotient is exact while x times the error stays below 2^(32 + shift): for x < frequency << 20 that holds for
// the first one up to a frequency of 2048, and beyond for the one that has the smaller error.
constexpr Division division_by(u32 frequency) {
    u32 shift = 0;
    while (frequency > 2u << shift) ++shift;
    u64 power = u64{1} << (32 + shift), up = (power + frequency - 1) / frequency, error = up * frequency - power;
    if (frequency > 1 && error * frequency <= u64{1} << (12 + shift)) return {static_cast<u32>(up), shift, 0};
    return {static_cast<u32>(frequency > 1 ? up - 1 : power - 1), shift, 1};
}

// Takes a symbol's slot out of a state.
[[gnu::always_inline]] inline u32 decode_step(const DecodeTable& table, u32 x, u8* symbol) {
    u32 entry = table.slots[x & (kSlots - 1)];
    *symbol = static_cast<u8>(entry);
    return ((entry >> 8 & (kSlots - 1)) + 1) * (x >> kPrecision) + (entry >> 20);
}

// Moves a word into a state that is too small. Arithmetic, not a branch: whether a word is due cannot be predicted.
[[gnu::always_inline]] inline u32 take_word(u32 x, const u8*& words) {
    u16 word;
    __builtin_memcpy(&word, words, 2);
    u32 low = x < kStateMin;
    words += 2 * low;
    return x << (16 * low) | (word & (0u - low));
}

// Puts a symbol's slot into a state, after moving a word out of it where it would become too large. Words are written
// backwards, so that the decoder reads them forwards.
[[gnu::always_inline]] inline u32 encode_step(const EncodeTable& table, u32 x, u8 symbol, u16*& words) {
    const EncodeSymbol& s = table.symbols[symbol];
    u32 full = x >= u64{s.frequency} << (32 - kPrecision);
    words[-1] = static_cast<u16>(x);
    words -= full;
    x >>= 16 * full;
    u32 quotient = static_cast<u32>(static_cast<unsigned __int128>(x) * s.reciprocal >> 64) + (x & s.whole);
    return (quotient << kPrecision) + (x - quotient * s.frequency) + s.start;
}

}  // namespace deltasync
