// The binding: checks what comes from Python, releases the GIL, and turns results into NumPy arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <type_traits>

#include "changes.hpp"
#include "detect.hpp"
#include "planes.hpp"

namespace nb = nanobind;
using namespace deltasync;

namespace {

using Array = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableArray = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Positions = nb::ndarray<const u32, nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Data = nb::ndarray<const u8, nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RunTable = nb::ndarray<const i64, nb::ro, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using KeyTable = nb::ndarray<const u64, nb::ro, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

std::vector<const Isa*> instruction_sets() {
    std::vector<const Isa*> found;
    for (const Isa* isa : {avx2_isa(), portable_isa()})
        if (isa) found.push_back(isa);
    return found;
}

const Isa& isa_named(std::string_view name) {
    for (const Isa* isa : instruction_sets())
        if (isa->name == name) return *isa;
    throw nb::value_error("this build or this machine does not have the instruction set");
}

Kind kind_of(int width, int exponent_shift, u32 exponent_mask) {
    if (width != 1 && width != 2 && width != 4 && width != 8)
        throw nb::value_error("an element must have 1, 2, 4 or 8 bytes");
    if (exponent_mask > 255 || exponent_shift < 0 || exponent_shift >= 8 * width || (width == 8 && exponent_mask))
        throw nb::value_error("the exponent must have at most 8 bits, inside an element of at most 4 bytes");
    return {width, exponent_shift, exponent_mask};
}

template <class AnyArray>
void require_elements(const AnyArray& array, const Kind& kind) {
    if (array.itemsize() != static_cast<std::size_t>(kind.width))
        throw nb::value_error("the elements of an array must be as wide as those of the element type");
    if (reinterpret_cast<std::uintptr_t>(array.data()) % static_cast<unsigned>(kind.width))
        throw nb::value_error("an array must be aligned to its elements");
}

// The arrays of a region. Holding them keeps their memory where it is for as long as the region lives.
template <class AnyArray>
class Arrays {
public:
    Arrays(const Kind& kind, const nb::tuple& arrays) : width_(static_cast<u64>(kind.width)) {
        for (nb::handle h : arrays) {
            AnyArray array;
            // A converted copy would not do: what is written to it would be lost.
            if (!nb::try_cast(h, array, /*convert=*/false))
                throw nb::value_error(kReadOnly ? "an array must be flat and contiguous"
                                                : "an array must be flat, contiguous and writable");
            require_elements(array, kind);
            arrays_.push_back(std::move(array));
        }
    }

    // Calls each(row, bits, count) for each row of the table, with where its elements begin and how many there are.
    // Gives how many there are in all rows.
    template <class Each>
    u64 each_run(const RunTable& runs, Each&& each) const {
        u64 elements = 0;
        for (std::size_t row = 0; row < runs.shape(0); ++row) {
            i64 array = runs(row, 0), offset = runs(row, 1), count = runs(row, 2);
            if (array < 0 || static_cast<std::size_t>(array) >= arrays_.size() || offset < 0 || count < 0)
                throw nb::value_error("a run must name an array of its region");
            const AnyArray& from = arrays_[static_cast<std::size_t>(array)];
            u64 first = static_cast<u64>(offset), size = from.shape(0);
            if (first > size || static_cast<u64>(count) > size - first)
                throw nb::value_error("a run must be inside of its array");
            each(row, static_cast<Byte*>(from.data()) + first * width_, static_cast<u64>(count));
            elements += static_cast<u64>(count);
            if (elements > kBlockElementsMax) throw nb::value_error("a region must not exceed the elements of a block");
        }
        return elements;
    }

private:
    static constexpr bool kReadOnly = std::is_const_v<typename AnyArray::Scalar>;
    using Byte = std::conditional_t<kReadOnly, const u8, u8>;

    std::vector<AnyArray> arrays_;
    u64 width_;
};

// The elements of a block, to read.
class Region {
public:
    Region(const Kind& kind, const nb::tuple& arrays, const RunTable& runs, const KeyTable& keys)
        : kind_(kind), arrays_(kind, arrays) {
        if (runs.shape(0) != keys.shape(0)) throw nb::value_error("a region must have as many keys as runs");
        runs_.reserve(runs.shape(0));
        elements_ = arrays_.each_run(runs, [&](std::size_t row, const u8* bits, u64 count) {
            runs_.push_back({bits, count, {keys(row, 0), keys(row, 1)}, keys(row, 2)});
        });
    }

    bool same_shape(const Region& other) const {
        return std::equal(runs_.begin(), runs_.end(), other.runs_.begin(), other.runs_.end(),
                          [](const Run& a, const Run& b) { return a.count == b.count; });
    }

    const Kind& kind() const { return kind_; }
    Runs runs() const { return {runs_.data(), runs_.size(), elements_}; }
    u64 elements() const { return elements_; }

private:
    Kind kind_;
    Arrays<Array> arrays_;
    std::vector<Run> runs_;
    u64 elements_ = 0;
};

// The elements of a block, to overwrite.
class WritableRegion {
public:
    WritableRegion(const Kind& kind, const nb::tuple& arrays, const RunTable& runs)
        : kind_(kind), arrays_(kind, arrays) {
        runs_.reserve(runs.shape(0));
        arrays_.each_run(runs, [&](std::size_t, u8* bits, u64 count) { runs_.push_back({bits, count}); });
    }

    const Kind& kind() const { return kind_; }
    std::span<const WritableRun> runs() const { return runs_; }

private:
    Kind kind_;
    Arrays<WritableArray> arrays_;
    std::vector<WritableRun> runs_;
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

std::span<const u8> span_of(const Data& d) { return {d.data(), d.shape(0)}; }

void require_pairs(const Kind& kind, const Positions& positions, const Array& values) {
    require_elements(values, kind);
    if (positions.shape(0) != values.shape(0)) throw Invalid{"changes.length", "positions and values differ in number"};
}

void require_twins(const Region& before, const Region& after, u64 start, u64 cell) {
    if (!before.same_shape(after)) throw nb::value_error("two regions must have runs of the same lengths");
    if (start > before.elements()) throw nb::value_error("the start must not be past the end of the region");
    if (cell == 0) throw nb::value_error("a cell must have at least 1 element");
}

void require_widths(const Region& before, int width, const Region& after, int after_width) {
    if (before.kind().width != width || after.kind().width != after_width)
        throw nb::value_error("a region must have elements of the width that the kernel compares");
}

// Runs a kernel without the GIL. The caller holds everything that the kernel reads.
template <class Kernel>
auto without_gil(Kernel&& kernel) {
    nb::gil_scoped_release release;
    return kernel();
}

nb::tuple to_tuple(Detected&& found) {
    return nb::make_tuple(to_numpy(std::move(found.positions)), to_numpy(std::move(found.values)), found.stop);
}

nb::tuple py_detect(const std::string& name, const Region& before, const Region& after, u64 start, u64 cell,
                    u64 enough) {
    const Isa& isa = isa_named(name);
    const Kind& kind = before.kind();
    require_twins(before, after, start, cell);
    require_widths(before, kind.width, after, kind.width);
    return to_tuple(without_gil([&] { return detect(isa, kind, before.runs(), after.runs(), start, cell, enough); }));
}

nb::tuple py_detect_rounded(const std::string& name, const Region& before, const Region& after, u64 start, u64 cell,
                            u64 enough, u16 nan) {
    const Isa& isa = isa_named(name);
    require_twins(before, after, start, cell);
    require_widths(before, kBfloat16.width, after, kFloat32.width);
    return to_tuple(
        without_gil([&] { return detect_rounded(isa, before.runs(), after.runs(), start, cell, enough, nan); }));
}

nb::tuple py_encode_changes(const std::string& name, const Region& before, const Positions& positions,
                            const Array& values) {
    const Isa& isa = isa_named(name);
    require_pairs(before.kind(), positions, values);
    Encoded block = without_gil(
        [&] { return encode_changes(isa, before.kind(), before.runs(), span_of(positions), values.data()); });
    return nb::make_tuple(block.absolute, to_bytes(block.data), to_tuple(block.digest_delta));
}

nb::tuple py_encode_difference(const std::string& name, const Region& before, const Region& after, u64 start, u64 cell,
                               u64 enough) {
    const Isa& isa = isa_named(name);
    const Kind& kind = before.kind();
    require_twins(before, after, start, cell);
    require_widths(before, kind.width, after, kind.width);
    Difference difference =
        without_gil([&] { return encode_difference(isa, kind, before.runs(), after.runs(), start, cell, enough); });
    const Encoded& block = difference.block;
    return nb::make_tuple(difference.changed, difference.stop, block.absolute, to_bytes(block.data),
                          to_tuple(block.digest_delta));
}

nb::tuple py_decode_changes(const std::string& name, const Region& before, const Data& data, bool absolute) {
    const Isa& isa = isa_named(name);
    Decoded changes =
        without_gil([&] { return decode_changes(isa, before.kind(), before.runs(), span_of(data), absolute); });
    return nb::make_tuple(to_numpy(std::move(changes.positions)), to_numpy(std::move(changes.values)),
                          to_tuple(changes.digest_delta));
}

nb::bytes py_encode_planes(const std::string& name, const Region& region) {
    const Isa& isa = isa_named(name);
    EncodedPlanes planes = without_gil([&] { return EncodedPlanes(region.kind(), region.runs(), isa); });
    // Written in place: most bytes stay as they are, and a copy would take about as long as coding the others.
    nb::object data = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(planes.size())));
    if (!data.is_valid()) throw nb::python_error();
    u8* to = reinterpret_cast<u8*>(PyBytes_AsString(data.ptr()));
    without_gil([&] { planes.write(to); });
    return nb::borrow<nb::bytes>(data);
}

nb::ndarray<nb::numpy, u8, nb::ndim<1>> py_decode_planes(const std::string& name, const Kind& kind, const Data& data,
                                                         u64 elements) {
    const Isa& isa = isa_named(name);
    if (elements > kBlockElementsMax) throw nb::value_error("a region must not exceed the elements of a block");
    u64 bytes = elements * static_cast<u64>(kind.width);
    auto values = std::make_unique_for_overwrite<u8[]>(bytes);
    without_gil([&] {
        ByteReader in(span_of(data));
        decode_planes(in, kind, elements, values.get(), isa);
        in.require_end();
    });
    nb::capsule owner(values.get(), [](void* p) noexcept { delete[] static_cast<u8*>(p); });
    return {values.release(), {bytes}, owner};
}

// `same` has the elements of `target`, to read.
nb::tuple py_decode_planes_into(const std::string& name, const Data& data, const WritableRegion& target,
                                const Region& same) {
    const Isa& isa = isa_named(name);
    auto is_same = [](const WritableRun& a, const Run& b) { return a.bits == b.bits && a.count == b.count; };
    std::span<const WritableRun> to = target.runs();
    std::span<const Run> from = same.runs().span();
    if (target.kind().width != same.kind().width ||
        !std::equal(to.begin(), to.end(), from.begin(), from.end(), is_same))
        throw nb::value_error("two regions must have the same elements");
    return to_tuple(without_gil([&] {
        ByteReader in(span_of(data));
        Lanes lanes = decode_planes_into(in, target.kind(), to, same.runs(), isa);
        in.require_end();
        return lanes;
    }));
}

nb::tuple py_digest(const std::string& name, const Region& region) {
    const Isa& isa = isa_named(name);
    return to_tuple(without_gil([&] { return isa.digest(region.kind(), region.runs()); }));
}

nb::tuple py_digest_change(const Region& before, const Positions& positions, const Array& values) {
    require_pairs(before.kind(), positions, values);
    return to_tuple(
        without_gil([&] { return digest_change(before.kind(), before.runs(), span_of(positions), values.data()); }));
}

void py_overwrite(const WritableRegion& target, const Positions& positions, const Array& values) {
    require_pairs(target.kind(), positions, values);
    without_gil([&] { overwrite(target.kind(), target.runs(), span_of(positions), values.data()); });
}

nb::dict constants() {
    nb::dict all;
    all["block_elements_max"] = kBlockElementsMax;
    all["classes_max"] = kClassesMax;
    all["lanes_log2_max"] = kLanesLog2Max;
    all["varint_bytes_max"] = kVarintBytesMax;
    all["precision"] = kPrecision;
    all["state_min"] = kStateMin;
    all["exact"] = kExact;
    all["buckets_max"] = kBucketsMax;
    all["columns"] = kColumns;
    all["classes_wanted"] = kClassesWanted;
    all["class_cost_bits"] = kClassCostBits;
    all["elements_all_below"] = kElementsAllBelow;
    all["changes_all_below"] = kChangesAllBelow;
    all["sample_run"] = kSampleRun;
    all["sample_scale"] = kSampleScale;
    all["step_bits_wide"] = kStepBitsWide;
    return all;
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
    nb::class_<Region>(m, "Region")
        .def(nb::init<const Kind&, nb::tuple, RunTable, KeyTable>(), nb::arg("kind"), nb::arg("arrays"),
             nb::arg("runs"), nb::arg("keys"));
    nb::class_<WritableRegion>(m, "WritableRegion")
        .def(nb::init<const Kind&, nb::tuple, RunTable>(), nb::arg("kind"), nb::arg("arrays"), nb::arg("runs"));
    m.attr("CONSTANTS") = constants();
    m.def("detect", &py_detect);
    m.def("detect_rounded", &py_detect_rounded);
    m.def("encode_changes", &py_encode_changes);
    m.def("encode_difference", &py_encode_difference);
    m.def("decode_changes", &py_decode_changes);
    m.def("encode_planes", &py_encode_planes);
    m.def("decode_planes", &py_decode_planes);
    m.def("decode_planes_into", &py_decode_planes_into);
    m.def("digest", &py_digest);
    m.def("digest_change", &py_digest_change);
    m.def("overwrite", &py_overwrite);
}
