// planes/1: all elements as byte planes, each entropy-coded where that helps.
#pragma once

#include <span>

#include "types.hpp"
#include "wire.hpp"

namespace deltasync {

void encode_planes(Bytes& out, const Kind& kind, const Runs& runs);

// `values` has room for `elements` of kind.width bytes.
void decode_planes(ByteReader& in, const Kind& kind, u64 elements, void* values);

}  // namespace deltasync
