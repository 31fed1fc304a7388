// The binding: checks what comes from Python, releases the GIL, and turns results into NumPy arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string_view>

#include "changes.hpp"
#include "detect.hpp"
#include "planes.hpp"

namespace nb = nanobind;
using namespace deltasync;

namespace {

using Array = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Positions = nb::ndarray<const u32, nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RunTable = nb::ndarray<const i64, nb::ro, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using KeyTable = nb::ndarray<const u64, nb::ro, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

std::vector<const Isa*> instruction_sets() {
    std::vector<const Isa*> found;
    for (const Isa* isa : {avx512_isa(), avx2_isa(), portable_isa()})
        if (isa) found.push_back(isa);
    return found;
}

const Isa& isa_named(std::string_view name) {
    for (const Isa* isa : instruction_sets())
        if (isa->name == name) return *isa;
    throw nb::value_error("no such instruction set here");
}

Kind kind_of(int width, int exponent_shift, u32 exponent_mask) {
    if (width != 1 && width != 2 && width != 4 && width != 8) throw nb::value_error("elements have 1, 2, 4 or 8 bytes");
    if (exponent_mask > 255 || exponent_shift < 0 || exponent_shift >= 8 * width || (width == 8 && exponent_mask))
        throw nb::value_error("no such element type");
    return {width, exponent_shift, exponent_mask};
}

void require_elements(const Array& array, int width) {
    if (array.itemsize() != static_cast<std::size_t>(width)) throw nb::value_error("an array has another element size");
    if (reinterpret_cast<std::uintptr_t>(array.data()) % static_cast<unsigned>(width))
        throw nb::value_error("an array is not aligned");
}

// A region of Python's side: keeps the run table; the caller keeps the arrays alive.
class Region {
public:
    Region(const Kind& kind, nb::tuple arrays, RunTable runs, KeyTable keys) {
        if (runs.shape(0) != keys.shape(0)) throw nb::value_error("runs and keys have different lengths");
        std::vector<Array> views;
        for (nb::handle h : arrays) {
            views.push_back(nb::cast<Array>(h));
            require_elements(views.back(), kind.width);
        }
        runs_.reserve(runs.shape(0));
        for (std::size_t i = 0; i < runs.shape(0); ++i) {
            i64 array = runs(i, 0), offset = runs(i, 1), count = runs(i, 2);
            if (array < 0 || static_cast<std::size_t>(array) >= views.size() || offset < 0 || count < 0)
                throw nb::value_error("a run names no array");
            const Array& view = views[static_cast<std::size_t>(array)];
            u64 size = view.shape(0);
            if (static_cast<u64>(offset) > size || static_cast<u64>(count) > size - static_cast<u64>(offset))
                throw nb::value_error("a run is outside of its array");
            u8* bits = const_cast<u8*>(static_cast<const u8*>(view.data())) + offset * kind.width;
            runs_.push_back({bits, static_cast<u64>(count), {keys(i, 0), keys(i, 1)}, keys(i, 2)});
            elements_ += static_cast<u64>(count);
            if (elements_ > kBlockElementsMax) throw nb::value_error("a region has more elements than a block may");
        }
    }

    bool same_shape(const Region& other) const {
        return std::equal(runs_.begin(), runs_.end(), other.runs_.begin(), other.runs_.end(),
                          [](const Run& a, const Run& b) { return a.count == b.count; });
    }

    Runs runs() const { return {runs_.data(), runs_.size(), elements_}; }
    u64 elements() const { return elements_; }

private:
    std::vector<Run> runs_;
    u64 elements_ = 0;
};

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T>&& data) {
    auto* kept = new std::vector<T>(std::move(data));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return {kept->data(), {kept->size()}, owner};
}

nb::bytes to_bytes(const Bytes& data) { return nb::bytes(data.data(), data.size()); }

nb::tuple to_tuple(const Lanes& lanes) { return nb::make_tuple(lanes.sum[0], lanes.sum[1]); }

std::span<const u32> span_of(const Positions& p) { return {p.data(), p.shape(0)}; }

void require_pairs(const Kind& kind, const Positions& positions, const Array& values) {
    require_elements(values, kind.width);
    if (positions.shape(0) != values.shape(0)) throw Invalid{"changes.length", "positions and values differ in number"};
}

void require_twins(const Region& before, const Region& after, u64 start, u64 cell) {
    if (!before.same_shape(after)) throw nb::value_error("the two regions have different runs");
    if (start > before.elements() || cell == 0) throw nb::value_error("no such stretch");
}

nb::tuple py_detect(const std::string& isa, Kind kind, const Region& before, const Region& after, u64 start, u64 cell,
                    u64 enough) {
    const Isa& chosen = isa_named(isa);
    require_twins(before, after, start, cell);
    Detected found;
    {
        nb::gil_scoped_release release;
        found = detect(chosen, kind, before.runs(), after.runs(), start, cell, enough);
    }
    return nb::make_tuple(to_numpy(std::move(found.positions)), to_numpy(std::move(found.values)), found.stop);
}

nb::tuple py_detect_rounded(const std::string& isa, const Region& before, const Region& after, u64 start, u64 cell,
                            u64 enough, u16 nan) {
    const Isa& chosen = isa_named(isa);
    require_twins(before, after, start, cell);
    Detected found;
    {
        nb::gil_scoped_release release;
        found = detect_rounded(chosen, before.runs(), after.runs(), start, cell, enough, nan);
    }
    return nb::make_tuple(to_numpy(std::move(found.positions)), to_numpy(std::move(found.values)), found.stop);
}

nb::tuple py_encode_changes(const std::string& isa, Kind kind, const Region& before, Positions positions,
                            Array values) {
    require_pairs(kind, positions, values);
    const Isa& chosen = isa_named(isa);
    Encoded result;
    {
        nb::gil_scoped_release release;
        result = encode_changes(chosen, kind, before.runs(), span_of(positions), values.data());
    }
    return nb::make_tuple(result.absolute, to_bytes(result.data), to_tuple(result.gained));
}

nb::tuple py_encode_difference(const std::string& isa, Kind kind, const Region& before, const Region& after, u64 start,
                               u64 cell, u64 enough) {
    const Isa& chosen = isa_named(isa);
    require_twins(before, after, start, cell);
    Difference found;
    {
        nb::gil_scoped_release release;
        found = encode_difference(chosen, kind, before.runs(), after.runs(), start, cell, enough);
    }
    const Encoded& block = found.block;
    return nb::make_tuple(found.changed, found.stop, block.absolute, to_bytes(block.data), to_tuple(block.gained));
}

nb::tuple py_decode_changes(const std::string& isa, Kind kind, const Region& before, nb::bytes data, bool absolute) {
    const Isa& chosen = isa_named(isa);
    std::span<const u8> bytes(static_cast<const u8*>(data.data()), data.size());
    Decoded result;
    {
        nb::gil_scoped_release release;
        result = decode_changes(chosen, kind, before.runs(), bytes, absolute);
    }
    return nb::make_tuple(to_numpy(std::move(result.positions)), to_numpy(std::move(result.values)),
                          to_tuple(result.gained));
}

nb::bytes py_encode_planes(Kind kind, const Region& region) {
    Bytes out;
    {
        nb::gil_scoped_release release;
        encode_planes(out, kind, region.runs());
    }
    return to_bytes(out);
}

nb::ndarray<nb::numpy, u8, nb::ndim<1>> py_decode_planes(Kind kind, nb::bytes data, u64 elements) {
    if (elements > kBlockElementsMax) throw nb::value_error("a region has more elements than a block may");
    Bytes values(elements * static_cast<u64>(kind.width));
    {
        nb::gil_scoped_release release;
        ByteReader in({static_cast<const u8*>(data.data()), data.size()});
        decode_planes(in, kind, elements, values.data());
        in.require_end();
    }
    return to_numpy(std::move(values));
}

nb::tuple py_digest(const std::string& isa, Kind kind, const Region& region) {
    const Isa& chosen = isa_named(isa);
    Lanes lanes;
    {
        nb::gil_scoped_release release;
        lanes = chosen.digest(kind.width, region.runs());
    }
    return to_tuple(lanes);
}

nb::tuple py_digest_change(Kind kind, const Region& before, Positions positions, Array values) {
    require_pairs(kind, positions, values);
    Lanes lanes;
    {
        nb::gil_scoped_release release;
        lanes = digest_change(kind, before.runs(), span_of(positions), values.data());
    }
    return to_tuple(lanes);
}

void py_overwrite(Kind kind, const Region& target, Positions positions, Array values) {
    require_pairs(kind, positions, values);
    nb::gil_scoped_release release;
    overwrite(kind, target.runs(), span_of(positions), values.data());
}

// Python sees one exception type for each of the two C++ ones, with (rule, message) as its arguments.
template <class Thrown>
void translate(nb::module_& m, const char* name) {
    nb::object type = nb::steal(
        PyErr_NewException((std::string("deltasync.kernels._native.") + name).c_str(), PyExc_ValueError, nullptr));
    m.attr(name) = type;
    nb::register_exception_translator(
        [](const std::exception_ptr& p, void* payload) {
            try {
                std::rethrow_exception(p);
            } catch (const Thrown& e) {
                nb::tuple args = nb::make_tuple(e.rule, e.message.c_str());
                PyErr_SetObject(static_cast<PyObject*>(payload), args.ptr());
            }
        },
        type.ptr());
}

}  // namespace

NB_MODULE(_native, m) {
    translate<Corrupt>(m, "Corrupt");
    translate<Invalid>(m, "Invalid");
    m.def("instruction_sets", [] {
        nb::list names;
        for (const Isa* isa : instruction_sets()) names.append(isa->name);
        return names;
    });
    nb::class_<Kind>(m, "Kind").def(nb::new_(&kind_of), nb::arg("width"), nb::arg("exponent_shift"),
                                    nb::arg("exponent_mask"));
    nb::class_<Region>(m, "Region").def(nb::init<const Kind&, nb::tuple, RunTable, KeyTable>());
    m.def("detect", &py_detect);
    m.def("detect_rounded", &py_detect_rounded);
    m.def("encode_changes", &py_encode_changes);
    m.def("encode_difference", &py_encode_difference);
    m.def("decode_changes", &py_decode_changes);
    m.def("encode_planes", &py_encode_planes);
    m.def("decode_planes", &py_decode_planes);
    m.def("digest", &py_digest);
    m.def("digest_change", &py_digest_change);
    m.def("overwrite", &py_overwrite);
}
