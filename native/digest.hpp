// Keys of the state digest: the product of a row part (tensor, index >> 10) and a column part (index & 1023).
#pragma once

#include <array>

#include "constants.hpp"
#include "types.hpp"

namespace deltasync {

// Always inlined: files that are compiled for different instruction sets use these, and must not share a copy.
[[gnu::always_inline]] constexpr inline u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

constexpr std::array<std::array<u64, kColumns>, 2> make_columns() {
    std::array<std::array<u64, kColumns>, 2> table{};
    for (u64 lane = 0; lane < 2; ++lane)
        for (u64 j = 0; j < kColumns; ++j) table[lane][j] = mix(j + 1 + (lane << 32)) | 1;
    return table;
}

alignas(64) inline constexpr auto kColumnKeys = make_columns();

[[gnu::always_inline]] inline u64 row_key(const Run& run, int lane, u64 row) {
    return mix(run.seed[lane] + (row + 1) * 0x9E3779B97F4A7C15u) | 1;
}

// Adds key * (after - before) for elements of ascending offset in one run; the row part is kept from one to the next.
class RunWeigher {
public:
    RunWeigher(const Run& run, Lanes& lanes) : run_(run), lanes_(lanes) {}

    template <class U>
    void add(u64 offset, U before, U after) {
        add_one(run_.index + offset, u64{after} - u64{before});
    }

    // An 8-byte element counts as two 4-byte ones, low half first.
    void add(u64 offset, u64 before, u64 after) {
        u64 index = 2 * (run_.index + offset);
        add_one(index, (after & 0xFFFFFFFFu) - (before & 0xFFFFFFFFu));
        add_one(index + 1, (after >> 32) - (before >> 32));
    }

private:
    void add_one(u64 index, u64 amount) {
        if (index >> 10 != row_) {
            row_ = index >> 10;
            for (int lane = 0; lane < 2; ++lane) key_[lane] = row_key(run_, lane, row_);
        }
        for (std::size_t lane = 0; lane < 2; ++lane)
            lanes_.sum[lane] += key_[lane] * kColumnKeys[lane][index & (kColumns - 1)] * amount;
    }

    const Run& run_;
    Lanes& lanes_;
    u64 row_ = ~u64{0};
    u64 key_[2] = {0, 0};
};

}  // namespace deltasync
