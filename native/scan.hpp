// The element loops, written once over a policy `V` that knows how to look at 64 elements:
//   u64  V::different(const U* a, const U* b)                   bit i: element i differs
//   void V::round(const u32* p, u16 nan, u16* to)               64 float32 as bfloat16
//   V::Bounds(const Classes&)                                   bounds in a form that is quick to compare with
//   V::Tally<K>(const Kind&, Bounds)                            running counts of members of each class:
//     u64 kGroups                                                 how many times 64 elements it looks at in one go
//     void add(const U* p, u16* before, int stride)               writes the counts before each 64, and counts them
//     void store(u16* counts)                                     writes the counts; at least K are written
//   V::Member(const Kind&, const Classes&, int c)               finds the members of class c:
//     u64 mask(const U* p)                                        bit i: element i is in the class
//   u64  V::group_of(const u16* first, u32 r)                   the last of 64 ascending numbers that is at most r
//   void V::weigh(const U* p, u64 n, columns, u64 sums[2])      sums of column key * bits
//   V::decode_rows, V::encode_rows                              the coder's loops over rows, as in isa.hpp
// A set that leaves some of the loops to another one has only what the others use.
// Each instruction set compiles its own copy. The anonymous namespace keeps the linker from sharing code between the
// copies, and no functions of the standard library are used for the same reason.
#pragma once

#include "isa_shared.hpp"
#include "steps.hpp"

namespace deltasync {
namespace {

template <class V>
struct Scan {
    static constexpr u64 kGroup = 64, kTileGroups = 64, kTile = kGroup * kTileGroups;

    // A piece of a run of at most kTile elements; `position` counts from the start of the first run.
    template <class U>
    struct Piece {
        const U* bits;
        u64 count;
        u64 position;
        u64 run;
        u64 offset;
    };

    template <class U, class Look>
    static void pieces(const Runs& runs, Look&& look) {
        u64 position = 0;
        for (u64 r = 0; r < runs.size; ++r) {
            const U* p = reinterpret_cast<const U*>(runs.data[r].bits);
            u64 count = runs.data[r].count;
            for (u64 at = 0; at < count; at += kTile)
                look(Piece<U>{p + at, count - at < kTile ? count - at : kTile, position + at, r, at});
            position += count;
        }
    }

    // The digest's keys of one piece: it meets at most five rows.
    class Keys {
    public:
        Keys(const Run& run, u64 offset, u64 count) : column_((run.index + offset) & (kColumns - 1)) {
            u64 first = (run.index + offset) >> 10, last = (run.index + offset + count - 1) >> 10;
            for (u64 row = first; row <= last; ++row)
                for (int lane = 0; lane < 2; ++lane) row_[row - first][lane] = row_key(run, lane, row);
        }

        void add(u64 i, u64 amount, Lanes& lanes) const {
            u64 at = column_ + i, column = at & (kColumns - 1);
            const u64* row = row_[at >> 10];
            lanes.sum[0] += row[0] * kColumnKeys[0][column] * amount;
            lanes.sum[1] += row[1] * kColumnKeys[1][column] * amount;
        }

    private:
        u64 column_;
        u64 row_[kTile / kColumns + 1][2];
    };

    // Calls put(number, place) for each set bit, numbered from `found` on; gives the next number. Always for two at a
    // time, as whether there is one cannot be predicted: so it may call for two numbers too many.
    template <class Put>
    static u64 extract(u64 mask, u64 found, Put&& put) {
        u64 end = found + static_cast<u64>(ones(mask)), k = found;
        do {
            put(k, lowest_bit(mask));
            mask &= mask - 1;
            put(k + 1, lowest_bit(mask));
            mask &= mask - 1;
            k += 2;
        } while (mask);
        return end;
    }

    // Lists the changed elements of a piece from number k on; gives the next number.
    template <class U>
    static u64 compare(const Piece<U> old, const U* fresh, u64 k, u32* positions, U* values) {
        for (u64 g = 0; g < old.count; g += kGroup) {
            u64 mask = 0;
            if (g + kGroup <= old.count) {
                mask = V::different(old.bits + g, fresh + g);
            } else {
                for (u64 i = g; i < old.count; ++i) mask |= u64{old.bits[i] != fresh[i]} << (i - g);
            }
            k = extract(mask, k, [=](u64 to, u32 i) {
                positions[to] = static_cast<u32>(old.position + g) + i;
                values[to] = fresh[g + i];
            });
        }
        return k;
    }

    template <class U>
    static const U* twin(const Piece<U>& piece, const Runs& other) {
        return reinterpret_cast<const U*>(other.data[piece.run].bits) + piece.offset;
    }

    template <class U>
    static u64 detect(const Runs& before, const Runs& after, u32* positions, U* values) {
        u64 found = 0;
        pieces<U>(before,
                  [&](const Piece<U> old) { found = compare(old, twin(old, after), found, positions, values); });
        return found;
    }

    static u64 compare_rounded(const Piece<u16> old, const u32* fresh, u16 nan, u64 k, u32* positions, u16* values) {
        alignas(64) u16 near[kGroup];
        for (u64 g = 0; g < old.count; g += kGroup) {
            u64 mask = 0;
            if (g + kGroup <= old.count) {
                V::round(fresh + g, nan, near);
                mask = V::different(old.bits + g, near);
            } else {
                for (u64 i = g; i < old.count; ++i) {
                    near[i - g] = rounded(fresh[i], nan);
                    mask |= u64{old.bits[i] != near[i - g]} << (i - g);
                }
            }
            k = extract(mask, k, [&](u64 to, u32 i) {
                positions[to] = static_cast<u32>(old.position + g) + i;
                values[to] = near[i];
            });
        }
        return k;
    }

    static u64 detect_rounded(const Runs& before, const Runs& after, u16 nan, u32* positions, u16* values) {
        u64 found = 0;
        pieces<u16>(before, [&](const Piece<u16> old) {
            const u32* fresh = reinterpret_cast<const u32*>(after.data[old.run].bits) + old.offset;
            found = compare_rounded(old, fresh, nan, found, positions, values);
        });
        return found;
    }

    // Asks for what is a tile further on: counting takes so long that the processor does not look ahead by itself.
    template <class U>
    static void prefetch_next(const U* p, u64 count) {
        constexpr u64 kLine = 64 / sizeof(U);
        for (u64 at = 0; at < count; at += kLine) __builtin_prefetch(p + kTile + at);
    }

    // The classes of up to kTile elements: where in its class each group begins.
    template <class U, int K>
    class Tile {
    public:
        static constexpr int kStride = (K + 7) / 8 * 8;

        alignas(64) u16 first[kTileGroups][kStride];  // members of a class in the tile before a group
        alignas(64) u16 totals[kStride];

        // `twin` is read soon too; it may be p.
        void look(const Kind& kind, const typename V::Bounds& bounds, const U* p, const U* twin, u64 count) {
            constexpr u64 kSpan = Tally::kGroups * kGroup;
            Tally tally(kind, bounds);
            bits_ = p;
            whole_ = count / kSpan * Tally::kGroups;
            u64 g = 0;
            for (; g < whole_; g += Tally::kGroups) {
                prefetch_next(p + g * kGroup, kSpan);
                if (twin != p) prefetch_next(twin + g * kGroup, kSpan);
                tally.add(p + g * kGroup, first[g], kStride);
            }
            u64 rest = count - g * kGroup;
            if (rest) {
                std::memcpy(tail_, p + g * kGroup, rest * sizeof(U));
                std::memset(tail_ + rest, 0, (kSpan - rest) * sizeof(U));
                tally.add(static_cast<const U*>(tail_), first[g], kStride);
                g += Tally::kGroups;
            }
            // A search must not find groups that are not there: their members come after all others.
            if (g < kTileGroups) std::memset(first[g], 0x7F, sizeof(first) - g * sizeof(first[0]));
            tally.store(totals);
            // The filling has exponent 0 and was counted in class 0.
            if (rest) totals[0] = static_cast<u16>(totals[0] - (kSpan - rest));
        }

        // The elements of a group, filled up with 0.
        const U* group(u64 g) const { return g < whole_ ? bits_ + g * kGroup : tail_ + (g - whole_) * kGroup; }

    private:
        using Tally = typename V::template Tally<K>;

        U tail_[Tally::kGroups * kGroup];
        const U* bits_;
        u64 whole_;
    };

    // `Tile::first` by class.
    template <class U, int K>
    struct Columns {
        static constexpr int kStride = Tile<U, K>::kStride;

        alignas(64) u16 first[kStride][kTileGroups];

        explicit Columns(const Tile<U, K>& tile) {
            for (u64 g = 0; g < kTileGroups; g += 8)
                for (int c = 0; c < kStride; c += 8) transpose(&tile.first[g][c], kStride, &first[c][g], kTileGroups);
        }
    };

    // Finds the members of each class.
    template <int K>
    struct Members {
        typename V::Member of[K];

        Members(const Kind& kind, const Classes& classes) {
            for (int c = 0; c < classes.count; ++c) of[c] = typename V::Member(kind, classes, c);
        }
    };

    // Ranks changed elements, piece by piece.
    template <class U, int K>
    class Ranker {
    public:
        Ranker(const Kind& kind, const Classes& classes) : kind_(kind), bounds_(classes), members_(kind, classes) {
            for (int e = 0; e < 256; ++e) {
                class_of_[e] = 0;
                for (int t = 0; t < K - 1; ++t) class_of_[e] = static_cast<u8>(class_of_[e] + (e > classes.bounds[t]));
            }
        }

        // The changes from number `first` on, up to `last`, are those of the piece.
        void rank(const Piece<U> piece, const U* twin, const Run& run, const u32* position, const U* after, u64 first,
                  u64 last, const Ranked& out, Standing& standing) {
            tile_.look(kind_, bounds_, piece.bits, twin, piece.count);
            const Keys keys(run, piece.offset, piece.count);
            U* before = static_cast<U*>(out.before);
            Lanes lanes;
            for (u64 k = first; k < last; ++k) {
                u64 i = position[k] - piece.position, g = i / kGroup;
                U bits = piece.bits[i];
                int c = class_of_[bits >> kind_.exponent_shift & kind_.exponent_mask];
                u64 earlier = members_.of[c].mask(tile_.group(g)) & ((u64{1} << i % kGroup) - 1);
                out.rank[k] = standing.passed[c] + tile_.first[g][c] + static_cast<u32>(ones(earlier));
                out.member[k] = static_cast<u8>(c);
                before[k] = bits;
                keys.add(i, u64{after[k]} - u64{bits}, lanes);
            }
            for (int lane = 0; lane < 2; ++lane) standing.digest_delta.sum[lane] += lanes.sum[lane];
            for (int c = 0; c < K; ++c) standing.passed[c] += tile_.totals[c];
        }

    private:
        Kind kind_;
        typename V::Bounds bounds_;
        Members<K> members_;
        Tile<U, K> tile_;
        u8 class_of_[256];
    };

    template <class U, int K>
    static Lanes rank(const Kind& kind, const Runs& runs, const Classes& classes, const Changed& changed,
                      const Ranked& out) {
        Ranker<U, K> ranker(kind, classes);
        Standing standing;
        u64 next = 0;
        pieces<U>(runs, [&](const Piece<U> piece) {
            u64 first = next;
            while (next < changed.count && changed.position[next] < piece.position + piece.count) ++next;
            ranker.rank(piece, piece.bits, runs.data[piece.run], changed.position, static_cast<const U*>(changed.value),
                        first, next, out, standing);
        });
        return standing.digest_delta;
    }

    template <class U, int K>
    static u64 find(const Kind& kind, const Runs& before, const Runs& after, const Classes& classes, u32* positions,
                    U* values, const Ranked& out, Standing& standing) {
        Ranker<U, K> ranker(kind, classes);
        u64 found = 0;
        pieces<U>(before, [&](const Piece<U> piece) {
            u64 first = found;
            found = compare(piece, twin(piece, after), found, positions, values);
            ranker.rank(piece, twin(piece, after), before.data[piece.run], positions, values, first, found, out,
                        standing);
        });
        return found;
    }

    // The elements of a piece that were found to have changed, and what they become.
    template <class U>
    struct Marks {
        u64 groups = 0;  // bit g: group g has changes
        u64 changed[kTileGroups] = {};
        U value[kTile];
        Lanes digest_delta;
    };

    // Marks the wanted members of class c in a piece; gives where the next piece goes on. `passed` counts the members
    // before the piece.
    template <bool Relative, class U, int K>
    static u64 mark(const U* bits, const Tile<U, K>& tile, const u16* first, const Keys& keys,
                    const typename V::Member& member, int c, const Wanted& wanted, u64 at, u32 passed,
                    Marks<U>& marks) {
        const u32* rank = wanted.rank;
        const U* step = static_cast<const U*>(wanted.step);
        u32 total = tile.totals[c];
        u64 groups = 0;
        Lanes lanes;
        for (u64 end = wanted.first[c] + wanted.count[c]; at < end && rank[at] - passed < total; ++at) {
            u32 r = rank[at] - passed;
            u64 g = V::group_of(first, r);
            u32 i = select_bit(member.mask(tile.group(g)), r - first[g]);
            groups |= u64{1} << g;
            marks.changed[g] |= u64{1} << i;
            u64 place = g * kGroup + i;
            U before = bits[place];
            if constexpr (Relative) {
                U after = step_from<true>(before, step[at]);
                keys.add(place, u64{after} - u64{before}, lanes);
                marks.value[place] = after;
            } else {
                marks.value[place] = before;
            }
        }
        marks.groups |= groups;
        for (int lane = 0; lane < 2; ++lane) marks.digest_delta.sum[lane] += lanes.sum[lane];
        return at;
    }

    template <bool Relative, class U, int K>
    static void select(const Kind& kind, const Runs& runs, const Classes& classes, const Wanted& wanted,
                       Selected& out) {
        const typename V::Bounds bounds(classes);
        const Members<K> members(kind, classes);
        u64 at[K];
        for (int c = 0; c < K; ++c) at[c] = wanted.first[c];
        u32 passed[K] = {};
        Tile<U, K> tile;
        Marks<U> marks;
        pieces<U>(runs, [&](const Piece<U> piece) {
            tile.look(kind, bounds, piece.bits, piece.bits, piece.count);
            const Keys keys(runs.data[piece.run], piece.offset, piece.count);
            const Columns<U, K> columns(tile);
            for (int c = 0; c < classes.count; ++c) {
                at[c] = mark<Relative, U, K>(piece.bits, tile, columns.first[c], keys, members.of[c], c, wanted, at[c],
                                             passed[c], marks);
                passed[c] += tile.totals[c];
            }
            u32* positions = out.position;
            U* values = static_cast<U*>(out.value);
            u64 k = out.count;
            for (u64 groups = marks.groups; groups; groups &= groups - 1) {
                u64 g = lowest_bit(groups) * kGroup;
                k = extract(marks.changed[g / kGroup], k, [=, &marks](u64 to, u32 i) {
                    positions[to] = static_cast<u32>(piece.position + g) + i;
                    values[to] = marks.value[g + i];
                });
                marks.changed[g / kGroup] = 0;
            }
            marks.groups = 0;
            out.count = k;
        });
        out.digest_delta = marks.digest_delta;
    }

    // An 8-byte element counts as two 4-byte ones: `halves` is 2 then, and U is u32.
    template <class U>
    static Lanes digest(const Runs& runs, u64 halves = 1) {
        Lanes lanes;
        for (u64 r = 0; r < runs.size; ++r) {
            const Run& run = runs.data[r];
            const U* p = reinterpret_cast<const U*>(run.bits);
            u64 count = run.count * halves;
            for (u64 at = 0; at < count;) {
                u64 index = run.index * halves + at, column = index & (kColumns - 1);
                u64 n = kColumns - column < count - at ? kColumns - column : count - at;
                u64 sums[2];
                V::weigh(p + at, n, column, sums);
                for (int lane = 0; lane < 2; ++lane) lanes.sum[lane] += row_key(run, lane, index >> 10) * sums[lane];
                at += n;
            }
        }
        return lanes;
    }
};

template <class V>
struct Entry {
    using S = Scan<V>;

    static u64 detect(const Kind& kind, const Runs& before, const Runs& after, u32* positions, void* values) {
        return by_width(kind, [&]<class U>(U) { return S::detect(before, after, positions, static_cast<U*>(values)); });
    }

    template <class U, class Call>
    static auto by_classes(const Classes& classes, Call&& call) {
        if (classes.count <= 4) return call.template operator()<U, 4>();
        if (classes.count <= 7) return call.template operator()<U, 7>();
        if (classes.count <= 10) return call.template operator()<U, 10>();
        if (classes.count <= 13) return call.template operator()<U, 13>();
        return call.template operator()<U, 16>();
    }

    template <class Call>
    static auto by_kind(const Kind& kind, const Classes& classes, Call&& call) {
        return by_float_width(kind, [&]<class U>(U) { return by_classes<U>(classes, call); });
    }

    static Lanes rank(const Kind& kind, const Runs& runs, const Classes& classes, const Changed& changed,
                      const Ranked& out) {
        return by_kind(kind, classes,
                       [&]<class U, int K>() { return S::template rank<U, K>(kind, runs, classes, changed, out); });
    }

    static u64 find(const Kind& kind, const Runs& before, const Runs& after, const Classes& classes, u32* positions,
                    void* values, const Ranked& out, Standing& standing) {
        return by_kind(kind, classes, [&]<class U, int K>() {
            return S::template find<U, K>(kind, before, after, classes, positions, static_cast<U*>(values), out,
                                          standing);
        });
    }

    static void select(const Kind& kind, const Runs& runs, const Classes& classes, const Wanted& wanted,
                       Selected& out) {
        by_kind(kind, classes, [&]<class U, int K>() {
            if (wanted.step)
                S::template select<true, U, K>(kind, runs, classes, wanted, out);
            else
                S::template select<false, U, K>(kind, runs, classes, wanted, out);
        });
    }

    static Lanes digest(const Kind& kind, const Runs& runs) {
        return by_width(kind, [&]<class U>(U) {
            if constexpr (sizeof(U) == 8)
                return S::template digest<u32>(runs, 2);
            else
                return S::template digest<U>(runs);
        });
    }

    static void split(const Kind& kind, const void* elements, u64 count, int byte, u8* plane) {
        by_width(kind, [&]<class U>(U) {
            const U* from = static_cast<const U*>(elements);
            if (kind.is_float())
                split_plane<true>(from, count, 8 * byte, plane);
            else
                split_plane<false>(from, count, 8 * byte, plane);
        });
    }

    static void join(const Kind& kind, const u8* high, const u8* low, u64 count, int pair, void* elements) {
        bool first = pair == 0, last = 2 * (pair + 1) >= kind.width;
        by_width(kind, [&]<class U>(U) {
            U* to = static_cast<U*>(elements);
            if (!last)
                first ? join_planes<true, false, false>(high, low, count, to)
                      : join_planes<false, false, false>(high, low, count, to);
            else if (kind.is_float())
                first ? join_planes<true, true, true>(high, low, count, to)
                      : join_planes<false, true, true>(high, low, count, to);
            else
                first ? join_planes<true, true, false>(high, low, count, to)
                      : join_planes<false, true, false>(high, low, count, to);
        });
    }

    static constexpr Isa table(const char* name) {
        return {name,   detect,         S::detect_rounded, rank,  find, select,
                digest, V::decode_rows, V::encode_rows,    split, join};
    }
};

}  // namespace
}  // namespace deltasync
