#include "planes.hpp"

#include <array>

#include "classes.hpp"
#include "sequence.hpp"
#include "width.hpp"

namespace deltasync {
namespace {

enum Mode : u8 { kRaw = 0, kCoded = 1 };

// Floats: the sign moves to the lowest bit, so that the exponent has a byte of its own.
template <class U>
U rotate_in(U bits, bool is_float) {
    return is_float ? U(bits << 1 | bits >> (8 * sizeof(U) - 1)) : bits;
}

template <class U>
U rotate_out(U bits, bool is_float) {
    return is_float ? U(bits >> 1 | bits << (8 * sizeof(U) - 1)) : bits;
}

void encode_plane(Bytes& out, std::span<const u8> plane) {
    std::array<u64, 256> counts = count_bytes(plane);
    u64 n = plane.size(), begin = out.size();
    // A plane that would shrink by less than 1/64 stays raw: reading it is then free.
    if (entropy_q12(counts) < (n * 8 - n / 8) << 12) {
        out.push_back(kCoded);
        encode_symbols(out, plane, std::span<const u64>(&n, 1));
        if (out.size() - begin < n + 1) return;
        out.resize(begin);
    }
    out.push_back(kRaw);
    put_bytes(out, plane.data(), n);
}

template <class U>
void encode(Bytes& out, const Kind& kind, const Runs& runs) {
    Bytes plane(runs.elements);
    for (int byte = kind.width - 1; byte >= 0; --byte) {
        u8* to = plane.data();
        for (u64 r = 0; r < runs.size; ++r) {
            const U* p = reinterpret_cast<const U*>(runs.data[r].bits);
            for (u64 i = 0; i < runs.data[r].count; ++i)
                *to++ = static_cast<u8>(rotate_in(p[i], kind.is_float()) >> (8 * byte));
        }
        encode_plane(out, plane);
    }
}

template <class U>
void decode(ByteReader& in, const Kind& kind, u64 elements, U* values) {
    Bytes coded;
    for (int byte = kind.width - 1; byte >= 0; --byte) {
        u8 mode = in.byte();
        std::span<const u8> plane;
        if (mode == kRaw) {
            plane = in.take(elements);
        } else if (mode == kCoded && elements) {
            coded.resize(elements);
            decode_symbols(in, std::span<const u64>(&elements, 1), 256, coded);
            plane = coded;
        } else {
            throw Corrupt{"planes.mode", "a plane has an unknown mode"};
        }
        bool first = byte == kind.width - 1;
        for (u64 i = 0; i < elements; ++i)
            values[i] = first ? U(plane[i]) : U(values[i] << 8 % (8 * sizeof(U)) | plane[i]);
    }
    for (u64 i = 0; i < elements; ++i) values[i] = rotate_out(values[i], kind.is_float());
}

}  // namespace

void encode_planes(Bytes& out, const Kind& kind, const Runs& runs) {
    by_width(kind, [&]<class U>(U) { encode<U>(out, kind, runs); });
}

void decode_planes(ByteReader& in, const Kind& kind, u64 elements, void* values) {
    by_width(kind, [&]<class U>(U) { decode(in, kind, elements, static_cast<U*>(values)); });
}

}  // namespace deltasync
