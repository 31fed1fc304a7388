// Bytes and bits on the wire: checked reading, varints, LSB-first bits.
#pragma once

#include <bit>
#include <cstring>
#include <span>

#include "constants.hpp"
#include "types.hpp"

static_assert(std::endian::native == std::endian::little, "the format is little-endian and so is this code");

namespace deltasync {

inline void put_varint(Bytes& out, u64 value) {
    for (; value >= 0x80; value >>= 7) out.push_back(static_cast<u8>(value | 0x80));
    out.push_back(static_cast<u8>(value));
}

inline void put_bytes(Bytes& out, const void* data, std::size_t size) {
    const u8* bytes = static_cast<const u8*>(data);
    out.insert(out.end(), bytes, bytes + size);
}

class ByteReader {
public:
    explicit ByteReader(std::span<const u8> data) : data_(data) {}

    std::span<const u8> take(u64 count) {
        if (count > data_.size()) throw Corrupt{"block.truncated", "the block ends too early"};
        auto taken = data_.first(count);
        data_ = data_.subspan(count);
        return taken;
    }

    u8 byte() { return take(1)[0]; }

    u64 varint() {
        u64 value = 0;
        for (int i = 0; i < kVarintBytesMax; ++i) {
            u8 b = byte();
            value |= u64{b & 0x7Fu} << (7 * i);
            if (b < 0x80) {
                if (b == 0 && i > 0) break;
                return value;
            }
        }
        throw Corrupt{"block.varint", "a varint is too long"};
    }

    void require_end() const {
        if (!data_.empty()) throw Corrupt{"block.trailing", "bytes after the end"};
    }

private:
    std::span<const u8> data_;
};

// Packs bits LSB first.
class BitWriter {
public:
    explicit BitWriter(u64 bits_max) : bytes_((bits_max + 7) / 8 + 8), at_(bytes_.data()) {}

    // The low `width` bits of `value`, which has no others; `Max` bounds `width`.
    template <int Max>
    void put(u64 value, int width) {
        if constexpr (Max <= 56) {
            put_short(value, width);
        } else {
            put_short(value & 0xFFFFFFFFu, width < 32 ? width : 32);
            if (width > 32) put_short(value >> 32, width - 32);
        }
    }

    std::span<const u8> bytes() const {
        return {bytes_.data(), static_cast<std::size_t>(at_ - bytes_.data()) + (filled_ != 0)};
    }

private:
    // Bits that do not fill a byte yet stay in a register: reading them back from memory would wait for the last store.
    void put_short(u64 value, int width) {
        pending_ |= value << filled_;
        filled_ += width;
        std::memcpy(at_, &pending_, 8);
        at_ += filled_ / 8;
        pending_ >>= filled_ & ~7;
        filled_ %= 8;
    }

    Bytes bytes_;
    u8* at_;
    u64 pending_ = 0;
    int filled_ = 0;
};

// Reads bits LSB first. The caller has checked that there are enough of them.
class BitReader {
public:
    explicit BitReader(std::span<const u8> data) : bytes_(data.size() + 8) {
        if (!data.empty()) std::memcpy(bytes_.data(), data.data(), data.size());
    }

    // The next `width` bits; `Max` bounds `width`.
    template <int Max>
    u64 get(int width) {
        if constexpr (Max <= 56) return get_short(width);
        u64 low = get_short(width < 32 ? width : 32);
        return width > 32 ? low | get_short(width - 32) << 32 : low;
    }

    // Whatever follows the bits read so far, up to the end of the last byte.
    bool padding_is_zero() { return at_ % 8 == 0 || get_short(static_cast<int>(8 - at_ % 8)) == 0; }

private:
    u64 get_short(int width) {
        u64 window;
        std::memcpy(&window, bytes_.data() + at_ / 8, 8);
        window >>= at_ % 8;
        at_ += static_cast<u64>(width);
        return window & ((u64{1} << width) - 1);
    }

    Bytes bytes_;
    u64 at_ = 0;
};

}  // namespace deltasync
