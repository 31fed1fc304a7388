// exp/1 and abs/1: where elements changed, by classes of the old exponent, and to what.
#pragma once

#include <span>

#include "isa.hpp"

namespace deltasync {

struct Encoded {
    bool absolute = false;
    Bytes data;
    Lanes digest_delta;
};

struct Decoded {
    std::vector<u32> positions;
    Bytes values;
    Lanes digest_delta;
};

// The block that begins at `start`: how many elements changed, where it ends, and, if there are any, its bytes.
struct Difference {
    u64 changed;
    u64 stop;
    Encoded block;
};

Encoded encode_changes(const Isa&, const Kind&, const Runs& before, std::span<const u32> positions, const void* values);
// What detect and encode_changes give one after the other, where possible in one pass over memory.
Difference encode_difference(const Isa&, const Kind&, const Runs& before, const Runs& after, u64 start, u64 cell,
                             u64 enough);
Decoded decode_changes(const Isa&, const Kind&, const Runs& before, std::span<const u8> data, bool absolute);

// By how much the digest changes when `values` overwrite `before` at `positions`.
Lanes digest_change(const Kind&, const Runs& before, std::span<const u32> positions, const void* values);
void overwrite(const Kind&, std::span<const WritableRun> target, std::span<const u32> positions, const void* values);
void check_positions(std::span<const u32> positions, u64 elements);

}  // namespace deltasync
