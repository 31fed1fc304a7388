// Fuzz targets of the decoders: no input may crash them, and every instruction set must give the same result or the
// same error. What decodes is encoded again, which must give it back. The variable FUZZ_TARGET names one of `kTargets`.
//
// An input is a head that says which elements there are, and a block that claims to speak of them:
//   kind, look: 1 byte each; seed: 4 bytes; number of runs less one: 1 byte; elements of each run: 2 bytes, the top bit
//   set for large ones; then the block. For `crafted`, numbers follow from which a well-formed block is made.
// For `large` the head is kind, look, seed (1 byte each), log2 of the elements below 2^25, codec (1 byte each).
// seeds.py makes such inputs with the encoder of the Python reference: `element` below has a twin there.
//
// Mutations know the fields of a block (fields.hpp). clang runs the targets under libFuzzer, guided by coverage; with
// other compilers driver.cpp replays the corpus and mutates it.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>

#include "changes.hpp"
#include "digest.hpp"
#include "fields.hpp"
#include "planes.hpp"
#include "sequence.hpp"

using namespace deltasync;

namespace {

constexpr Kind kKinds[] = {{2, 7, 0xFF}, {2, 10, 0x1F}, {4, 23, 0xFF}, {1, 3, 0x0F}, {1, 2, 0x1F},
                           {1, 0, 0},    {2, 0, 0},     {4, 0, 0},     {8, 0, 0}};
constexpr u64 kRunsMax = 4, kFewElements = 200, kManyElements = 4300;  // a tile has 4096
constexpr u64 kNarrowKinds[] = {0, 1, 3, 4, 5, 6};                     // up to 2 bytes wide: 2^25 elements fit 64 MiB
enum Target { kRelative, kAbsolute, kPlanes, kSequence, kCrafted, kLarge, kTargetCount };
constexpr std::string_view kTargets[kTargetCount] = {"relative", "absolute", "planes", "sequence", "crafted", "large"};
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

    // One run of so many elements.
    Elements(const Kind& kind, Look look, u64 seed, u64 count) : kind_(kind) { add(look, seed, count, 0); }

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
    for (const Isa* isa : {portable_isa(), avx2_isa()})
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

Bytes decoded_planes(const Isa& isa, const Kind& kind, u64 elements, std::span<const u8> block) {
    Bytes values(elements * static_cast<u64>(kind.width));
    ByteReader in(block);
    decode_planes(in, kind, elements, values.data(), isa);
    in.require_end();
    return values;
}

// The rule that a block of planes breaks, or its elements.
struct Planes {
    std::string_view rule;
    Bytes values;

    bool operator==(const Planes&) const = default;
};

Planes planes_of(const Isa& isa, const Kind& kind, u64 elements, std::span<const u8> block) {
    try {
        return {"", decoded_planes(isa, kind, elements, block)};
    } catch (const Corrupt& corrupt) {
        return {corrupt.rule, {}};
    }
}

void fuzz_planes(const Kind& kind, const Elements& elements, std::span<const u8> block) {
    u64 count = elements.runs().elements;
    Bytes coded;
    encode_planes(coded, kind, elements.runs());
    Planes first = planes_of(*portable_isa(), kind, count, block);
    for (const Isa* isa : instruction_sets()) {
        Bytes same;
        encode_planes(same, kind, elements.runs(), *isa);
        require(same == coded, "instruction sets encode planes differently");
        require(decoded_planes(*isa, kind, count, coded) == elements.bytes(),
                "planes do not decode to what was encoded");
        require(planes_of(*isa, kind, count, block) == first, "instruction sets decode planes differently");
    }
    if (!first.rule.empty()) return;
    Run all{first.values.data(), count, {0, 0}, 0};
    Bytes again;
    encode_planes(again, kind, {&all, 1, count});
    require(decoded_planes(*portable_isa(), kind, count, again) == first.values,
            "planes that were decoded do not come back");
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

// Numbers of any width under any contexts: those that decode must be coded again to numbers that are equal.
template <class Value>
void fuzz_numbers(std::span<const u64> counts, int value_bits, std::span<const u8> data) {
    u64 count = 0;
    for (u64 c : counts) count += c;
    std::vector<Value> values(count), again(count);
    ByteReader in(data);
    decode_buckets(in, counts, value_bits, std::span<Value>(values));
    for (Value value : values)
        require(value_bits == 64 || (value >> (value_bits - 1) >> 1) == 0, "a number has more bits than it may have");
    Bytes coded;
    encode_buckets(coded, std::span<const Value>(values), counts);
    ByteReader second(coded);
    decode_buckets(second, counts, value_bits, std::span<Value>(again));
    second.require_end();
    require(again == values, "numbers do not come back");
}

void fuzz_sequence(Feed& feed) {
    constexpr int kBits[] = {8, 16, kBlockElementsLog2, 32, 64};
    int value_bits = kBits[feed.take(1) % std::size(kBits)];
    std::vector<u64> counts(1 + feed.take(1) % kClassesMax);
    for (u64& count : counts) {
        u64 size = feed.take(2);
        count = size >> 15 ? (size & 0x7FFF) % kManyElements : size % kFewElements;
    }
    try {
        if (value_bits > 32)
            fuzz_numbers<u64>(counts, value_bits, feed.rest());
        else
            fuzz_numbers<u32>(counts, value_bits, feed.rest());
    } catch (const Corrupt&) {
    }
}

// The elements of a large block, kept for the next input: most mutations leave them alone.
const Elements& large_elements(const Kind& kind, Look look, u64 seed, u64 count) {
    static std::optional<Elements> kept;
    static std::array<u64, 4> kept_for;
    std::array<u64, 4> wanted{static_cast<u64>(&kind - kKinds), look, seed, count};
    if (!kept || kept_for != wanted) {
        kept.reset();
        kept.emplace(kind, look, seed, count);
        kept_for = wanted;
    }
    return *kept;
}

// Up to as many elements as a block may have. Two sets of kernels, so that a run stays within 2 GB.
void fuzz_large(Feed& feed) {
    const Kind& kind = kKinds[kNarrowKinds[feed.take(1) % std::size(kNarrowKinds)]];
    Look look = static_cast<Look>(feed.take(1) % kLooks);
    u64 seed = feed.take(1) % 2, count = kBlockElementsMax >> feed.take(1) % 10;
    Target codec = static_cast<Target>(feed.take(1) % (kPlanes + 1));
    if (codec == kPlanes) {
        try {
            decoded_planes(*instruction_sets().back(), kind, count, feed.rest());
        } catch (const Corrupt&) {
        }
        return;
    }
    const Elements& elements = large_elements(kind, look, seed, count);
    const Isa* best = instruction_sets().back();
    Outcome found = decode(*best, kind, elements.runs(), feed.rest(), codec == kAbsolute);
    require(decode(*portable_isa(), kind, elements.runs(), feed.rest(), codec == kAbsolute) == found,
            "instruction sets decode differently");
    if (!found.rule.empty()) return;
    check_positions(found.decoded.positions, count);
    Elements after(elements);
    overwrite(kind, after.writable(), found.decoded.positions, found.decoded.values.data());
    Lanes before = best->digest(kind, elements.runs()), now = best->digest(kind, after.runs());
    for (int lane = 0; lane < 2; ++lane) now.sum[lane] -= before.sum[lane];
    require(same(now, found.decoded.digest_delta), "the digest did not follow the changes");
}

Target chosen_target() {
    const char* name = std::getenv("FUZZ_TARGET");
    for (u64 target = 0; target < kTargetCount; ++target)
        if (name && kTargets[target] == name) return static_cast<Target>(target);
    fail("FUZZ_TARGET must be relative, absolute, planes, sequence, crafted or large");
}

Target target() {
    static const Target chosen = chosen_target();
    return chosen;
}

// How long the head of an input is, and what follows it.
struct Shape {
    std::size_t head;
    BlockShape block;
};

Shape shape_of(std::span<const u8> input) {
    Feed feed(input);
    if (target() == kLarge) {
        Target codec = static_cast<Target>(input.size() > 4 ? input[4] % (kPlanes + 1) : 0);
        const Kind& kind = kKinds[kNarrowKinds[feed.take(1) % std::size(kNarrowKinds)]];
        return {5, {codec == kPlanes, codec == kAbsolute, kind.width}};
    }
    const Kind& kind = kKinds[feed.take(1) % std::size(kKinds)];
    feed.take(5);
    u64 runs = 1 + feed.take(1) % kRunsMax;
    return {7 + 2 * runs, {target() == kPlanes, target() == kAbsolute, kind.width}};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8* data, std::size_t size) {
    Feed feed({data, size});
    try {
        if (target() == kSequence) {
            fuzz_sequence(feed);
        } else if (target() == kLarge) {
            fuzz_large(feed);
        } else {
            const Kind& kind = kKinds[feed.take(1) % std::size(kKinds)];
            Elements elements(kind, feed);
            if (target() == kPlanes)
                fuzz_planes(kind, elements, feed.rest());
            else if (target() == kCrafted)
                fuzz_changes(kind, elements, crafted(kind, feed), false);
            else
                fuzz_changes(kind, elements, feed.rest(), target() == kAbsolute);
        }
    } catch (const Invalid& invalid) {
        fail(invalid.rule);
    }
    return 0;
}

extern "C" std::size_t LLVMFuzzerMutate(u8* data, std::size_t size, std::size_t most);

// Half of the mutations change one field of the block and leave all others readable.
extern "C" std::size_t LLVMFuzzerCustomMutator(u8* data, std::size_t size, std::size_t most, unsigned seed) {
    std::minstd_rand random(seed);
    Shape shape = shape_of({data, size});
    if (random() % 2 || target() == kSequence || target() == kCrafted || size <= shape.head)
        return LLVMFuzzerMutate(data, size, most);
    Bytes changed(data, data + shape.head);
    Bytes block = with_other_field({data + shape.head, size - shape.head}, shape.block, random);
    changed.insert(changed.end(), block.begin(), block.end());
    if (changed.size() > most) return LLVMFuzzerMutate(data, size, most);
    std::memcpy(data, changed.data(), changed.size());
    return changed.size();
}
