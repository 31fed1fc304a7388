// planes/1: all elements as byte planes, each entropy-coded where that helps.
#pragma once

#include <array>
#include <span>

#include "isa.hpp"
#include "types.hpp"
#include "wire.hpp"

namespace deltasync {

constexpr std::size_t kWidthMax = 8;

// The planes of some elements before they are written: those that stay raw need no memory of their own.
class EncodedPlanes {
public:
    // What is given must outlive the planes.
    EncodedPlanes(const Kind&, const Runs&, const Isa&);

    u64 size() const { return size_; }
    void write(u8* to) const;

private:
    const Kind& kind_;
    const Runs runs_;
    const Isa& isa_;
    std::array<Bytes, kWidthMax> coded_;  // by byte, least significant first; empty where a plane stays raw
    u64 size_ = 0;
};

void encode_planes(Bytes& out, const Kind& kind, const Runs& runs, const Isa& isa = *portable_isa());

// `values` has room for `elements` of kind.width bytes.
void decode_planes(ByteReader& in, const Kind& kind, u64 elements, void* values, const Isa& isa = *portable_isa());

// The same into runs, and the digest of what they then hold. `keys` has the same runs. After an error, some of them may
// have been written.
Lanes decode_planes_into(ByteReader& in, const Kind& kind, std::span<const WritableRun> to, const Runs& keys,
                         const Isa& isa = *portable_isa());

}  // namespace deltasync
