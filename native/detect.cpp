#include "detect.hpp"

#include <algorithm>

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

Detected detect(const Isa& isa, const Kind& kind, const Runs& before, const Runs& after, u64 start, u64 cell,
                u64 enough) {
    // Room for the worst case is kept from call to call: fresh pages would cost more than the comparison.
    thread_local std::vector<u32> positions;
    thread_local Bytes values;
    u64 width = static_cast<u64>(kind.width), found = 0, at = start;
    while (at < before.elements && found < enough) {
        u64 end = std::min(at + cell, before.elements), most = found + (end - at) + kSlack;
        if (positions.size() < most) positions.resize(most);
        if (values.size() < most * width) values.resize(most * width);
        std::vector<Run> old = slice(kind, before, at, end), fresh = slice(kind, after, at, end);
        u64 count = isa.detect(kind.width, {old.data(), old.size(), end - at}, {fresh.data(), fresh.size(), end - at},
                               positions.data() + found, values.data() + found * width);
        for (u64 i = found; i < found + count; ++i) positions[i] += static_cast<u32>(at - start);
        found += count;
        at = end;
    }
    return {{positions.data(), positions.data() + found}, {values.data(), values.data() + found * width}, at};
}

}  // namespace deltasync
