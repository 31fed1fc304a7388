// Working memory of the kernels: the only kind there is.
#pragma once

#include <memory>

#include "types.hpp"

namespace deltasync {

// An array whose elements are not initialized: pages that nothing is written to never take memory.
template <class T>
class Scratch {
public:
    Scratch() = default;
    explicit Scratch(u64 size) { reserve(size); }

    // Room for at least `size` elements. The old ones are lost if there was less.
    T* reserve(u64 size) {
        if (size > size_) {
            data_ = std::make_unique_for_overwrite<T[]>(size);
            size_ = size;
        }
        return data_.get();
    }

    T* get() const { return data_.get(); }
    T& operator[](u64 i) const { return data_[i]; }

private:
    std::unique_ptr<T[]> data_;
    u64 size_ = 0;
};

// Lists of changed elements with room for the worst case. Bits have the width of the element type, so those lists are
// measured in bytes. Each list knows its own size: element types of different widths take turns.
struct ChangeLists {
    Scratch<u32> position, rank;
    Scratch<u8> member, value, before;
};

// Room of this thread for the entropy coder, kept for the same reason: for a plane of bytes, and for words.
struct CoderRoom {
    Scratch<u8> plane;
    Scratch<u16> words;
};

inline CoderRoom& thread_coder_room() {
    thread_local CoderRoom room;
    return room;
}

// The lists of this thread, which are kept from call to call: fresh pages would cost more than a comparison. Only one
// function may use a list at a time. `detect` and `choose_early` use `position` and `value`, and only until they
// return.
inline ChangeLists& thread_lists() {
    thread_local ChangeLists lists;
    return lists;
}

}  // namespace deltasync
