// A coverage-guided fuzz target of the decoders: no input may crash them, and every instruction set must give the same
// result or the same error. What decodes is encoded again, which must give it back.
//
// An input is a head that says which elements there are, and a block that claims to speak of them:
//   kind, mode, look: 1 byte each; seed: 4 bytes; number of runs less one: 1 byte; elements of each run: 2 bytes, the
//   top bit set for large ones; then the block, or (mode kCrafted) numbers from which a well-formed block is made.
// seeds.py makes such inputs with the encoder of the Python reference: `element` below has a twin there.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "changes.hpp"
#include "digest.hpp"
#include "planes.hpp"
#include "sequence.hpp"

using namespace deltasync;

namespace {

constexpr Kind kKinds[] = {{2, 7, 0xFF}, {2, 10, 0x1F}, {4, 23, 0xFF}, {1, 3, 0x0F}, {1, 2, 0x1F},
                           {1, 0, 0},    {2, 0, 0},     {4, 0, 0},     {8, 0, 0}};
constexpr u64 kRunsMax = 4, kFewElements = 200, kManyElements = 4300;  // a tile has 4096
enum Mode { kRelative, kAbsolute, kPlanes, kCrafted, kModes };
enum Look { kUniform, kWeights, kSpecial, kConstant, kLooks };

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "decode_fuzz: %s\n", what);
    std::abort();
}

void require(bool holds, const char* what) {
    if (!holds) fail(what);
}

// Takes an input apart; gives zeros once it is used up.
class Feed {
public:
    explicit Feed(std::span<const u8> data) : data_(data) {}

    u64 take(u64 bytes) {
        u64 value = 0;
        for (u64 i = 0; i < bytes && !data_.empty(); ++i) {
            value |= u64{data_.front()} << (8 * i);
            data_ = data_.subspan(1);
        }
        return value;
    }

    // 1 to 8 bytes after a byte that says how many: small numbers are short.
    u64 number() { return take(1 + take(1) % 8); }

    std::span<const u8> rest() const { return data_; }

private:
    std::span<const u8> data_;
};

u64 element(const Kind& kind, Look look, u64 seed, u64 place) {
    u64 hash = mix(seed + (place + 1) * 0x9E3779B97F4A7C15u);
    u64 sign = u64{1} << (8 * kind.width - 1), exponent = u64{kind.exponent_mask} << kind.exponent_shift;
    u64 special[] = {0, 1, sign, sign | 1, sign - 1, ~u64{0}, exponent, exponent | 1};
    u64 below = static_cast<u64>(__builtin_ctzll(hash >> 32 | 1 << 12)) % (kind.exponent_mask / 2 + 1);
    u64 bits = hash;
    if (look == kSpecial) bits = special[hash % 8];
    if (look == kConstant) bits = mix(seed);
    if (look == kWeights && kind.is_float())
        bits = (hash & ~exponent) | (kind.exponent_mask / 2 - below) << kind.exponent_shift;
    return kind.width == 8 ? bits : bits & ((u64{1} << (8 * kind.width)) - 1);
}

// Elements with memory of its own for each run, which ends where its memory ends: a sanitizer sees every step beyond.
class Elements {
public:
    Elements(const Kind& kind, Feed& feed) : kind_(kind) {
        Look look = static_cast<Look>(feed.take(1) % kLooks);
        u64 seed = feed.take(4), count = 1 + feed.take(1) % kRunsMax;
        for (u64 r = 0; r < count; ++r) {
            u64 size = feed.take(2);
            add(look, seed, size >> 15 ? (size & 0x7FFF) % kManyElements : size % kFewElements, r);
        }
    }

    Elements(const Elements& other) : kind_(other.kind_) {
        for (const Run& run : other.runs_) copy(run);
    }

    Runs runs() const { return {runs_.data(), runs_.size(), elements_}; }

    // The same runs, to write to.
    std::span<const WritableRun> writable() const { return writable_; }

    Bytes bytes() const {
        Bytes all;
        for (const Run& run : runs_) put_bytes(all, run.bits, run.count * width());
        return all;
    }

private:
    u64 width() const { return static_cast<u64>(kind_.width); }

    void add(Look look, u64 seed, u64 count, u64 r) {
        u64 before = r % 3;  // elements of the same memory that are not in the run
        memory_.push_back(std::make_unique<u8[]>((before + count) * width()));
        u8* bits = memory_.back().get() + before * width();
        for (u64 i = 0; i < count; ++i) {
            u64 value = element(kind_, look, seed, elements_ + i);
            std::memcpy(bits + i * width(), &value, width());
        }
        runs_.push_back({bits, count, {mix(seed + r), mix(seed - r)}, 1000 * r + before});
        writable_.push_back({bits, count});
        elements_ += count;
    }

    void copy(const Run& run) {
        memory_.push_back(std::make_unique<u8[]>(run.count * width()));
        if (run.count) std::memcpy(memory_.back().get(), run.bits, run.count * width());
        runs_.push_back({memory_.back().get(), run.count, {run.seed[0], run.seed[1]}, run.index});
        writable_.push_back({memory_.back().get(), run.count});
        elements_ += run.count;
    }

    Kind kind_;
    std::vector<std::unique_ptr<u8[]>> memory_;
    std::vector<Run> runs_;
    std::vector<WritableRun> writable_;
    u64 elements_ = 0;
};

std::vector<const Isa*> instruction_sets() {
    std::vector<const Isa*> found;
    for (const Isa* isa : {portable_isa(), avx2_isa(), avx512_isa()})
        if (isa) found.push_back(isa);
    return found;
}

bool same(const Lanes& a, const Lanes& b) { return a.sum[0] == b.sum[0] && a.sum[1] == b.sum[1]; }

// The result of a decoder: the rule that is broken, or changes.
struct Outcome {
    std::string_view rule;
    Decoded decoded;

    bool operator==(const Outcome& other) const {
        return rule == other.rule && decoded.positions == other.decoded.positions &&
               decoded.values == other.decoded.values && same(decoded.digest_delta, other.decoded.digest_delta);
    }
};

Outcome decode(const Isa& isa, const Kind& kind, const Runs& runs, std::span<const u8> block, bool absolute) {
    try {
        return {"", decode_changes(isa, kind, runs, block, absolute)};
    } catch (const Corrupt& corrupt) {
        return {corrupt.rule, {}};
    }
}

Outcome decode_everywhere(const Kind& kind, const Runs& runs, std::span<const u8> block, bool absolute) {
    Outcome first = decode(*portable_isa(), kind, runs, block, absolute);
    for (const Isa* isa : instruction_sets())
        require(isa == portable_isa() || decode(*isa, kind, runs, block, absolute) == first,
                "instruction sets decode differently");
    return first;
}

// Writes the changes, and looks for them again: gives those that changed anything.
Outcome applied(const Kind& kind, const Elements& elements, const Decoded& changes) {
    Elements after(elements);
    overwrite(kind, after.writable(), changes.positions, changes.values.data());
    Outcome first;
    for (const Isa* isa : instruction_sets()) {
        u64 room = elements.runs().elements + kSlack, width = static_cast<u64>(kind.width);
        Outcome found;
        found.decoded.positions.resize(room);
        found.decoded.values.resize(room * width);
        u64 count = isa->detect(kind, elements.runs(), after.runs(), found.decoded.positions.data(),
                                found.decoded.values.data());
        found.decoded.positions.resize(count);
        found.decoded.values.resize(count * width);
        Lanes before = isa->digest(kind, elements.runs()), now = isa->digest(kind, after.runs());
        for (int lane = 0; lane < 2; ++lane) found.decoded.digest_delta.sum[lane] = now.sum[lane] - before.sum[lane];
        if (isa == portable_isa()) first = found;
        require(found == first, "instruction sets find different changes");
    }
    require(same(first.decoded.digest_delta, changes.digest_delta), "the digest did not follow the changes");
    return first;
}

void round_trip(const Kind& kind, const Elements& elements, const Outcome& changes) {
    const Decoded& decoded = changes.decoded;
    Encoded first;
    for (const Isa* isa : instruction_sets()) {
        Encoded coded = encode_changes(*isa, kind, elements.runs(), decoded.positions, decoded.values.data());
        if (isa == portable_isa()) first = coded;
        require(coded.data == first.data && coded.absolute == first.absolute &&
                    same(coded.digest_delta, decoded.digest_delta),
                "instruction sets encode differently");
    }
    Outcome again = decode_everywhere(kind, elements.runs(), first.data, first.absolute);
    require(again == changes, "what was encoded does not decode to the same");
}

void fuzz_changes(const Kind& kind, const Elements& elements, std::span<const u8> block, bool absolute) {
    Outcome found = decode_everywhere(kind, elements.runs(), block, absolute);
    if (!found.rule.empty()) return;
    check_positions(found.decoded.positions, elements.runs().elements);
    require(found.decoded.values.size() == found.decoded.positions.size() * static_cast<u64>(kind.width),
            "another number of values than of positions");
    round_trip(kind, elements, applied(kind, elements, found.decoded));
}

Bytes decoded_planes(const Kind& kind, u64 elements, std::span<const u8> block) {
    Bytes values(elements * static_cast<u64>(kind.width));
    ByteReader in(block);
    decode_planes(in, kind, elements, values.data());
    in.require_end();
    return values;
}

void fuzz_planes(const Kind& kind, const Elements& elements, std::span<const u8> block) {
    u64 count = elements.runs().elements;
    Bytes coded;
    encode_planes(coded, kind, elements.runs());
    require(decoded_planes(kind, count, coded) == elements.bytes(), "planes do not decode to what was encoded");
    try {
        Bytes values = decoded_planes(kind, count, block), again;
        Run all{values.data(), count, {0, 0}, 0};
        encode_planes(again, kind, {&all, 1, count});
        require(decoded_planes(kind, count, again) == values, "planes that were decoded do not come back");
    } catch (const Corrupt&) {
    }
}

// A block of well-formed sequences whose numbers are anything: damage by chance does not get that far.
Bytes crafted(const Kind& kind, Feed& feed) {
    u64 classes = kind.is_float() ? 1 + feed.take(1) % kClassesMax : 1;
    Bytes block{static_cast<u8>(classes)};
    for (u64 c = 1, last = 0; c < classes; ++c) {
        last += 1 + feed.take(1) % 16;
        block.push_back(static_cast<u8>(last));
    }
    std::vector<u64> counts(classes), gaps, steps;
    for (u64& count : counts) {
        count = feed.take(1) % 64;
        put_varint(block, count);
        for (u64 i = 0; i < count; ++i) {
            gaps.push_back(feed.number() % kBlockElementsMax);
            steps.push_back(feed.number() & (kind.width == 8 ? ~u64{0} : (u64{1} << (8 * kind.width)) - 1));
        }
    }
    encode_buckets(block, std::span<const u64>(gaps), counts);
    encode_buckets(block, std::span<const u64>(steps), counts);
    return block;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8* data, std::size_t size) {
    Feed feed({data, size});
    const Kind& kind = kKinds[feed.take(1) % std::size(kKinds)];
    Mode mode = static_cast<Mode>(feed.take(1) % kModes);
    Elements elements(kind, feed);
    try {
        if (mode == kPlanes)
            fuzz_planes(kind, elements, feed.rest());
        else if (mode == kCrafted)
            fuzz_changes(kind, elements, crafted(kind, feed), false);
        else
            fuzz_changes(kind, elements, feed.rest(), mode == kAbsolute);
    } catch (const Invalid& invalid) {
        fail(invalid.rule);
    }
    return 0;
}
