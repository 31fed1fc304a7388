// exp/1 and abs/1: where elements changed, by classes of the old exponent, and to what.
#pragma once

#include <span>

#include "isa.hpp"

namespace deltasync {

struct Encoded {
    bool absolute;
    Bytes data;
    Lanes gained;
};

struct Decoded {
    std::vector<u32> positions;
    Bytes values;
    Lanes gained;
};

Encoded encode_changes(const Isa&, const Kind&, const Runs& before, std::span<const u32> positions, const void* values);
Decoded decode_changes(const Isa&, const Kind&, const Runs& before, std::span<const u8> data, bool absolute);

// What the digest gains when `values` overwrite `before` at `positions`.
Lanes digest_change(const Kind&, const Runs& before, std::span<const u32> positions, const void* values);
void overwrite(const Kind&, const Runs& target, std::span<const u32> positions, const void* values);
void check_positions(std::span<const u32> positions, u64 elements);

}  // namespace deltasync
