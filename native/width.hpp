// From the width of an element to a type: the only place that branches on the width.
#pragma once

#include "types.hpp"

namespace deltasync {

// Calls call(U{}), where U is the unsigned integer that is as wide as an element and `Widest` the widest one possible.
// Always inlined: files that are compiled for different instruction sets use it, and must not share a copy.
template <class Widest = u64, class Call>
[[gnu::always_inline]] inline auto by_width(const Kind& kind, Call&& call) {
    switch (kind.width) {
        case 1: return call(u8{});
        case 2: return call(u16{});
        case 4: return call(u32{});
        default: return call(Widest{});
    }
}

// The same for float types. None has 8 bytes, which saves code that would never run.
template <class Call>
[[gnu::always_inline]] inline auto by_float_width(const Kind& kind, Call&& call) {
    return by_width<u32>(kind, call);
}

}  // namespace deltasync
