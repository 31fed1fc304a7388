// Which elements changed, up to a cell where enough of them are found.
#pragma once

#include "isa.hpp"

namespace deltasync {

struct Detected {
    std::vector<u32> positions;  // counted from `start`
    Bytes values;
    u64 stop;
};

// The runs that cover positions begin to end.
std::vector<Run> slice(const Kind&, const Runs&, u64 begin, u64 end);

// The two have runs of the same lengths. Stops at a multiple of `cell` from `start`, or at the end.
Detected detect(const Isa&, const Kind&, const Runs& before, const Runs& after, u64 start, u64 cell, u64 enough);

// `before` has bfloat16 elements; `after` has float32 ones, which count as rounded. A NaN becomes `nan`.
Detected detect_rounded(const Isa&, const Runs& before, const Runs& after, u64 start, u64 cell, u64 enough, u16 nan);

}  // namespace deltasync
