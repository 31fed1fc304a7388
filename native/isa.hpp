// The loops that touch every element, one set for each instruction set, chosen at run time.
#pragma once

#include "coder.hpp"
#include "constants.hpp"
#include "types.hpp"

namespace deltasync {

// Class of an element: how many of the first `count - 1` bounds its exponent exceeds. A bound is a threshold less one;
// the bounds after those are 255, which no exponent exceeds, so that loops may run over a round number of them.
struct Classes {
    int count = 1;
    u8 bounds[kClassesMax];

    Classes() {
        for (u8& bound : bounds) bound = 255;
    }

    // The exponents of class c.
    [[gnu::always_inline]] inline u32 lowest(int c) const { return c ? bounds[c - 1] + 1u : 0; }
    [[gnu::always_inline]] inline u32 highest(int c, const Kind& kind) const {
        return c < count - 1 ? bounds[c] : kind.exponent_mask;
    }
};

// Changed elements, ascending by position, with their new bits.
struct Changed {
    const u32* position;
    const void* value;
    u64 count;
};

// Where each changed element stands: its rank in its class, and its old bits.
struct Ranked {
    u32* rank;
    u8* member;
    void* before;
};

// Between runs that are ranked one after the other: the members of each class so far, and by how much the digest
// changed.
struct Standing {
    u32 passed[kClassesMax] = {};
    Lanes digest_delta = {};
};

// Changes by class: `first[c]` is where class c begins in `rank`, which ascends inside each class, and in `step`.
// Without steps the old bits are given where the new ones would be.
struct Wanted {
    const u32* rank;
    const void* step;
    const u64* first;
    const u64* count;
};

// Selected elements, ascending by position, with their new bits. With room for kSlack more.
struct Selected {
    u32* position;
    void* value;
    u64 count = 0;
    Lanes digest_delta = {};
};

// Loops write without looking whether there is something to write, and so a few places too far.
constexpr u64 kSlack = 4;

struct Isa {
    const char* name;
    // Positions whose bits differ, and their new bits; gives how many. The outputs have room for all elements and
    // kSlack more.
    u64 (*detect)(const Kind&, const Runs& before, const Runs& after, u32* positions, void* values);
    // The same for bfloat16 elements and float32 ones that are rounded to them, to nearest, ties to even. A NaN becomes
    // `nan`, whatever its payload.
    u64 (*detect_rounded)(const Runs& before, const Runs& after, u16 nan, u32* positions, u16* values);
    // For float kinds with two classes or more. Gives what the changes add to the digest.
    Lanes (*rank)(const Kind&, const Runs&, const Classes&, const Changed&, const Ranked&);
    // Both in one pass over memory, with room as for detect.
    u64 (*find)(const Kind&, const Runs& before, const Runs& after, const Classes&, u32* positions, void* values,
                const Ranked&, Standing&);
    // The inverse of rank. Finds fewer than wanted if a rank is past its class.
    void (*select)(const Kind&, const Runs&, const Classes&, const Wanted&, Selected&);
    Lanes (*digest)(const Kind&, const Runs&);
    // Rows of symbols of a sequence with kRow lanes. Decodes as many as wanted, or up to the first one that ends beyond
    // `last`: sets `rows` to how many it decoded, and gives where the words go on. There is a row of words and
    // kWordSlack more from `last` on.
    const u8* (*decode_rows)(const DecodeTable&, u32* states, u64& rows, const u8* words, const u8* last, u8* symbols);
    // Writes the words before `words`, and gives where they begin. There is a word for each symbol and kWordSlack more.
    u16* (*encode_rows)(const EncodeTable&, u32* states, u64 rows, const u8* symbols, u16* words);
    // One byte of each element. Floats are rotated first: the sign becomes the lowest bit, so that the exponent has a
    // byte of its own.
    void (*split)(const Kind&, const void* elements, u64 count, int byte, u8* plane);
    // The inverse, two planes at a time, most significant ones first: pair 0 starts the elements, and the last pair
    // finishes them. Elements of one byte have only a low plane.
    void (*join)(const Kind&, const u8* high, const u8* low, u64 count, int pair, void* elements);
};

// Null where this build or this machine lacks the instructions.
const Isa* portable_isa();
const Isa* avx2_isa();

}  // namespace deltasync
