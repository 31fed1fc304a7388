#include "classes.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "scratch.hpp"
#include "sequence.hpp"
#include "steps.hpp"
#include "width.hpp"

namespace deltasync {
namespace {

// floor(2^24 * log2(1 + i/256)) by repeated squaring: integers only, the same on every machine.
constexpr std::array<u64, 257> make_log2_table() {
    std::array<u64, 257> table{};
    for (u64 i = 0; i < 256; ++i) {
        u64 y = (256 + i) << 22, value = 0;
        for (int bit = 0; bit < 24; ++bit) {
            y = y * y >> 30;
            value *= 2;
            if (y >> 31) y >>= 1, ++value;
        }
        table[i] = value;
    }
    table[256] = 1 << 24;
    return table;
}

constexpr auto kLog2 = make_log2_table();

// n * log2(n) in 1/4096, for n up to 2^31: between two places of the table on a straight line.
i64 weighted_log2(u64 n) {
    if (n == 0) return 0;
    int e = 63 - std::countl_zero(n);
    u64 fraction = (n << 32 >> e) & 0xFFFFFFFF, i = fraction >> 24, rest = fraction & 0xFFFFFF;
    u64 log2 = (static_cast<u64>(e) << 24) + kLog2[i] + ((kLog2[i + 1] - kLog2[i]) * rest >> 24);
    return static_cast<i64>(n * log2 >> 12);
}

// Elements that might share a class: how many there are, and how the changed ones among them stepped.
struct Group {
    u32 first = 0;
    u64 total = 0;
    u64 changed = 0;
    std::array<u64, kBucketsMax> steps{};

    // Bits, in 1/4096, to encode which elements changed and by which step symbol.
    i64 cost() const {
        i64 bits = weighted_log2(total) - weighted_log2(total - changed);
        for (u64 n : steps) bits -= weighted_log2(n);
        return bits;
    }

    Group joined(const Group& other) const {
        Group both = *this;
        both.total += other.total;
        both.changed += other.changed;
        for (std::size_t s = 0; s < steps.size(); ++s) both.steps[s] += other.steps[s];
        return both;
    }
};

template <class U>
u32 exponent_of(const Kind& kind, U bits) {
    return static_cast<u32>(bits >> kind.exponent_shift) & kind.exponent_mask;
}

// The first kSampleRun elements of every kSamplePeriod.
std::vector<Run> sample(const Kind& kind, const Runs& runs) {
    std::vector<Run> parts;
    u64 begin = 0;
    for (u64 r = 0; r < runs.size; ++r) {
        Run run = runs.data[r];
        u64 end = begin + run.count;
        for (u64 at = begin / kSamplePeriod * kSamplePeriod; at < end; at += kSamplePeriod) {
            u64 first = std::max(at, begin), last = std::min(at + kSampleRun, end);
            if (first >= last) continue;
            parts.push_back(run);
            parts.back().bits += (first - begin) * static_cast<u64>(kind.width);
            parts.back().count = last - first;
        }
        begin = end;
    }
    return parts;
}

Runs view(const std::vector<Run>& runs) {
    u64 elements = 0;
    for (const Run& run : runs) elements += run.count;
    return {runs.data(), runs.size(), elements};
}

template <class U>
void count_elements(const Kind& kind, const Runs& runs, u64 weight, std::vector<Group>& groups) {
    // Neighbours often share an exponent: four histograms keep one count from waiting for the last.
    std::array<std::array<u32, 256>, 4> counts{};
    for (u64 r = 0; r < runs.size; ++r) {
        // Samples are far apart in memory: ask for later ones before they are needed.
        constexpr u64 kAhead = 8;
        if (r + kAhead < runs.size) __builtin_prefetch(runs.data[r + kAhead].bits);
        const U* p = reinterpret_cast<const U*>(runs.data[r].bits);
        for (u64 i = 0; i < runs.data[r].count; ++i) ++counts[i % 4][exponent_of(kind, p[i])];
    }
    for (std::size_t e = 0; e < groups.size(); ++e)
        groups[e].total = (u64{counts[0][e]} + counts[1][e] + counts[2][e] + counts[3][e]) * weight;
}

template <class U>
void count_changes(const Kind& kind, const Runs& runs, std::span<const u32> positions, const U* values, u64 weight,
                   std::vector<Group>& groups) {
    u64 begin = 0, r = 0;
    for (u64 i = 0; i < positions.size(); ++i) {
        while (positions[i] >= begin + runs.data[r].count) begin += runs.data[r++].count;
        const U* bits = reinterpret_cast<const U*>(runs.data[r].bits);
        // The old bits may be far apart too.
        u64 later = i + 16;
        if (later < positions.size() && positions[later] < begin + runs.data[r].count)
            __builtin_prefetch(bits + (positions[later] - begin));
        U before = bits[positions[i] - begin];
        Group& group = groups[exponent_of(kind, before)];
        group.changed += weight;
        group.steps[bucket_of(zigzag_step<true>(before, values[i])).symbol] += weight;
    }
}

// Elements of a block by old exponent, and how the changed ones among them stepped.
class Census {
public:
    explicit Census(const Kind& kind) : kind_(kind), groups_(kind.exponent_mask + 1) {}

    void add_elements(const Runs& runs) {
        bool all = runs.elements < kElementsAllBelow;
        std::vector<Run> part = all ? std::vector<Run>{} : sample(kind_, runs);
        by_float_width(kind_, [&]<class U>(U) {
            count_elements<U>(kind_, all ? runs : view(part), all ? 1 : kSampleScale, groups_);
        });
    }

    void add_changes(const Runs& runs, std::span<const u32> positions, const void* values, u64 weight) {
        by_float_width(kind_, [&]<class U>(U) {
            count_changes(kind_, runs, positions, static_cast<const U*>(values), weight, groups_);
        });
    }

    // The exponents that occur.
    std::vector<Group> groups() const {
        std::vector<Group> present;
        for (u32 e = 0; e < groups_.size(); ++e) {
            Group group = groups_[e];
            group.first = e;
            group.total = std::max(group.total, group.changed);
            if (group.total) present.push_back(group);
        }
        return present;
    }

private:
    Kind kind_;
    std::vector<Group> groups_;
};

// Changes that the sample holds.
template <class U>
struct Sampled {
    std::vector<u32> positions;
    std::vector<U> values;

    Sampled(std::span<const u32> all, const U* bits) {
        for (u64 i = 0; i < all.size(); ++i) {
            if (all[i] % kSamplePeriod >= kSampleRun) continue;
            positions.push_back(all[i]);
            values.push_back(bits[i]);
        }
    }
};

// A group, and what it would be with its right neighbour.
struct Candidate {
    Group group;
    i64 cost;
    Group with_next;
    i64 cost_with_next;
};

void refresh(std::vector<Candidate>& list, std::size_t i) {
    if (i + 1 >= list.size()) return;
    list[i].with_next = list[i].group.joined(list[i + 1].group);
    list[i].cost_with_next = list[i].with_next.cost();
}

// Joins neighbours while that costs less than the tables of a class.
Classes join(const std::vector<Group>& groups) {
    Classes classes;
    if (groups.empty()) return classes;
    std::vector<Candidate> list;
    for (const Group& group : groups) list.push_back({group, group.cost(), {}, 0});
    for (std::size_t i = 0; i < list.size(); ++i) refresh(list, i);
    while (list.size() > 1) {
        std::size_t best = 0;
        i64 least = INT64_MAX;
        for (std::size_t i = 0; i + 1 < list.size(); ++i) {
            i64 growth = list[i].cost_with_next - list[i].cost - list[i + 1].cost;
            if (growth < least) least = growth, best = i;
        }
        if (list.size() <= kClassesWanted && least > kClassCostBits << 12) break;
        list[best].group = list[best].with_next;
        list[best].cost = list[best].cost_with_next;
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(best) + 1);
        if (best) refresh(list, best - 1);
        refresh(list, best);
    }
    classes.count = static_cast<int>(list.size());
    for (std::size_t i = 1; i < list.size(); ++i) classes.bounds[i - 1] = static_cast<u8>(list[i].group.first - 1);
    return classes;
}

}  // namespace

u64 entropy_q12(std::span<const u64> counts) {
    u64 total = 0;
    i64 bits = 0;
    for (u64 n : counts) total += n, bits -= weighted_log2(n);
    return static_cast<u64>(bits + weighted_log2(total));
}

bool chosen_by_sample(u64 elements, u64 changes) {
    return elements >= kElementsAllBelow && changes >= kChangesAllBelow;
}

Classes choose_classes(const Kind& kind, const Runs& runs, std::span<const u32> positions, const void* values) {
    if (!kind.is_float()) return {};
    Census census(kind);
    census.add_elements(runs);
    if (chosen_by_sample(runs.elements, positions.size())) {
        by_float_width(kind, [&]<class U>(U) {
            Sampled<U> part(positions, static_cast<const U*>(values));
            census.add_changes(runs, part.positions, part.values.data(), kSampleScale);
        });
    } else {
        census.add_changes(runs, positions, values, 1);
    }
    return join(census.groups());
}

std::optional<Classes> choose_early(const Isa& isa, const Kind& kind, const Runs& before, const Runs& after,
                                    u64 enough) {
    if (!kind.is_float() || before.elements < kElementsAllBelow) return {};
    std::vector<Run> old = sample(kind, before), fresh = sample(kind, after);
    u64 room = view(old).elements + kSlack;
    u32* positions = thread_lists().position.reserve(room);
    u8* values = thread_lists().value.reserve(room * static_cast<u64>(kind.width));
    u64 found = isa.detect(kind, view(old), view(fresh), positions, values);
    // A quarter more than the least: the sample may have more changes than its share.
    u64 likely = found * kSampleScale;
    if (likely < kChangesAllBelow + kChangesAllBelow / 4 || likely >= enough) return {};
    Census census(kind);
    census.add_elements(before);
    census.add_changes(view(old), {positions, found}, values, kSampleScale);
    return join(census.groups());
}

}  // namespace deltasync
