#include "ops.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>

#include "half.h"

namespace anyshard {
namespace {

// Below this many floats a step is done before another thread has woken up.
constexpr int64_t kAloneFloats = 16384;
// Panels of gate and up that a thread finishes together: a whole number of 3- and 4-panel tiles.
constexpr int kGateUpChunk = 12;

size_t product(int64_t a, int64_t b) { return static_cast<size_t>(a) * static_cast<size_t>(b); }

// Inputs of an embedding as it lies in memory: int8 blocks may be padded.
int64_t stored_width(PyObject* panels, int64_t width) {
  return holds_int8(panels) ? (width + kQ8Inputs - 1) / kQ8Inputs * kQ8Inputs : width;
}

// Weights [0, width) of output n, widened.
void copy_row(const Panels& panels, int n, int64_t width, float* out) {
  if (in_blocks(panels.storage())) {
    const uint8_t* block = panels.bytes() + product(n / kQ8Outputs, panels.stride());
    const int lane = n % kQ8Outputs;
    for (; width > 0; width -= kQ8Inputs, block += kQ8Bytes) {
      const float scale = widen_half(read_half(block + kQ8Values + 2 * lane));
      for (int k = 0; k < kQ8Inputs && k < width; ++k) {
        const uint8_t value = block[k / 4 * 4 * kQ8Outputs + 4 * lane + k % 4];
        *out++ = static_cast<float>(static_cast<int8_t>(value)) * scale;
      }
    }
    return;
  }
  const uint8_t* panel = panels.bytes() + product(n / kLanes, panels.stride());
  const int lane = n % kLanes;
  for (int64_t k = 0; k < width; ++k) {
    if (panels.storage() == Storage::kFloat32) {
      std::memcpy(out + k, panel + 4 * (k * kLanes + lane), sizeof(float));
    } else {
      const uint32_t half = read_half(panel + 2 * (k * kLanes + lane));
      out[k] = panels.storage() == Storage::kFloat16 ? widen_half(half) : widen_bfloat(half);
    }
  }
}

}  // namespace

Embed::Embed(Pool& pool, PyObject* panels, int64_t vocab, PyObject* tokens, PyObject* out)
    : pool_(pool),
      out_(out, "out", Element::kFloat, {kAny, kAny}, true),
      tokens_(tokens, "tokens", Element::kInt, {out_.size(0)}),
      panels_(panels, "panels", stored_width(panels, out_.size(1)), vocab),
      vocab_(vocab) {}

void Embed::run(int rows) {
  check_rows(rows, static_cast<int>(out_.size(0)));
  for (int row = 0; row < rows; ++row) {
    const int token = tokens_.ints()[row];
    if (token < 0 || token >= vocab_) {
      throw std::invalid_argument("row " + std::to_string(row) + " has token id " +
                                  std::to_string(token) + "; 0 to " + std::to_string(vocab_ - 1) +
                                  " is possible");
    }
  }
  const int64_t width = out_.size(1);
  const auto copy = [&](const Thread&, int, int start, int stop) {
    for (int row = start; row < stop; ++row) {
      copy_row(panels_, tokens_.ints()[row], width, out_.writable_floats() + row * width);
    }
  };
  pool_.run({{rows, pool_.chunk(rows, 1)}}, copy, rows * width < kAloneFloats);
}

Qkv::Qkv(Pool& pool, const Arguments& a)
    : pool_(pool),
      head_dim_(checked_head_dim(a.head_dim)),
      q_out_(a.q_out, "q_out", Element::kFloat, {kAny, kAny}, true),
      k_cache_(a.k_cache, "k_cache", true, a.head_dim, true),
      v_cache_(a.v_cache, "v_cache", false, a.head_dim, true),
      norm_(a.x, a.norm_weight, a.eps, a.row_fault, a.fault_code),
      leaves_(a.leaf_lengths, a.merges, norm_.width(), true),
      q_(a.q_panels, a.q_bias, "q_", norm_.width(), q_out_.size(1), leaves_),
      k_(a.k_panels, a.k_bias, "k_", norm_.width(), k_cache_.num_heads() * a.head_dim, leaves_),
      v_(a.v_panels, a.v_bias, "v_", norm_.width(), k_cache_.num_heads() * a.head_dim, leaves_),
      form_(leaves_, norm_.width(), {&q_, &k_, &v_}),
      prepared_(form_),
      cosine_(a.cosine, "cos", Element::kFloat, {kAny, a.head_dim / 2}),
      sine_(a.sine, "sin", Element::kFloat, {cosine_.size(0), a.head_dim / 2}),
      paged_(a.page_table, a.row_slot, a.positions, q_out_.size(0), k_cache_.num_pages(),
             cosine_.size(0)),
      q_norm_(optional_array(a.q_norm, "q_norm", Element::kFloat, {a.head_dim})),
      k_norm_(optional_array(a.k_norm, "k_norm", Element::kFloat, {a.head_dim})),
      row_fault_(a.row_fault, "row_fault", Element::kInt, {q_out_.size(0)}, true),
      eps_(nearest_float(a.eps)),
      fault_code_(a.fault_code),
      q_scale_(nearest_float(a.q_scale)),
      stripes_(checked_stripes(a.first_stripe, a.stop_stripe)) {
  require_alike(k_cache_, v_cache_);
  require(q_out_.size(1) % head_dim_ == 0, "q_out is not a whole number of heads wide");
  require(q_out_.size(0) == norm_.num_rows(), "q_out and x have different numbers of rows");
  row_floats_ = form_.scratch_floats(q_out_.size(0));
  kv_floats_ = whole_lines(product(q_out_.size(0), k_.num_outputs()));
  if (!stripes_.is_all()) {
    kv_rows_.resize(static_cast<size_t>(q_out_.size(0)));
    owned_.resize(static_cast<size_t>(q_out_.size(0)));
  }
  pool.reserve((stripes_.is_all() ? size_t{1} : size_t{2}) * row_floats_ + 2 * kv_floats_,
               prepared_.own_floats() + std::max({norm_.own_floats(form_), q_.scratch_floats(),
                                                  k_.scratch_floats(), v_.scratch_floats()}));
}

void Qkv::list_owned(int rows) {
  const bool has_q = q_.num_outputs() > 0;
  num_owned_ = num_prepared_ = rows;
  copies_ = false;
  if (stripes_.is_all()) return;
  num_owned_ = 0;
  for (int row = 0; row < rows; ++row) {
    const bool is_owned = stripes_.holds(paged_.position(row) / kBlock);
    kv_rows_[static_cast<size_t>(row)] = is_owned ? num_owned_ : -1;
    if (is_owned) owned_[static_cast<size_t>(num_owned_++)] = row;
  }
  if (!has_q) num_prepared_ = num_owned_;
  copies_ = num_owned_ > 0 && num_owned_ < num_prepared_;
}

void Qkv::run(int rows) {
  check_rows(rows, static_cast<int>(q_out_.size(0)));
  const bool has_kv = k_.num_outputs() > 0;
  paged_.check(rows, has_kv, stripes_);
  list_owned(rows);
  if (num_prepared_ == 0) return;
  const int kv_panels = num_owned_ > 0 ? k_.num_panels() + v_.num_panels() : 0;
  const int num_panels = q_.num_panels() + kv_panels;
  const int num_heads = (q_.num_outputs() + 2 * k_.num_outputs()) / head_dim_;
  const int num_q = q_.num_outputs() / head_dim_;
  const int num_places = rows * num_heads;
  const auto work = [&](const Thread& thread, int phase, int start, int stop) {
    if (phase == 0) prepare(thread, start, stop);
    if (phase == 1) project(thread, rows, start, stop);
    for (int i = start; phase == 2 && i < stop; ++i) {
      const int row = i / num_heads;
      const int head = i % num_heads;
      if (head < num_q || kv_row(row) >= 0) place_head(thread, row, head);
    }
  };
  pool_.run({norm_.phase(pool_, num_prepared_),
             {num_panels, pool_.chunk(num_panels, panel_group(q_.linear().storage, rows))},
             {num_places, pool_.chunk(num_places, 1)}},
            work);
}

// Rows [start, stop) of those that are read: all, or without q only those owned.
void Qkv::prepare(const Thread& thread, int start, int stop) const {
  const Thread seen = prepared_.seen_by(thread, num_prepared_);
  const bool gathers = !stripes_.is_all() && q_.num_outputs() == 0;
  norm_.run(seen, form_, start, stop, gathers ? owned_.data() : nullptr);
  for (int row = start; copies_ && row < stop; ++row) {
    if (kv_row(row) < 0) continue;
    std::copy_n(seen.common + static_cast<size_t>(row) * form_.stride(), form_.stride(),
                owned_rows(thread) + static_cast<size_t>(kv_row(row)) * form_.stride());
  }
}

// Panels [start, stop) of q, k and v one after the other.
void Qkv::project(const Thread& thread, int rows, int start, int stop) const {
  const Thread seen = prepared_.seen_by(thread, num_prepared_);
  const float* owned = copies_ ? owned_rows(thread) : seen.common;
  const BoundLinear* linears[] = {&q_, &k_, &v_};
  const float* inputs[] = {seen.common, owned, owned};
  const int counts[] = {rows, num_owned_, num_owned_};
  float* outputs[] = {q_out_.writable_floats(), k_rows(thread), v_rows(thread)};
  for (int i = 0; i < 3; ++i) {
    const int size = counts[i] > 0 ? linears[i]->num_panels() : 0;
    const int first = std::max(start, 0);
    const int last = std::min(stop, size);
    if (first < last) {
      linears[i]->run(seen.kernels, first, last, inputs[i], form_.stride(), counts[i], outputs[i],
                      0, static_cast<size_t>(linears[i]->num_outputs()), seen.own);
    }
    start -= size;
    stop -= size;
  }
}

// Heads in the order q, k, v: q in place; k and v to the row's page.
void Qkv::place_head(const Thread& thread, int row, int head) const {
  const int64_t position = paged_.position(row);
  const int half = head_dim_ / 2;
  const Rope rope{cosine_.floats() + position * half, sine_.floats() + position * half, head_dim_};
  const int num_q = q_.num_outputs() / head_dim_;
  const int num_kv = k_.num_outputs() / head_dim_;
  if (head < num_q) {
    float* q = q_out_.writable_floats() + product(row, q_.num_outputs()) + product(head, head_dim_);
    norm_head(thread.kernels, q_norm_, row, q);
    thread.kernels.rope(rope, q, &q_scale_, q);
    return;
  }
  const int kv_head = (head - num_q) % num_kv;
  const size_t place = product(kv_row(row), k_.num_outputs()) + product(kv_head, head_dim_);
  const int64_t page = paged_.pages(row)[position / kBlock];
  const int lane = static_cast<int>(position % kBlock);
  if (head < num_q + num_kv) {
    float rotated[kMaxHeadDim];
    norm_head(thread.kernels, k_norm_, row, k_rows(thread) + place);
    thread.kernels.rope(rope, k_rows(thread) + place, nullptr, rotated);
    store_key(thread.kernels, page, kv_head, lane, rotated);
  } else {
    store_value(thread.kernels, page, kv_head, lane, v_rows(thread) + place);
  }
}

void Qkv::store_key(const Kernels& kernels, int64_t page, int head, int lane,
                    const float* key) const {
  uint8_t* place = k_cache_.writable_head(page, head);
  if (k_cache_.storage() == KvStorage::kFloat32) {
    float* out = reinterpret_cast<float*>(place) + lane;
    for (int d = 0; d < head_dim_; ++d) out[d * kBlock] = key[d];
    return;
  }
  uint8_t* scales = place + product(head_dim_, kBlock) + 2 * lane;
  for (int d = 0; d < head_dim_; d += kKvGroup, scales += 2 * kBlock) {
    uint8_t q[kKvGroup];
    const int count = std::min(kKvGroup, head_dim_ - d);
    write_half(scales, kernels.quantize_group(key + d, count, q));
    for (int i = 0; i < count; ++i) place[kv_key_at(d + i, lane)] = q[i];
  }
}

void Qkv::store_value(const Kernels& kernels, int64_t page, int head, int lane,
                      const float* value) const {
  uint8_t* place = v_cache_.writable_head(page, head);
  if (v_cache_.storage() == KvStorage::kFloat32) {
    std::copy_n(value, head_dim_, reinterpret_cast<float*>(place) + product(lane, head_dim_));
    return;
  }
  uint8_t* scales = place + product(head_dim_, kBlock) + 2 * lane;
  for (int d = 0; d < head_dim_; d += kKvGroup, scales += 2 * kBlock) {
    uint8_t q[kKvGroup];
    const int count = std::min(kKvGroup, head_dim_ - d);
    write_half(scales, kernels.quantize_group(value + d, count, q));
    for (int i = 0; i < count; ++i) place[kv_value_at(head_dim_, d + i, lane)] = q[i];
  }
}

// RMSNorm of one head in place, where the model has one.
void Qkv::norm_head(const Kernels& kernels, const Array& weight, int row, float* head) const {
  if (!weight.present()) return;
  const bool fine = kernels.norm({weight.floats(), eps_, head_dim_}, head, head);
  if (!fine) mark_fault(row_fault_.writable_ints(), row, fault_code_);
}

RowLinear::RowLinear(Pool& pool, PyObject* a, PyObject* panels, int64_t num_outputs,
                     PyObject* leaf_lengths, PyObject* merges, PyObject* out)
    : pool_(pool),
      a_(a, "a", Element::kFloat, {kAny, kAny}),
      leaves_(leaf_lengths, merges, a_.size(1), false),
      linear_(panels, Py_None, "", a_.size(1), num_outputs, leaves_),
      form_(leaves_, a_.size(1), {&linear_}),
      prepared_(form_),
      out_(out, "out", Element::kFloat, {kAny}, true) {
  require_at_least("out holds " + std::to_string(out_.size(0)) + " floats", out_.size(0),
                   {leaves_.num_nodes(), a_.size(0), num_outputs});
  pool.reserve(form_.quantized() ? form_.scratch_floats(a_.size(0)) : 0,
               prepared_.own_floats() + linear_.scratch_floats());
}

void RowLinear::run(int rows) {
  check_rows(rows, static_cast<int>(a_.size(0)));
  if (leaves_.num_nodes() == 0) return;
  const size_t row_stride = static_cast<size_t>(linear_.num_outputs());
  const int num_pieces = form_.num_pieces();
  const auto work = [&](const Thread& given, int phase, int start, int stop) {
    const Thread thread = prepared_.seen_by(given, rows);
    for (int i = start; phase == 0 && i < stop; ++i) {
      const int row = i / num_pieces;
      form_.write_piece(thread.kernels, i % num_pieces, a_.floats() + product(row, a_.size(1)),
                        thread.common + static_cast<size_t>(row) * form_.stride());
    }
    if (phase == 1) {
      linear_.run(thread.kernels, start, stop, form_.quantized() ? thread.common : a_.floats(),
                  form_.stride(), rows, out_.writable_floats(),
                  product(rows, linear_.num_outputs()), row_stride, thread.own);
    }
  };
  const int pieces = form_.quantized() ? rows * num_pieces : 0;
  pool_.run(
      {{pieces, pool_.chunk(pieces, 1), PreparedRows::by_each(rows)}, linear_.phase(pool_, rows)},
      work);
}

Reduce::Reduce(Pool& pool, const std::vector<PyObject*>& sources,
               const std::vector<int64_t>& nodes_per_source, PyObject* merges, PyObject* bias,
               PyObject* x, int64_t num_outputs)
    : pool_(pool),
      nodes_per_source_(nodes_per_source),
      x_(x, "x", Element::kFloat, {kAny, num_outputs}, true),
      bias_(optional_array(bias, "bias", Element::kFloat, {num_outputs})),
      num_outputs_(static_cast<int>(num_outputs)) {
  require(num_outputs >= 0 && num_outputs <= INT_MAX / 2,
          "num_outputs is " + std::to_string(num_outputs) + "; 0 to " +
              std::to_string(INT_MAX / 2) + " is possible");
  require(sources.size() == nodes_per_source.size(),
          "there are " + std::to_string(sources.size()) + " sources, but " +
              std::to_string(nodes_per_source.size()) + " node counts");
  int64_t total = 0;
  for (size_t i = 0; i < sources.size(); ++i) {
    sources_.emplace_back(sources[i], "a source", Element::kFloat,
                          std::initializer_list<int64_t>{kAny});
    const int64_t count = nodes_per_source[i];
    require(count >= 0 && count <= kMaxDepth * 64, "a node count is out of range");
    require_at_least(
        "source " + std::to_string(i) + " holds " + std::to_string(sources_[i].size(0)) + " floats",
        sources_[i].size(0), {count, x_.size(0), num_outputs});
    total += count;
  }
  const Array merge_array(merges, "merges", Element::kInt, {total});
  require(total <= kMaxNodes, std::to_string(total) + " nodes are to be merged; at most " +
                                  std::to_string(kMaxNodes) + " are supported");
  merges_.assign(merge_array.ints(), merge_array.ints() + total);
  require(check_merges(merges_.data(), total) == 1,
          "merges does not leave one node; the sum is incomplete");
}

void Reduce::run(int rows) {
  check_rows(rows, static_cast<int>(x_.size(0)));
  const int64_t floats = static_cast<int64_t>(rows) * num_outputs_;
  const int size = rows * ((num_outputs_ + kLanes - 1) / kLanes);
  const auto work = [&](const Thread&, int, int start, int stop) { run_groups(rows, start, stop); };
  pool_.run({{size, pool_.chunk(size, 1)}}, work,
            floats * static_cast<int64_t>(merges_.size()) < kAloneFloats);
}

void Reduce::run_groups(int rows, int start, int stop) const {
  const int num_groups = (num_outputs_ + kLanes - 1) / kLanes;
  while (start < stop) {
    const int row = start / num_groups;
    const int row_stop = std::min(stop, (row + 1) * num_groups);
    const int first = (start - row * num_groups) * kLanes;
    const int last = std::min(num_outputs_, (row_stop - row * num_groups) * kLanes);
    reduce_span(row, rows, first, last);
    start = row_stop;
  }
}

void Reduce::reduce_span(int row, int rows, int start, int stop) const {
  const float* nodes[kMaxNodes];
  int num_nodes = 0;
  for (size_t i = 0; i < sources_.size(); ++i) {
    for (int64_t j = 0; j < nodes_per_source_[i]; ++j) {
      nodes[num_nodes++] = sources_[i].floats() + product(j * rows + row, num_outputs_) + start;
    }
  }
  float* x = x_.writable_floats() + product(row, num_outputs_) + start;
  pool_.kernels().reduce(nodes, merges_.data(), num_nodes,
                         bias_.present() ? bias_.floats() + start : nullptr, x, stop - start);
}

GateUp::GateUp(Pool& pool, const Arguments& a)
    : pool_(pool),
      out_(a.out, "out", Element::kFloat, {kAny, a.num_outputs}, true),
      norm_(a.x, a.norm_weight, a.eps, a.row_fault, a.fault_code),
      leaves_(a.leaf_lengths, a.merges, norm_.width(), true),
      gate_(a.gate_panels, a.gate_bias, "gate_", norm_.width(), a.num_outputs, leaves_),
      up_(a.up_panels, a.up_bias, "up_", norm_.width(), a.num_outputs, leaves_),
      form_(leaves_, norm_.width(), {&gate_, &up_}),
      prepared_(form_) {
  require(out_.size(0) == norm_.num_rows(), "out and x have different numbers of rows");
  up_floats_ = whole_lines(product(out_.size(0), kGateUpChunk * kLanes));
  pool.reserve(form_.scratch_floats(out_.size(0)),
               prepared_.own_floats() +
                   std::max(norm_.own_floats(form_),
                            up_floats_ + std::max(gate_.scratch_floats(), up_.scratch_floats())));
}

void GateUp::run(int rows) {
  check_rows(rows, static_cast<int>(out_.size(0)));
  Phase panels = gate_.phase(pool_, rows);
  panels.chunk = std::min(panels.chunk, kGateUpChunk);
  const auto work = [&](const Thread& given, int phase, int start, int stop) {
    const Thread thread = prepared_.seen_by(given, rows);
    if (phase == 0) norm_.run(thread, form_, start, stop, nullptr);
    if (phase == 1) run_panels(thread, rows, start, stop);
  };
  pool_.run({norm_.phase(pool_, rows), panels}, work);
}

void GateUp::run_panels(const Thread& thread, int rows, int start, int stop) const {
  const size_t width = form_.stride();
  const size_t out_stride = static_cast<size_t>(gate_.num_outputs());
  float* scratch = thread.own + up_floats_;
  constexpr size_t kUpStride = static_cast<size_t>(kGateUpChunk) * kLanes;
  for (; start < stop; start += kGateUpChunk) {
    const int last = std::min(stop, start + kGateUpChunk);
    const int first = start * kLanes;
    const Target gate_target{out_.writable_floats(), 0, out_stride, 0, gate_.bias()};
    gate_.run(thread.kernels, start, last, thread.common, width, rows, gate_target, scratch);
    const Target up_target{thread.own, 0, kUpStride, first, up_.bias()};
    up_.run(thread.kernels, start, last, thread.common, width, rows, up_target, scratch);
    const int count = std::min(gate_.num_outputs(), last * kLanes) - first;
    for (int row = 0; row < rows; ++row) {
      float* gate = out_.writable_floats() + product(row, gate_.num_outputs()) + first;
      thread.kernels.silu_product(gate, thread.own + static_cast<size_t>(row) * kUpStride, count);
    }
  }
}

Head::Head(Pool& pool, const Arguments& a)
    : pool_(pool),
      sample_rows_(a.sample_rows, "sample_rows", Element::kInt, {kAny}),
      out_(a.out, "out", Element::kFloat, {kAny, a.num_outputs}, true),
      norm_(a.x, a.norm_weight, a.eps, a.row_fault, a.fault_code),
      leaves_(a.leaf_lengths, a.merges, norm_.width(), true),
      linear_(a.panels, a.bias, "", norm_.width(), a.num_outputs, leaves_),
      form_(leaves_, norm_.width(), {&linear_}),
      prepared_(form_) {
  pool.reserve(
      form_.scratch_floats(std::min(out_.size(0), sample_rows_.size(0))),
      prepared_.own_floats() + std::max(norm_.own_floats(form_), linear_.scratch_floats()));
}

void Head::run(int num_sampled) {
  check_rows(num_sampled, static_cast<int>(std::min(out_.size(0), sample_rows_.size(0))));
  for (int i = 0; i < num_sampled; ++i) {
    const int row = sample_rows_.ints()[i];
    if (row < 0 || row >= norm_.num_rows()) {
      throw std::invalid_argument("sample_rows[" + std::to_string(i) + "] is " +
                                  std::to_string(row) + "; 0 to " +
                                  std::to_string(norm_.num_rows() - 1) + " is possible");
    }
  }
  const auto work = [&](const Thread& given, int phase, int start, int stop) {
    const Thread thread = prepared_.seen_by(given, num_sampled);
    if (phase == 0) {
      norm_.run(thread, form_, start, stop, sample_rows_.ints());
    } else {
      linear_.run(thread.kernels, start, stop, thread.common, form_.stride(), num_sampled,
                  out_.writable_floats(), 0, static_cast<size_t>(linear_.num_outputs()),
                  thread.own);
    }
  };
  pool_.run({norm_.phase(pool_, num_sampled), linear_.phase(pool_, num_sampled)}, work);
}

}  // namespace anyshard
