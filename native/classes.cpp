#include "classes.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "sequence.hpp"
#include "steps.hpp"

namespace deltasync {
namespace {

constexpr int kClassesWanted = 12;
constexpr i64 kClassCost = i64{320} << 12;
constexpr u64 kSampleAllBelow = u64{1} << 17;
constexpr u64 kSamplePeriod = 8192, kSampleRun = 64;
constexpr u64 kChangesAllBelow = u64{1} << 15, kChangesPeriod = 16;

// floor(4096 * log2(1 + i/256)) by repeated squaring: integers only, the same on every machine.
constexpr std::array<u64, 256> make_log2_table() {
    std::array<u64, 256> table{};
    for (u64 i = 0; i < 256; ++i) {
        u64 y = (256 + i) << 22, value = 0;
        for (int bit = 0; bit < 12; ++bit) {
            y = y * y >> 30;
            value *= 2;
            if (y >> 31) y >>= 1, ++value;
        }
        table[i] = value;
    }
    return table;
}

constexpr auto kLog2 = make_log2_table();

// n * log2(n) in 1/4096.
i64 weighted_log2(u64 n) {
    if (n == 0) return 0;
    int e = 63 - std::countl_zero(n);
    return static_cast<i64>(n * ((static_cast<u64>(e) << 12) + kLog2[(n << 8 >> e) & 255]));
}

// Elements that might share a class: how many there are, and how the changed ones among them stepped.
struct Group {
    u32 first = 0;
    u64 total = 0;
    u64 changed = 0;
    std::array<u64, kBucketsMax> steps{};

    // Bits, in 1/4096, to tell which elements changed and by which step symbol.
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

template <class U>
void count_population(const Kind& kind, const Runs& runs, std::vector<Group>& groups) {
    // Neighbours often share an exponent: four histograms keep one count from waiting for the last.
    std::array<std::array<u32, 256>, 4> counts{};
    bool all = runs.elements < kSampleAllBelow;
    u64 period = all ? 1 : kSamplePeriod, length = all ? 1 : kSampleRun;
    u64 begin = 0;
    for (u64 r = 0; r < runs.size; ++r) {
        const U* p = reinterpret_cast<const U*>(runs.data[r].bits);
        u64 end = begin + runs.data[r].count;
        for (u64 sample = begin / period * period; sample < end; sample += period)
            for (u64 i = std::max(sample, begin); i < std::min(sample + length, end); ++i)
                ++counts[i % 4][exponent_of(kind, p[i - begin])];
        begin = end;
    }
    for (std::size_t e = 0; e < groups.size(); ++e)
        groups[e].total = (u64{counts[0][e]} + counts[1][e] + counts[2][e] + counts[3][e]) * (period / length);
}

template <class U>
void count_changes(const Kind& kind, const Runs& runs, std::span<const u32> positions, const U* values,
                   std::vector<Group>& groups) {
    u64 period = positions.size() < kChangesAllBelow ? 1 : kChangesPeriod;
    // The old bits are far apart in memory: ask for those of later changes before they are needed.
    constexpr u64 kAhead = 16;
    u64 begin = 0, r = 0;
    for (u64 i = 0; i < positions.size(); i += period) {
        while (positions[i] >= begin + runs.data[r].count) begin += runs.data[r++].count;
        const U* bits = reinterpret_cast<const U*>(runs.data[r].bits);
        u64 later = i + kAhead * period;
        if (later < positions.size() && positions[later] < begin + runs.data[r].count)
            __builtin_prefetch(bits + (positions[later] - begin));
        U before = bits[positions[i] - begin];
        Group& group = groups[exponent_of(kind, before)];
        group.changed += period;
        group.steps[bucket_of(zigzag_step<true>(before, values[i])).symbol] += period;
    }
}

template <class U>
std::vector<Group> count(const Kind& kind, const Runs& runs, std::span<const u32> positions, const void* values) {
    std::vector<Group> groups(kind.exponent_mask + 1);
    count_population<U>(kind, runs, groups);
    count_changes<U>(kind, runs, positions, static_cast<const U*>(values), groups);
    std::vector<Group> present;
    for (u32 e = 0; e < groups.size(); ++e) {
        groups[e].first = e;
        groups[e].total = std::max(groups[e].total, groups[e].changed);
        if (groups[e].total) present.push_back(groups[e]);
    }
    return present;
}

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

}  // namespace

u64 entropy_q12(std::span<const u64> counts) {
    u64 total = 0;
    i64 bits = 0;
    for (u64 n : counts) total += n, bits -= weighted_log2(n);
    return static_cast<u64>(bits + weighted_log2(total));
}

Classes choose_classes(const Kind& kind, const Runs& runs, std::span<const u32> positions, const void* values) {
    Classes classes;
    if (!kind.is_float() || runs.elements == 0) return classes;
    std::vector<Group> groups = kind.width == 1   ? count<u8>(kind, runs, positions, values)
                                : kind.width == 2 ? count<u16>(kind, runs, positions, values)
                                                  : count<u32>(kind, runs, positions, values);
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
        if (list.size() <= kClassesWanted && least > kClassCost) break;
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

}  // namespace deltasync
