// Choosing classes of old exponents: the writer's half of the model behind exp/1.
#pragma once

#include <span>

#include "isa.hpp"

namespace deltasync {

// Bits for symbols with these counts under an ideal order-0 coder, in 1/4096 bit.
u64 entropy_q12(std::span<const u64> counts);

// `positions` ascend; `values` are the new bits, of kind.width bytes each.
Classes choose_classes(const Kind& kind, const Runs& runs, std::span<const u32> positions, const void* values);

}  // namespace deltasync
