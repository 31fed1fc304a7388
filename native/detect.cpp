#include "detect.hpp"

#include <algorithm>

#include "scratch.hpp"

namespace deltasync {

std::vector<Run> slice(const Kind& kind, const Runs& runs, u64 begin, u64 end) {
    std::vector<Run> part;
    u64 first = 0;
    for (u64 r = 0; r < runs.size && first < end; ++r) {
        const Run& run = runs.data[r];
        u64 lo = std::max(first, begin), hi = std::min(first + run.count, end);
        if (lo < hi)
            part.push_back({run.bits + (lo - first) * static_cast<u64>(kind.width),
                            hi - lo,
                            {run.seed[0], run.seed[1]},
                            run.index + lo - first});
        first += run.count;
    }
    return part;
}

namespace {

// Cell by cell: `find` lists what changed in one of them.
template <class Find>
Detected by_cells(const Kind& kind, const Kind& fresh_kind, const Runs& before, const Runs& after, u64 start, u64 cell,
                  u64 enough, Find&& find) {
    u64 width = static_cast<u64>(kind.width), left = before.elements - start, found = 0, at = start;
    u64 most = (cell < left && enough < left - cell ? enough + cell : left) + kSlack;
    u32* positions = thread_lists().position.reserve(most);
    u8* values = thread_lists().value.reserve(most * width);
    while (at < before.elements && found < enough) {
        u64 end = std::min(at + cell, before.elements);
        std::vector<Run> old = slice(kind, before, at, end), fresh = slice(fresh_kind, after, at, end);
        u64 count = find({old.data(), old.size(), end - at}, {fresh.data(), fresh.size(), end - at}, positions + found,
                         values + found * width);
        for (u64 i = found; i < found + count; ++i) positions[i] += static_cast<u32>(at - start);
        found += count;
        at = end;
    }
    return {{positions, positions + found}, {values, values + found * width}, at};
}

}  // namespace

Detected detect(const Isa& isa, const Kind& kind, const Runs& before, const Runs& after, u64 start, u64 cell,
                u64 enough) {
    return by_cells(kind, kind, before, after, start, cell, enough,
                    [&](const Runs& old, const Runs& fresh, u32* positions, u8* values) {
                        return isa.detect(kind, old, fresh, positions, values);
                    });
}

Detected detect_rounded(const Isa& isa, const Runs& before, const Runs& after, u64 start, u64 cell, u64 enough,
                        u16 nan) {
    return by_cells(kBfloat16, kFloat32, before, after, start, cell, enough,
                    [&](const Runs& old, const Runs& fresh, u32* positions, u8* values) {
                        return isa.detect_rounded(old, fresh, nan, positions, reinterpret_cast<u16*>(values));
                    });
}

}  // namespace deltasync
