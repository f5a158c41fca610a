// The Python face of walks. Signatures: src/anyshard/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "array.h"
#include "walk.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace anyshard {
namespace {

template <typename Number>
using Numbers = nb::ndarray<Number, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require_size(size_t size, size_t least, const char* name) {
  require(size >= least, std::string(name) + " has " + std::to_string(size) + " entries; " +
                             std::to_string(least) + " are needed");
}

void init_exchange(Exchange* self, const Gather& gather, const Numbers<uint32_t>& step,
                   const Numbers<uint32_t>& even_sizes, const Numbers<uint32_t>& odd_sizes,
                   const std::vector<int64_t>& places,
                   const nb::ndarray<int64_t, nb::numpy, nb::shape<2>, nb::device::cpu>& sent,
                   int64_t row_floats, int64_t row_wire, int64_t capacity_floats, int64_t messages,
                   int tp_rank, int64_t slice_us) {
  require_size(step.size(), 1, "step");
  require(0 <= tp_rank && static_cast<size_t>(tp_rank) < places.size(), "there is no such tp rank");
  for (const int64_t place : places) {
    require(place >= 0, "a place is negative");
    require_size(std::min(even_sizes.size(), odd_sizes.size()), static_cast<size_t>(place) + 1,
                 "sizes");
  }
  new (self) Exchange(gather,
                      {step.data(),
                       {even_sizes.data(), odd_sizes.data()},
                       places,
                       sent.data(),
                       sent.data() + sent.stride(0)},
                      {row_floats, row_wire, capacity_floats, messages, tp_rank}, slice_us);
}

// A tuple: what is in it stays.
void init_walk(Walk* self, const nb::tuple& calls, const Numbers<uint64_t>& operations) {
  require_size(operations.size(), 1, "operations");
  std::vector<Bound*> bound;
  for (const nb::handle call : calls) bound.push_back(&nb::cast<Bound&>(call));
  new (self) Walk(std::move(bound), operations.data());
}

void heed(Walk& self, const Numbers<uint32_t>& words, const Numbers<uint32_t>& now) {
  require_size(now.size(), 2, "now");
  self.heed({words.data(), words.size(), now.data()});
}

}  // namespace
}  // namespace anyshard

void bind_bound(nb::module_& m) {
  using namespace anyshard;
  nb::class_<Bound>(m, "Bound");
  nb::class_<Op, Bound>(m, "Op").def("run", &Op::run, "rows"_a,
                                     nb::call_guard<nb::gil_scoped_release>());
}

void bind_walk(nb::module_& m) {
  using namespace anyshard;
  nb::class_<Exchange, Bound>(m, "Exchange")
      .def("__init__", &init_exchange, "gather"_a, "step"_a.noconvert(), "even_sizes"_a.noconvert(),
           "odd_sizes"_a.noconvert(), "places"_a, "sent"_a.noconvert(), "row_floats"_a,
           "row_wire"_a, "capacity_floats"_a, "messages"_a, "tp_rank"_a, "slice_us"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>(), nb::keep_alive<1, 7>());
  nb::class_<Walk>(m, "Walk")
      .def("__init__", &init_walk, "calls"_a, "operations"_a.noconvert(), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>())
      .def("run", &Walk::run, "rows"_a, "first"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("heed", &heed, "words"_a.noconvert(), "now"_a.noconvert(), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>())
      .def_prop_ro("status", &Walk::status);
}
