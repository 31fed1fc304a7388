// The fields of a block, for mutations that change one of them and keep the rest readable: damage by chance rarely gets
// past the first varint.
#pragma once

#include <random>

#include "constants.hpp"
#include "wire.hpp"

namespace deltasync {

// What a block consists of: byte planes alone, or changes whose values are planes (absolute) or steps.
struct BlockShape {
    bool is_planes;
    bool is_absolute;
    int width;
};

enum class FieldKind { kByte, kVarint, kBytes };

struct Field {
    FieldKind kind;
    Bytes data;
    u64 number = 0;  // the value of a varint

    Bytes build() const {
        if (kind != FieldKind::kVarint) return data;
        Bytes out;
        put_varint(out, number);
        return out;
    }
};

// Takes a block apart as a decoder reads it. What cannot be read is one last field.
class FieldReader {
public:
    FieldReader(std::span<const u8> block, const BlockShape& shape) : in_(block) {
        std::size_t left = block.size();
        try {
            if (shape.is_planes)
                planes(shape.width);
            else
                changes(shape);
        } catch (const Corrupt&) {
        }
        for (const Field& field : fields) left -= std::min(left, field.build().size());
        if (left)
            fields.push_back({FieldKind::kBytes, Bytes(block.end() - static_cast<std::ptrdiff_t>(left), block.end())});
    }

    std::vector<Field> fields;

private:
    u8 byte() {
        u8 value = in_.byte();
        fields.push_back({FieldKind::kByte, {value}});
        return value;
    }

    u64 varint() {
        u64 value = in_.varint();
        fields.push_back({FieldKind::kVarint, {}, value});
        return value;
    }

    void bytes(u64 count) {
        auto taken = in_.take(count);
        fields.push_back({FieldKind::kBytes, Bytes(taken.begin(), taken.end())});
    }

    void symbols(u64 tables) {
        u8 lanes_log2 = byte();
        for (u64 t = 0; t < tables; ++t) bytes(u64{byte()} + 1);
        u64 words = varint();
        bytes(u64{4} << lanes_log2 % 32);
        bytes(2 * words);
    }

    void numbers(u64 tables) {
        symbols(tables);
        bytes(varint());
    }

    void planes(int width) {
        // A raw plane ends where the number of elements says, which is not known here: it is the last field.
        for (int plane = 0; plane < width && byte() == 1; ++plane) symbols(1);
    }

    void changes(const BlockShape& shape) {
        u64 classes = byte(), used = 0;
        bytes(classes - 1);
        for (u64 c = 0; c < classes; ++c) used += varint() != 0;
        numbers(used);
        if (shape.is_absolute)
            planes(shape.width);
        else
            numbers(used);
    }

    ByteReader in_;
};

inline u64 other_number(u64 number, std::minstd_rand& random) {
    const u64 edges[] = {0, 1, 127, 128, 4095, 4096, kBlockElementsMax - 1, kBlockElementsMax, (u64{1} << 35) - 1};
    switch (random() % 5) {
        case 0: return number + 1;
        case 1: return number ? number - 1 : 2;
        case 2: return number ^ u64{1} << random() % 26;
        case 3: return edges[random() % std::size(edges)];
        default: return random() % (2 * number + 2);
    }
}

inline void change(Field& field, std::minstd_rand& random) {
    Bytes& data = field.data;
    if (field.kind == FieldKind::kVarint) {
        field.number = other_number(field.number, random);
    } else if (field.kind == FieldKind::kByte) {
        const u8 edges[] = {0, 1, 2, 5, 6, 15, 16, 17, 65, 127, 128, 255};
        data[0] =
            random() % 2 ? edges[random() % std::size(edges)] : static_cast<u8>(data[0] + (random() % 2 ? 1 : 255));
    } else if (data.empty() || random() % 8 == 0) {
        data.push_back(static_cast<u8>(random()));
    } else if (random() % 8 == 0) {
        data.resize(random() % data.size());
    } else if (random() % 8 == 0) {
        std::fill(data.begin(), data.end(), static_cast<u8>(random() % 4 ? 0 : random()));
    } else {
        data[random() % data.size()] ^= static_cast<u8>(1 << random() % 8);
    }
}

// The block with one to three fields changed, and sometimes one doubled or left out.
inline Bytes with_other_field(std::span<const u8> block, const BlockShape& shape, std::minstd_rand& random) {
    std::vector<Field> fields = FieldReader(block, shape).fields;
    for (u64 times = 1 + random() % 3; times-- && !fields.empty();) {
        std::size_t at = random() % fields.size();
        auto place = fields.begin() + static_cast<std::ptrdiff_t>(at);
        if (random() % 16 == 0)
            fields.erase(place);
        else if (random() % 16 == 0)
            fields.insert(place, Field(fields[at]));
        else
            change(fields[at], random);
    }
    Bytes out;
    for (const Field& field : fields) {
        Bytes built = field.build();
        out.insert(out.end(), built.begin(), built.end());
    }
    return out;
}

}  // namespace deltasync
