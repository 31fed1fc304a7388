#include "changes.hpp"

#include <algorithm>
#include <array>

#include "classes.hpp"
#include "detect.hpp"
#include "digest.hpp"
#include "planes.hpp"
#include "scratch.hpp"
#include "sequence.hpp"
#include "steps.hpp"
#include "width.hpp"

namespace deltasync {
namespace {

// Calls each_run(run, begin, first, last) for each run that has positions: it begins at position `begin` and has those
// numbered from `first` to `last`.
template <class AnyRun, class EachRun>
void visit(std::span<const AnyRun> runs, std::span<const u32> positions, EachRun&& each_run) {
    u64 begin = 0, i = 0;
    for (u64 r = 0; r < runs.size() && i < positions.size(); ++r) {
        u64 end = begin + runs[r].count, first = i;
        while (i < positions.size() && positions[i] < end) ++i;
        if (i > first) each_run(runs[r], begin, first, i);
        begin = end;
    }
}

template <class U>
Lanes weigh(const Runs& runs, std::span<const u32> positions, const U* before, const U* after) {
    Lanes lanes;
    visit(runs.span(), positions, [&](const Run& run, u64 begin, u64 first, u64 last) {
        RunWeigher weigher(run, lanes);
        for (u64 i = first; i < last; ++i) weigher.add(positions[i] - begin, before[i], after[i]);
    });
    return lanes;
}

template <class U>
void gather(const Runs& runs, std::span<const u32> positions, U* out) {
    visit(runs.span(), positions, [&](const Run& run, u64 begin, u64 first, u64 last) {
        const U* p = reinterpret_cast<const U*>(run.bits);
        for (u64 i = first; i < last; ++i) out[i] = p[positions[i] - begin];
    });
}

// Changed elements with their ranks, in ascending order of position.
template <class U>
struct Ranking {
    const u32* rank;
    const u8* member;
    const U* before;
    const U* after;
    u64 count;
};

// Changed elements listed class by class: gaps and steps, and how many there are in each class.
template <bool Float, class U>
struct ByClass {
    std::array<u64, kClassesMax> counts{};
    Scratch<u32> gaps;
    Scratch<U> steps;

    ByClass(const Ranking<U>& changes, int classes) : gaps(changes.count), steps(changes.count) {
        const auto& [rank, member, before, after, n] = changes;
        for (u64 i = 0; i < n; ++i) ++counts[member[i]];
        std::array<u64, kClassesMax> at{};
        std::array<u32, kClassesMax> next{};
        for (int c = 1; c < classes; ++c) at[c] = at[c - 1] + counts[c - 1];
        for (u64 i = 0; i < n; ++i) {
            u64 to = at[member[i]]++;
            gaps[to] = rank[i] - next[member[i]];
            next[member[i]] = rank[i] + 1;
            if (before[i] == after[i])
                throw Invalid{"changes.unchanged", "an element listed as changed has its old bits"};
            steps[to] = zigzag_step<Float>(before[i], after[i]);
        }
    }
};

template <bool Float, class U>
Encoded encode(const Isa& isa, const Kind& kind, const Classes& classes, const Ranking<U>& changes,
               const Lanes& digest_delta) {
    u64 n = changes.count;
    ByClass<Float, U> lists(changes, classes.count);
    std::span<const u64> counts(lists.counts.data(), static_cast<std::size_t>(classes.count));
    Encoded result{false, {}, digest_delta};
    Bytes& out = result.data;
    out.push_back(static_cast<u8>(classes.count));
    for (int c = 1; c < classes.count; ++c) out.push_back(static_cast<u8>(classes.bounds[c - 1] + 1));
    for (u64 count : counts) put_varint(out, count);
    encode_buckets(out, std::span<const u32>(lists.gaps.get(), n), counts, isa);
    u64 head = out.size();
    encode_buckets(out, std::span<const U>(lists.steps.get(), n), counts, isa);
    u64 step_bytes = out.size() - head;
    // Steps this long are not small moves of old values; the new values by themselves may be shorter.
    if (8 * step_bytes > kStepBitsWide * n) {
        Bytes planes;
        Run all{reinterpret_cast<const u8*>(changes.after), n, {0, 0}, 0};
        encode_planes(planes, kind, {&all, 1, n}, isa);
        if (planes.size() < step_bytes) {
            result.absolute = true;
            out.resize(head);
            put_bytes(out, planes.data(), planes.size());
        }
    }
    return result;
}

template <bool Float, class U>
Encoded encode(const Isa& isa, const Kind& kind, const Runs& runs, std::span<const u32> positions, const U* values) {
    u64 n = positions.size();
    Classes classes = choose_classes(kind, runs, positions, values);
    Scratch<U> before(n);
    Scratch<u8> member(n);
    if (classes.count == 1) {
        std::fill_n(member.get(), n, u8{0});
        gather(runs, positions, before.get());
        // With one class the rank is the position.
        return encode<Float, U>(isa, kind, classes, {positions.data(), member.get(), before.get(), values, n},
                                weigh(runs, positions, before.get(), values));
    }
    Scratch<u32> rank(n);
    Lanes digest_delta =
        isa.rank(kind, runs, classes, {positions.data(), values, n}, {rank.get(), member.get(), before.get()});
    return encode<Float, U>(isa, kind, classes, {rank.get(), member.get(), before.get(), values, n}, digest_delta);
}

// How far a pass came.
struct Pass {
    u64 changed;
    u64 stop;
    Standing standing;
};

Pass find(const Isa& isa, const Kind& kind, const Runs& before, const Runs& after, const Classes& classes, u64 start,
          u64 cell, u64 enough, ChangeLists& out) {
    u64 width = static_cast<u64>(kind.width), all = before.elements;
    u64 most = std::min(all, std::min(enough, all) + std::min(cell, all)) + kSlack;
    out.position.reserve(most);
    out.rank.reserve(most);
    out.member.reserve(most);
    out.value.reserve(most * width);
    out.before.reserve(most * width);
    Pass pass{0, start, {}};
    while (pass.stop < all && pass.changed < enough) {
        u64 end = pass.stop + std::min(cell, all - pass.stop), n = pass.changed;
        std::vector<Run> old = slice(kind, before, pass.stop, end), fresh = slice(kind, after, pass.stop, end);
        u32* positions = out.position.get() + n;
        u64 count =
            isa.find(kind, {old.data(), old.size(), end - pass.stop}, {fresh.data(), fresh.size(), end - pass.stop},
                     classes, positions, out.value.get() + n * width,
                     {out.rank.get() + n, out.member.get() + n, out.before.get() + n * width}, pass.standing);
        for (u64 i = 0; i < count; ++i) positions[i] += static_cast<u32>(pass.stop - start);
        pass.changed += count;
        pass.stop = end;
    }
    return pass;
}

Difference encode_found(const Isa& isa, const Kind& kind, const Runs& before, u64 start, u64 stop,
                        std::span<const u32> positions, const void* values) {
    if (positions.empty()) return {0, stop, {}};
    std::vector<Run> block = slice(kind, before, start, stop);
    return {positions.size(), stop,
            encode_changes(isa, kind, {block.data(), block.size(), stop - start}, positions, values)};
}

Classes read_classes(ByteReader& in, const Kind& kind) {
    Classes classes;
    classes.count = in.byte();
    if (classes.count < 1 || classes.count > kClassesMax || (classes.count > 1 && !kind.is_float()))
        throw Corrupt{"changes.classes", "a number of classes that cannot be"};
    auto thresholds = in.take(static_cast<u64>(classes.count - 1));
    u32 last = 0;
    for (std::size_t t = 0; t < thresholds.size(); ++t) {
        if (thresholds[t] <= last || thresholds[t] > kind.exponent_mask)
            throw Corrupt{"changes.thresholds", "class thresholds are not ascending exponents"};
        last = thresholds[t];
        classes.bounds[t] = static_cast<u8>(last - 1);
    }
    return classes;
}

// Gaps to ranks, in place. Every rank must at least be inside the block; the scan checks it against its class.
void accumulate(std::span<const u64> counts, u64 elements, u32* ranks) {
    u64 at = 0;
    for (u64 count : counts) {
        u64 rank = 0;
        for (u64 end = at + count; at < end; ++at) {
            rank += ranks[at];
            if (rank >= elements) throw Corrupt{"changes.rank", "a rank is past the last element of its class"};
            ranks[at] = static_cast<u32>(rank++);
        }
    }
}

template <bool Float, class U>
Decoded decode(const Isa& isa, const Kind& kind, const Runs& runs, std::span<const u8> data, bool absolute) {
    ByteReader in(data);
    Classes classes = read_classes(in, kind);
    std::array<u64, kClassesMax> count{}, first{};
    u64 n = 0;
    for (int c = 0; c < classes.count; ++c) {
        first[c] = n;
        count[c] = in.varint();
        n += count[c];
    }
    for (int c = classes.count; c < kClassesMax; ++c) first[c] = n;
    if (n > runs.elements) throw Corrupt{"changes.count", "more changes than elements"};
    std::span<const u64> counts(count.data(), static_cast<std::size_t>(classes.count));
    Scratch<u32> ranks(n);
    decode_buckets(in, counts, kBlockElementsLog2, std::span<u32>(ranks.get(), n), isa);
    Decoded out;
    out.values.resize((n + kSlack) * sizeof(U));
    U* values = reinterpret_cast<U*>(out.values.data());
    Scratch<U> steps;
    if (absolute) {
        decode_planes(in, kind, n, values, isa);
    } else {
        decode_buckets(in, counts, 8 * kind.width, std::span<U>(steps.reserve(n), n), isa);
    }
    in.require_end();

    // All bytes are read; now find the elements that they speak of.
    accumulate(counts, runs.elements, ranks.get());
    out.positions.resize(n + kSlack);
    Scratch<U> before(n + kSlack);
    if (classes.count == 1) {
        std::copy(ranks.get(), ranks.get() + n, out.positions.begin());
        gather(runs, std::span<const u32>(out.positions).first(n), before.get());
        if (!absolute)
            for (u64 i = 0; i < n; ++i) values[i] = step_from<Float>(before[i], steps[i]);
    } else {
        Selected selected{out.positions.data(), absolute ? before.get() : values};
        isa.select(kind, runs, classes, {ranks.get(), steps.get(), first.data(), count.data()}, selected);
        if (selected.count != n) throw Corrupt{"changes.rank", "a rank is past the last element of its class"};
        out.digest_delta = selected.digest_delta;
    }
    out.positions.resize(n);
    out.values.resize(n * sizeof(U));
    if (classes.count == 1 || absolute)
        out.digest_delta =
            weigh(runs, std::span<const u32>(out.positions), before.get(), static_cast<const U*>(values));
    return out;
}

}  // namespace

void check_positions(std::span<const u32> positions, u64 elements) {
    for (u64 i = 0; i < positions.size(); ++i)
        if (positions[i] >= elements || (i && positions[i] <= positions[i - 1]))
            throw Invalid{"changes.order", "positions are not ascending inside the block"};
}

Encoded encode_changes(const Isa& isa, const Kind& kind, const Runs& before, std::span<const u32> positions,
                       const void* values) {
    check_positions(positions, before.elements);
    return by_width(kind, [&]<class U>(U) {
        const U* bits = static_cast<const U*>(values);
        return kind.is_float() ? encode<true>(isa, kind, before, positions, bits)
                               : encode<false>(isa, kind, before, positions, bits);
    });
}

Difference encode_difference(const Isa& isa, const Kind& kind, const Runs& before, const Runs& after, u64 start,
                             u64 cell, u64 enough) {
    std::vector<Run> old = slice(kind, before, start, before.elements);
    std::vector<Run> fresh = slice(kind, after, start, before.elements);
    u64 elements = before.elements - start;
    auto classes =
        choose_early(isa, kind, {old.data(), old.size(), elements}, {fresh.data(), fresh.size(), elements}, enough);
    if (!classes || classes->count == 1) {
        Detected found = detect(isa, kind, before, after, start, cell, enough);
        return encode_found(isa, kind, before, start, found.stop, found.positions, found.values.data());
    }
    ChangeLists& found = thread_lists();
    Pass pass = find(isa, kind, before, after, *classes, start, cell, enough, found);
    if (pass.stop < before.elements || !chosen_by_sample(elements, pass.changed))
        return encode_found(isa, kind, before, start, pass.stop, {found.position.get(), pass.changed},
                            found.value.get());
    return by_width(kind, [&]<class U>(U) -> Difference {
        Ranking<U> ranking{found.rank.get(), found.member.get(), reinterpret_cast<const U*>(found.before.get()),
                           reinterpret_cast<const U*>(found.value.get()), pass.changed};
        return {pass.changed, pass.stop, encode<true>(isa, kind, *classes, ranking, pass.standing.digest_delta)};
    });
}

Decoded decode_changes(const Isa& isa, const Kind& kind, const Runs& before, std::span<const u8> data, bool absolute) {
    return by_width(kind, [&]<class U>(U) {
        return kind.is_float() ? decode<true, U>(isa, kind, before, data, absolute)
                               : decode<false, U>(isa, kind, before, data, absolute);
    });
}

Lanes digest_change(const Kind& kind, const Runs& before, std::span<const u32> positions, const void* values) {
    check_positions(positions, before.elements);
    return by_width(kind, [&]<class U>(U) {
        Scratch<U> old(positions.size());
        gather(before, positions, old.get());
        return weigh(before, positions, old.get(), static_cast<const U*>(values));
    });
}

void overwrite(const Kind& kind, std::span<const WritableRun> target, std::span<const u32> positions,
               const void* values) {
    u64 elements = 0;
    for (const WritableRun& run : target) elements += run.count;
    check_positions(positions, elements);
    by_width(kind, [&]<class U>(U) {
        const U* from = static_cast<const U*>(values);
        visit(target, positions, [&](const WritableRun& run, u64 begin, u64 first, u64 last) {
            U* p = reinterpret_cast<U*>(run.bits);
            for (u64 i = first; i < last; ++i) p[positions[i] - begin] = from[i];
        });
    });
}

}  // namespace deltasync
