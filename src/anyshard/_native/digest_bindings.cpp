// The Python face of the digest ops. Signatures: src/anyshard/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings.h"
#include "digest_op.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

void panels_digest(anyshard::Pool& pool, nb::object panels, nb::object keys, int64_t num_inputs,
                   nb::object out) {
  anyshard::DigestPanels op(pool, panels.ptr(), keys.ptr(), num_inputs, out.ptr());
  const nb::gil_scoped_release release;
  op.run();
}

}  // namespace

void bind_digest(nb::module_& m) {
  using namespace anyshard;
  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Digest, Op>(m, "Digest")
      .def(
          "__init__",
          [](Digest* self, Pool& pool, const std::vector<nb::object>& sources,
             const std::vector<int64_t>& firsts, const std::vector<int64_t>& columns,
             nb::object keys, nb::object out) {
            new (self) Digest(pool, pointers_of(sources), firsts, columns, keys.ptr(), out.ptr());
          },
          "pool"_a, "sources"_a, "firsts"_a, "columns"_a, "keys"_a, "out"_a,
          nb::keep_alive<1, 2>());
  nb::class_<DigestKv, Op>(m, "DigestKv")
      .def(
          "__init__",
          [](DigestKv* self, Pool& pool, nb::object k_cache, nb::object v_cache,
             nb::object page_table, nb::object row_slot, nb::object positions, int64_t first_head,
             int64_t stop_head, int64_t first, int64_t column, nb::object keys, nb::object out,
             int64_t first_stripe, int64_t stop_stripe) {
            new (self)
                DigestKv(pool, {k_cache.ptr(), v_cache.ptr(), page_table.ptr(), row_slot.ptr(),
                                positions.ptr(), first_head, stop_head, first, column, keys.ptr(),
                                out.ptr(), first_stripe, stop_stripe});
          },
          "pool"_a, "k_cache"_a, "v_cache"_a, "page_table"_a, "row_slot"_a, "positions"_a,
          "first_head"_a, "stop_head"_a, "first"_a, "column"_a, "keys"_a, "out"_a,
          "first_stripe"_a = 0, "stop_stripe"_a = kStripes, nb::keep_alive<1, 2>());
  m.def("digest_panels", &panels_digest, "pool"_a, "panels"_a, "keys"_a, "num_inputs"_a, "out"_a);
}
