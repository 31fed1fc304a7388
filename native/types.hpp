// Records that all kernels share. Nothing below module.cpp knows of Python.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace deltasync {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;
using Bytes = std::vector<u8>;

// An element type: bytes per element, and where its exponent sits (mask 0: coded as an integer).
struct Kind {
    int width;
    int exponent_shift;
    u32 exponent_mask;

    bool is_float() const { return exponent_mask != 0; }
};

constexpr Kind kBfloat16{2, 7, 0xFF}, kFloat32{4, 23, 0xFF};

// A contiguous run of a tensor's elements: their bits, and what the digest's keys depend on.
struct Run {
    const u8* bits;
    u64 count;
    u64 seed[2];
    u64 index;
};

// A run that may be written to.
struct WritableRun {
    u8* bits;
    u64 count;
};

struct Runs {
    const Run* data;
    u64 size;
    u64 elements;

    std::span<const Run> span() const { return {data, size}; }
};

// Two sums modulo 2^64: a state digest, or a part of one.
struct Lanes {
    u64 sum[2] = {0, 0};
};

// Damaged bytes. `rule` is the stable name of the broken rule of docs/format.md.
struct Corrupt {
    const char* rule;
    std::string message;
};

// A call that the caller must fix.
struct Invalid {
    const char* rule;
    std::string message;
};

}  // namespace deltasync
