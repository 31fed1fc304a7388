// Choosing classes of old exponents: the writer's half of the model behind exp/1.
#pragma once

#include <optional>
#include <span>

#include "isa.hpp"

namespace deltasync {

// Bits for symbols with these counts under an ideal order-0 coder, in 1/4096 bit.
u64 entropy_q12(std::span<const u64> counts);

// `positions` ascend; `values` are the new bits, of kind.width bytes each.
Classes choose_classes(const Kind& kind, const Runs& runs, std::span<const u32> positions, const void* values);

// Whether the choice for a block depends only on a sample of its elements.
bool chosen_by_sample(u64 elements, u64 changes);

// The choice for the block of all elements, from a look at the sample alone. None if that block will likely not be one
// that is chosen by sample, or ends early because it has `enough` changes.
std::optional<Classes> choose_early(const Isa&, const Kind&, const Runs& before, const Runs& after, u64 enough);

}  // namespace deltasync
