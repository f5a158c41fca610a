// The ops that hash what a step has written (kernel: digest.h), and their Python face.
//
// `out` [R, P] of uint64 has a row for each row of the step and a column for each digest point of a
// rank; an op fills its own columns. `keys`, int32, is the table of ops/digest.py: key i for
// absolute index i, kLanes more than are used.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <climits>
#include <deque>
#include <vector>

#include "ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace anyshard {
namespace {

constexpr int64_t kAloneFloats = 65536;  // hashed sooner than another thread wakes up

// Places in arrays are checked once, here.
void check_place(const char* what, int64_t value, int64_t limit) {
  require(value >= 0 && value < limit, std::string(what) + " is " + std::to_string(value) +
                                           "; 0 to " + std::to_string(limit - 1) + " is possible");
}

void check_span(const Array& keys, int64_t first, int64_t count) {
  require(first >= 0 && count <= INT_MAX && first + count + kLanes <= keys.size(0),
          "keys has " + std::to_string(keys.size(0)) + " entries; " +
              std::to_string(first + count + kLanes) + " are needed");
}

// out[row][columns[i]] = digest of sources[i][row], whose first float is at index firsts[i].
class Digest {
 public:
  Digest(Pool& pool, const std::vector<PyObject*>& sources, const std::vector<int64_t>& firsts,
         const std::vector<int64_t>& columns, PyObject* keys, PyObject* out)
      : pool_(pool),
        keys_(keys, "keys", Element::kInt, {kAny}),
        out_(out, "out", Element::kWord64, {kAny, kAny}, true),
        rows_max_(out_.size(0)) {
    require(sources.size() == firsts.size() && sources.size() == columns.size(),
            "sources, firsts and columns differ in length");
    for (size_t i = 0; i < sources.size(); ++i) {
      parts_.emplace_back(sources[i], firsts[i], columns[i]);
      const Part& part = parts_.back();
      check_place("a column", columns[i], out_.size(1));
      check_span(keys_, part.first, part.source.size(1));
      rows_max_ = std::min(rows_max_, part.source.size(0));
      floats_ += part.source.size(1);
    }
  }

  void run(int rows) {
    check_rows(rows, static_cast<int>(rows_max_));
    const auto work = [&](const Thread& thread, int, int start, int stop) {
      for (int row = start; row < stop; ++row) run_row(thread.kernels, row);
    };
    pool_.run({{rows, pool_.chunk(rows, 1)}}, work, rows * floats_ < kAloneFloats);
  }

 private:
  struct Part {
    Part(PyObject* object, int64_t first_index, int64_t to)
        : source(object, "a source", Element::kFloat, {kAny, kAny}),
          first(first_index),
          column(to) {}
    Array source;
    int64_t first;
    int64_t column;
  };

  void run_row(const Kernels& kernels, int row) const {
    for (const Part& part : parts_) {
      const int64_t width = part.source.size(1);
      out_.writable_words()[row * out_.size(1) + part.column] =
          kernels.digest(part.source.floats() + row * width, static_cast<int>(width),
                         static_cast<uint32_t>(part.first), keys_.ints() + part.first);
    }
  }

  Pool& pool_;
  Array keys_;
  Array out_;
  std::deque<Part> parts_;
  int64_t rows_max_;
  int64_t floats_ = 0;
};

// Keys and values that a step has stored: out[row][column] and [column + 1] = digests of the KV
// heads [first_head, stop_head) of the cache, of which the first is at index `first`.
class DigestKv {
 public:
  struct Arguments {
    PyObject *k_cache, *v_cache, *page_table, *row_slot, *positions;
    int64_t first_head, stop_head, first, column;
    PyObject *keys, *out;
  };
  DigestKv(Pool& pool, const Arguments& a)
      : pool_(pool),
        k_cache_(a.k_cache, "k_cache", Element::kFloat, {kAny, kAny, kAny, kBlock}),
        v_cache_(a.v_cache, "v_cache", Element::kFloat,
                 {k_cache_.size(0), k_cache_.size(1), kBlock, k_cache_.size(2)}),
        keys_(a.keys, "keys", Element::kInt, {kAny}),
        out_(a.out, "out", Element::kWord64, {kAny, kAny}, true),
        paged_(a.page_table, a.row_slot, a.positions, out_.size(0), k_cache_.size(0), INT_MAX),
        first_head_(a.first_head),
        stop_head_(a.stop_head),
        first_(a.first),
        column_(a.column) {
    require(0 <= first_head_ && first_head_ <= stop_head_ && stop_head_ <= k_cache_.size(1),
            "the heads are not of this cache");
    require(k_cache_.size(2) <= kMaxHeadDim, "head_dim is too large");
    check_place("the column of v", column_ + 1, out_.size(1));
    check_span(keys_, first_, (stop_head_ - first_head_) * k_cache_.size(2));
  }

  void run(int rows) {
    check_rows(rows, static_cast<int>(out_.size(0)));
    paged_.check(rows, false);
    const auto work = [&](const Thread& thread, int, int start, int stop) {
      for (int row = start; row < stop; ++row) run_row(thread.kernels, row);
    };
    const int64_t floats = 2 * (stop_head_ - first_head_) * k_cache_.size(2);
    pool_.run({{rows, pool_.chunk(rows, 1)}}, work, rows * floats < kAloneFloats);
  }

 private:
  void run_row(const Kernels& kernels, int row) const {
    const int64_t dim = k_cache_.size(2);
    const int64_t position = paged_.position(row);
    const int64_t page = paged_.pages(row)[position / kBlock];
    const int64_t lane = position % kBlock;
    uint64_t k_sum = 0;
    uint64_t v_sum = 0;
    for (int64_t head = first_head_; head < stop_head_; ++head) {
      const int64_t at = (page * k_cache_.size(1) + head) * dim * kBlock;
      const int64_t index = first_ + (head - first_head_) * dim;
      const int32_t* keys = keys_.ints() + index;
      float k[kMaxHeadDim];
      for (int64_t d = 0; d < dim; ++d) k[d] = k_cache_.floats()[at + d * kBlock + lane];
      k_sum += kernels.digest(k, static_cast<int>(dim), static_cast<uint32_t>(index), keys);
      v_sum += kernels.digest(v_cache_.floats() + at + lane * dim, static_cast<int>(dim),
                              static_cast<uint32_t>(index), keys);
    }
    uint64_t* out = out_.writable_words() + row * out_.size(1) + column_;
    out[0] = k_sum;
    out[1] = v_sum;
  }

  Pool& pool_;
  Array k_cache_;
  Array v_cache_;
  Array keys_;
  Array out_;
  PagedRows paged_;
  int64_t first_head_;
  int64_t stop_head_;
  int64_t first_;
  int64_t column_;
};

// out[n] = digest of output n's inputs, widened, from index 0 on.
void digest_panels(Pool& pool, nb::object panels_object, nb::object keys_object, int64_t num_inputs,
                   nb::object out_object) {
  const Array out(out_object.ptr(), "out", Element::kWord64, {kAny}, true);
  const Array keys(keys_object.ptr(), "keys", Element::kInt, {kAny});
  const Panels panels(panels_object.ptr(), "panels", num_inputs, out.size(0));
  require(out.size(0) <= INT_MAX - kLanes, "too many outputs");
  check_span(keys, 0, num_inputs);
  Linear linear{};
  linear.panels = panels.bytes();
  linear.panel_stride = panels.stride();
  linear.storage = panels.storage();
  linear.num_inputs = static_cast<int>(num_inputs);
  linear.num_outputs = static_cast<int>(out.size(0));
  pool.reserve(0, linear_scratch(linear));
  const nb::gil_scoped_release release;
  const int num_panels = (linear.num_outputs + kLanes - 1) / kLanes;
  const auto work = [&](const Thread& thread, int, int start, int stop) {
    for (int panel = start; panel < stop; ++panel) {
      uint64_t lanes[kLanes];
      thread.kernels.digest_panel(linear, panel, keys.ints(), thread.own, lanes);
      const int count = std::min(kLanes, linear.num_outputs - panel * kLanes);
      std::copy(lanes, lanes + count, out.writable_words() + panel * kLanes);
    }
  };
  pool.run({{num_panels, pool.chunk(num_panels, 2)}}, work);
}

}  // namespace
}  // namespace anyshard

void bind_digest(nb::module_& m) {
  using namespace anyshard;
  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Digest>(m, "Digest")
      .def(
          "__init__",
          [](Digest* self, Pool& pool, const std::vector<nb::object>& sources,
             const std::vector<int64_t>& firsts, const std::vector<int64_t>& columns,
             nb::object keys, nb::object out) {
            std::vector<PyObject*> pointers;
            for (const nb::object& source : sources) pointers.push_back(source.ptr());
            new (self) Digest(pool, pointers, firsts, columns, keys.ptr(), out.ptr());
          },
          "pool"_a, "sources"_a, "firsts"_a, "columns"_a, "keys"_a, "out"_a, nb::keep_alive<1, 2>())
      .def("run", &Digest::run, "rows"_a, NoGil());
  nb::class_<DigestKv>(m, "DigestKv")
      .def(
          "__init__",
          [](DigestKv* self, Pool& pool, nb::object k_cache, nb::object v_cache,
             nb::object page_table, nb::object row_slot, nb::object positions, int64_t first_head,
             int64_t stop_head, int64_t first, int64_t column, nb::object keys, nb::object out) {
            new (self) DigestKv(pool, {k_cache.ptr(), v_cache.ptr(), page_table.ptr(),
                                       row_slot.ptr(), positions.ptr(), first_head, stop_head,
                                       first, column, keys.ptr(), out.ptr()});
          },
          "pool"_a, "k_cache"_a, "v_cache"_a, "page_table"_a, "row_slot"_a, "positions"_a,
          "first_head"_a, "stop_head"_a, "first"_a, "column"_a, "keys"_a, "out"_a,
          nb::keep_alive<1, 2>())
      .def("run", &DigestKv::run, "rows"_a, NoGil());
  m.def("digest_panels", &digest_panels, "pool"_a, "panels"_a, "keys"_a, "num_inputs"_a, "out"_a);
}
