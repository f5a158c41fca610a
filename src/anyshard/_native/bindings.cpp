// The Python face of the native core: module anyshard._native. Signatures:
// src/anyshard/_native.pyi.
#include "bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <utility>

#include "attention_states.h"
#include "ops.h"
#include "pack.h"
#include "pool.h"
#include "wire_op.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_shm(nb::module_& m);     // shm.cpp
void bind_digest(nb::module_& m);  // digest_bindings.cpp
void bind_probe(nb::module_& m);   // probe.cpp
void bind_bound(nb::module_& m);   // walk_bindings.cpp
void bind_walk(nb::module_& m);

namespace anyshard {
namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;

void bind_pool(nb::module_& m) {
  nb::class_<Pool>(m, "Pool")
      .def(nb::init<int, const std::string&, bool>(), "threads"_a, "body"_a, "spin"_a)
      .def("close", &Pool::close, NoGil())
      .def_prop_ro("threads", &Pool::threads)
      .def_prop_ro("body", &Pool::body);
  m.def("available_bodies", &available_bodies);
}

void bind_embed(nb::module_& m) {
  nb::class_<Embed, Op>(m, "Embed")
      .def(
          "__init__",
          [](Embed* self, Pool& pool, nb::object panels, int64_t vocab, nb::object tokens,
             nb::object out) {
            new (self) Embed(pool, panels.ptr(), vocab, tokens.ptr(), out.ptr());
          },
          "pool"_a, "panels"_a.none(), "vocab"_a, "tokens"_a, "out"_a, nb::keep_alive<1, 2>());
}

void bind_qkv(nb::module_& m) {
  nb::class_<Qkv, Op>(m, "Qkv").def(
      "__init__",
      [](Qkv* self, Pool& pool, nb::object x, nb::object norm_weight, double eps,
         nb::object q_panels, nb::object k_panels, nb::object v_panels, nb::object q_bias,
         nb::object k_bias, nb::object v_bias, nb::object q_norm, nb::object k_norm,
         nb::object leaf_lengths, nb::object merges, int head_dim, double q_scale,
         nb::object cosine, nb::object sine, nb::object positions, nb::object q_out,
         nb::object k_cache, nb::object v_cache, nb::object page_table, nb::object row_slot,
         nb::object row_fault, int fault_code, int64_t first_stripe, int64_t stop_stripe) {
        new (self) Qkv(pool, {x.ptr(),          norm_weight.ptr(), eps,
                              q_panels.ptr(),   k_panels.ptr(),    v_panels.ptr(),
                              q_bias.ptr(),     k_bias.ptr(),      v_bias.ptr(),
                              q_norm.ptr(),     k_norm.ptr(),      leaf_lengths.ptr(),
                              merges.ptr(),     head_dim,          q_scale,
                              cosine.ptr(),     sine.ptr(),        positions.ptr(),
                              q_out.ptr(),      k_cache.ptr(),     v_cache.ptr(),
                              page_table.ptr(), row_slot.ptr(),    row_fault.ptr(),
                              fault_code,       first_stripe,      stop_stripe});
      },
      "pool"_a, "x"_a, "norm_weight"_a, "eps"_a, "q_panels"_a.none(), "k_panels"_a.none(),
      "v_panels"_a.none(), "q_bias"_a.none(), "k_bias"_a.none(), "v_bias"_a.none(),
      "q_norm"_a.none(), "k_norm"_a.none(), "leaf_lengths"_a, "merges"_a, "head_dim"_a, "q_scale"_a,
      "cos"_a, "sin"_a, "positions"_a, "q_out"_a, "k_cache"_a, "v_cache"_a, "page_table"_a,
      "row_slot"_a, "row_fault"_a, "fault_code"_a, "first_stripe"_a = 0, "stop_stripe"_a = kStripes,
      nb::keep_alive<1, 2>());
}

void bind_attention(nb::module_& m) {
  nb::class_<Attention, Op>(m, "Attention")
      .def(
          "__init__",
          [](Attention* self, Pool& pool, nb::object q, nb::object k_cache, nb::object v_cache,
             nb::object page_table, nb::object row_slot, nb::object positions, int head_dim,
             nb::object kv_head_of, nb::object out, nb::object row_fault, int fault_code) {
            new (self) Attention(pool, {q.ptr(), k_cache.ptr(), v_cache.ptr(), page_table.ptr(),
                                        row_slot.ptr(), positions.ptr(), head_dim, kv_head_of.ptr(),
                                        out.ptr(), row_fault.ptr(), fault_code});
          },
          "pool"_a, "q"_a, "k_cache"_a, "v_cache"_a, "page_table"_a, "row_slot"_a, "positions"_a,
          "head_dim"_a, "kv_head_of"_a, "out"_a, "row_fault"_a, "fault_code"_a,
          nb::keep_alive<1, 2>());
}

void bind_states(nb::module_& m) {
  nb::class_<AttentionStates, Op>(m, "AttentionStates")
      .def(
          "__init__",
          [](AttentionStates* self, Pool& pool, const std::vector<nb::object>& queries,
             nb::object k_cache, nb::object v_cache, nb::object page_table, nb::object row_slot,
             nb::object positions, int head_dim, nb::object kv_head_of, int64_t first_stripe,
             int64_t stop_stripe, int64_t part_floats, nb::object out) {
            new (self) AttentionStates(
                pool, pointers_of(queries),
                {k_cache.ptr(), v_cache.ptr(), page_table.ptr(), row_slot.ptr(), positions.ptr(),
                 head_dim, kv_head_of.ptr(), first_stripe, stop_stripe, part_floats, out.ptr()});
          },
          "pool"_a, "queries"_a, "k_cache"_a, "v_cache"_a, "page_table"_a, "row_slot"_a,
          "positions"_a, "head_dim"_a, "kv_head_of"_a, "first_stripe"_a, "stop_stripe"_a,
          "part_floats"_a, "out"_a, nb::keep_alive<1, 2>());
  nb::class_<MergeStates, Op>(m, "MergeStates")
      .def(
          "__init__",
          [](MergeStates* self, Pool& pool, const std::vector<nb::object>& sources,
             const std::vector<int64_t>& nodes_per_source, nb::object merges, int64_t mine,
             int64_t part_floats, int head_dim, nb::object out, nb::object row_fault,
             int fault_code) {
            new (self) MergeStates(pool, pointers_of(sources), nodes_per_source,
                                   {merges.ptr(), mine, part_floats, head_dim, out.ptr(),
                                    row_fault.ptr(), fault_code});
          },
          "pool"_a, "sources"_a, "nodes_per_source"_a, "merges"_a, "mine"_a, "part_floats"_a,
          "head_dim"_a, "out"_a, "row_fault"_a, "fault_code"_a, nb::keep_alive<1, 2>());
}

void bind_row_linear(nb::module_& m) {
  nb::class_<RowLinear, Op>(m, "RowLinear")
      .def(
          "__init__",
          [](RowLinear* self, Pool& pool, nb::object a, nb::object panels, int64_t num_outputs,
             nb::object leaf_lengths, nb::object merges, nb::object out) {
            new (self) RowLinear(pool, a.ptr(), panels.ptr(), num_outputs, leaf_lengths.ptr(),
                                 merges.ptr(), out.ptr());
          },
          "pool"_a, "a"_a, "panels"_a.none(), "num_outputs"_a, "leaf_lengths"_a, "merges"_a,
          "out"_a, nb::keep_alive<1, 2>());
}

void bind_reduce(nb::module_& m) {
  nb::class_<Reduce, Op>(m, "Reduce")
      .def(
          "__init__",
          [](Reduce* self, Pool& pool, const std::vector<nb::object>& sources,
             const std::vector<int64_t>& nodes_per_source, nb::object merges, nb::object bias,
             nb::object x, int64_t num_outputs) {
            new (self) Reduce(pool, pointers_of(sources), nodes_per_source, merges.ptr(),
                              bias.ptr(), x.ptr(), num_outputs);
          },
          "pool"_a, "sources"_a, "nodes_per_source"_a, "merges"_a, "bias"_a.none(), "x"_a,
          "num_outputs"_a, nb::keep_alive<1, 2>());
}

void bind_wire(nb::module_& m) {
  nb::class_<RoundWire, Op>(m, "RoundWire")
      .def(
          "__init__",
          [](RoundWire* self, Pool& pool, nb::object x, nb::object wire) {
            new (self) RoundWire(pool, x.ptr(), wire.ptr());
          },
          "pool"_a, "x"_a, "wire"_a.none() = nb::none(), nb::keep_alive<1, 2>());
  nb::class_<DecodeWire, Op>(m, "DecodeWire")
      .def(
          "__init__",
          [](DecodeWire* self, Pool& pool, nb::object wire, nb::object x) {
            new (self) DecodeWire(pool, wire.ptr(), x.ptr());
          },
          "pool"_a, "wire"_a, "x"_a, nb::keep_alive<1, 2>());
}

void bind_gate_up(nb::module_& m) {
  nb::class_<GateUp, Op>(m, "GateUp")
      .def(
          "__init__",
          [](GateUp* self, Pool& pool, nb::object x, nb::object norm_weight, double eps,
             nb::object gate_panels, nb::object up_panels, int64_t num_outputs,
             nb::object gate_bias, nb::object up_bias, nb::object leaf_lengths, nb::object merges,
             nb::object out, nb::object row_fault, int fault_code) {
            new (self)
                GateUp(pool, {x.ptr(), norm_weight.ptr(), eps, gate_panels.ptr(), up_panels.ptr(),
                              num_outputs, gate_bias.ptr(), up_bias.ptr(), leaf_lengths.ptr(),
                              merges.ptr(), out.ptr(), row_fault.ptr(), fault_code});
          },
          "pool"_a, "x"_a, "norm_weight"_a, "eps"_a, "gate_panels"_a.none(), "up_panels"_a.none(),
          "num_outputs"_a, "gate_bias"_a.none(), "up_bias"_a.none(), "leaf_lengths"_a, "merges"_a,
          "out"_a, "row_fault"_a, "fault_code"_a, nb::keep_alive<1, 2>());
}

void bind_head(nb::module_& m) {
  nb::class_<Head, Op>(m, "Head").def(
      "__init__",
      [](Head* self, Pool& pool, nb::object x, nb::object sample_rows, nb::object norm_weight,
         double eps, nb::object panels, int64_t num_outputs, nb::object bias,
         nb::object leaf_lengths, nb::object merges, nb::object out, nb::object row_fault,
         int fault_code) {
        new (self) Head(pool, {x.ptr(), sample_rows.ptr(), norm_weight.ptr(), eps, panels.ptr(),
                               num_outputs, bias.ptr(), leaf_lengths.ptr(), merges.ptr(), out.ptr(),
                               row_fault.ptr(), fault_code});
      },
      "pool"_a, "x"_a, "sample_rows"_a, "norm_weight"_a, "eps"_a, "panels"_a.none(),
      "num_outputs"_a, "bias"_a.none(), "leaf_lengths"_a, "merges"_a, "out"_a, "row_fault"_a,
      "fault_code"_a, nb::keep_alive<1, 2>());
}

nb::tuple argmax(nb::object logits, const std::string& body) {
  const Array array(logits.ptr(), "logits", Element::kFloat, {kAny});
  require(array.size(0) >= 1 && array.size(0) <= INT_MAX - 64, "logits is empty");
  const Kernels& kernels = kernels_of(body);
  const FloatEnvironment environment;
  const Best best = kernels.argmax(array.floats(), array.size(0));
  return nb::make_tuple(best.index, best.value);
}

int64_t gumbel_argmax(nb::object logits, double temperature, uint64_t key, uint32_t position,
                      uint32_t choice, uint32_t stream, nb::object mask, const std::string& body) {
  const Array array(logits.ptr(), "logits", Element::kFloat, {kAny});
  require(array.size(0) >= 1 && array.size(0) <= INT_MAX - 64, "logits is empty");
  const Array allowed = optional_array(mask.ptr(), "mask", Element::kByte, {array.size(0)});
  const Sampler sampler{nearest_float(temperature),
                        {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)},
                        position,
                        choice,
                        stream,
                        allowed.present() ? allowed.bytes() : nullptr};
  const Kernels& kernels = kernels_of(body);
  const FloatEnvironment environment;
  return kernels.gumbel_argmax(sampler, array.floats(), array.size(0)).index;
}

nb::tuple spread(nb::object logits, const std::string& body) {
  const Array array(logits.ptr(), "logits", Element::kFloat, {kAny});
  require(array.size(0) >= 1 && array.size(0) <= INT_MAX - 64, "logits is empty");
  const Kernels& kernels = kernels_of(body);
  const FloatEnvironment environment;
  const Spread found = kernels.spread(array.floats(), array.size(0));
  return nb::make_tuple(found.entropy, found.margin, found.first, found.second);
}

void exp_into(nb::object x, nb::object out, const std::string& body) {
  const Array array(x.ptr(), "x", Element::kFloat, {kAny});
  const Array result(out.ptr(), "out", Element::kFloat, {array.size(0)}, true);
  const Kernels& kernels = kernels_of(body);
  const FloatEnvironment environment;
  kernels.exp_into(array.floats(), result.writable_floats(), array.size(0));
}

bool pack_panels(Pool& pool, nb::object panels, nb::object source, const std::string& type,
                 int64_t num_rows, int64_t num_columns, nb::object row_map, int64_t group) {
  const Packer packer(panels.ptr(), source.ptr(), type, num_rows, num_columns, row_map.ptr(),
                      group);
  const nb::gil_scoped_release release;
  return packer.run(pool);
}

void bind_functions(nb::module_& m) {
  m.def("argmax", &argmax, "logits"_a, nb::kw_only(), "body"_a = "");
  m.def("exp_into", &exp_into, "x"_a, "out"_a, nb::kw_only(), "body"_a = "");
  m.def("gumbel_argmax", &gumbel_argmax, "logits"_a, "temperature"_a, "key"_a, "position"_a,
        "choice"_a, "stream"_a, "mask"_a.none() = nb::none(), nb::kw_only(), "body"_a = "");
  m.def("spread", &spread, "logits"_a, nb::kw_only(), "body"_a = "");
  m.def("pack_panels", &pack_panels, "pool"_a, "panels"_a, "source"_a, "type"_a, "num_rows"_a,
        "num_columns"_a, "row_map"_a.none() = nb::none(), "group"_a = 0);
}

}  // namespace
}  // namespace anyshard

#ifndef ANYSHARD_SOURCES_SHA256  // of a build without CMake
#define ANYSHARD_SOURCES_SHA256 ""
#endif

NB_MODULE(_native, m) {
  m.attr("sources_sha256") = ANYSHARD_SOURCES_SHA256;  // cmake/sources_hash.cmake
  anyshard::bind_pool(m);
  bind_bound(m);
  anyshard::bind_embed(m);
  anyshard::bind_qkv(m);
  anyshard::bind_attention(m);
  anyshard::bind_states(m);
  anyshard::bind_row_linear(m);
  anyshard::bind_reduce(m);
  anyshard::bind_wire(m);
  anyshard::bind_gate_up(m);
  anyshard::bind_head(m);
  anyshard::bind_functions(m);
  bind_shm(m);
  bind_walk(m);
  bind_digest(m);
  bind_probe(m);
}
