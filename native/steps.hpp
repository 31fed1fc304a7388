// Steps in units in the last place, on integers that ascend with the value of a float. Always inlined: files that are
// compiled for different instruction sets use these, and must not share a copy.
#pragma once

#include "types.hpp"

namespace deltasync {

template <class U>
constexpr U sign_bit = U(U(1) << (8 * sizeof(U) - 1));

// All bits set if the top bit of x is, else none. Signs are random: branches on them would be mispredicted.
template <class U>
[[gnu::always_inline]] inline constexpr U smear(U x) {
    return U(-(x >> (8 * sizeof(U) - 1)));
}

template <bool Float, class U>
[[gnu::always_inline]] inline U ordinal(U bits) {
    return Float ? U(bits ^ (smear(bits) | sign_bit<U>)) : bits;
}

template <bool Float, class U>
[[gnu::always_inline]] inline U from_ordinal(U value) {
    return Float ? U(value ^ (U(~smear(value)) | sign_bit<U>)) : value;
}

// +1, -1, +2, -2, ... become 0, 1, 2, 3, ...; `before` and `after` differ.
template <bool Float, class U>
[[gnu::always_inline]] inline U zigzag_step(U before, U after) {
    U step = U(ordinal<Float>(after) - ordinal<Float>(before));
    U negative = smear(step);
    U magnitude = U((step ^ negative) - negative);
    return U(U(magnitude - 1) * 2 - negative);
}

template <bool Float, class U>
[[gnu::always_inline]] inline U step_from(U before, U zigzag) {
    U negative = U(-(zigzag & 1));
    U magnitude = U((zigzag >> 1) + 1);
    return from_ordinal<Float>(U(ordinal<Float>(before) + ((magnitude ^ negative) - negative)));
}

}  // namespace deltasync
