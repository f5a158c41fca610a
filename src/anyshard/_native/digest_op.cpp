#include "digest_op.h"

#include <algorithm>
#include <climits>

namespace anyshard {
namespace {

constexpr int64_t kAloneFloats = 65536;  // hashed sooner than another thread wakes up

// Places in arrays are checked once, here.
void check_place(const char* what, int64_t value, int64_t limit) {
  require(value >= 0 && value < limit, std::string(what) + " is " + std::to_string(value) +
                                           "; 0 to " + std::to_string(limit - 1) + " is possible");
}

void check_span(const Array& keys, int64_t first, int64_t count) {
  require(first >= 0 && count <= INT_MAX && first <= keys.size(0) - kLanes - count,
          "keys has " + std::to_string(keys.size(0)) + " entries; from " + std::to_string(first) +
              " on " + std::to_string(count + kLanes) + " are needed");
}

}  // namespace

Digest::Digest(Pool& pool, const std::vector<PyObject*>& sources,
               const std::vector<int64_t>& firsts, const std::vector<int64_t>& columns,
               PyObject* keys, PyObject* out)
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

void Digest::run(int rows) {
  check_rows(rows, static_cast<int>(rows_max_));
  const auto work = [&](const Thread& thread, int, int start, int stop) {
    for (int row = start; row < stop; ++row) run_row(thread.kernels, row);
  };
  pool_.run({{rows, pool_.chunk(rows, 1)}}, work, rows * floats_ < kAloneFloats);
}

void Digest::run_row(const Kernels& kernels, int row) const {
  for (const Part& part : parts_) {
    const int64_t width = part.source.size(1);
    out_.writable_words()[row * out_.size(1) + part.column] =
        kernels.digest(part.source.floats() + row * width, static_cast<int>(width),
                       static_cast<uint32_t>(part.first), keys_.ints() + part.first);
  }
}

DigestKv::DigestKv(Pool& pool, const Arguments& a)
    : pool_(pool),
      k_cache_(a.k_cache, "k_cache", true, kAny),
      v_cache_(a.v_cache, "v_cache", false, kAny),
      keys_(a.keys, "keys", Element::kInt, {kAny}),
      out_(a.out, "out", Element::kWord64, {kAny, kAny}, true),
      paged_(a.page_table, a.row_slot, a.positions, out_.size(0), k_cache_.num_pages(), INT_MAX),
      first_head_(a.first_head),
      stop_head_(a.stop_head),
      first_(a.first),
      column_(a.column),
      stripes_(checked_stripes(a.first_stripe, a.stop_stripe)) {
  require_alike(k_cache_, v_cache_);
  require(0 <= first_head_ && first_head_ <= stop_head_ && stop_head_ <= k_cache_.num_heads(),
          "the heads are not of this cache");
  check_place("the column of k", column_, out_.size(1));
  check_place("the column of v", column_ + 1, out_.size(1));
  check_span(keys_, first_, (stop_head_ - first_head_) * k_cache_.head_dim());
}

void DigestKv::run(int rows) {
  check_rows(rows, static_cast<int>(out_.size(0)));
  paged_.check(rows, false, stripes_);
  const auto work = [&](const Thread& thread, int, int start, int stop) {
    for (int row = start; row < stop; ++row) run_row(thread.kernels, row);
  };
  const int64_t floats = 2 * (stop_head_ - first_head_) * k_cache_.head_dim();
  pool_.run({{rows, pool_.chunk(rows, 1)}}, work, rows * floats < kAloneFloats);
}

void DigestKv::run_row(const Kernels& kernels, int row) const {
  const int64_t dim = k_cache_.head_dim();
  const int64_t position = paged_.position(row);
  uint64_t* out = out_.writable_words() + row * out_.size(1) + column_;
  if (!stripes_.holds(paged_.position(row) / kBlock)) {
    out[0] = out[1] = 0;
    return;
  }
  const int64_t page = paged_.pages(row)[position / kBlock];
  const int64_t lane = position % kBlock;
  uint64_t k_sum = 0;
  uint64_t v_sum = 0;
  for (int64_t head = first_head_; head < stop_head_; ++head) {
    const int64_t index = first_ + (head - first_head_) * dim;
    const int32_t* keys = keys_.ints() + index;
    float stored[kMaxHeadDim];
    k_cache_.read_row(page, head, lane, stored);
    k_sum += kernels.digest(stored, static_cast<int>(dim), static_cast<uint32_t>(index), keys);
    v_cache_.read_row(page, head, lane, stored);
    v_sum += kernels.digest(stored, static_cast<int>(dim), static_cast<uint32_t>(index), keys);
  }
  out[0] = k_sum;
  out[1] = v_sum;
}

DigestPanels::DigestPanels(Pool& pool, PyObject* panels, PyObject* keys, int64_t num_inputs,
                           PyObject* out)
    : pool_(pool),
      out_(out, "out", Element::kWord64, {kAny}, true),
      keys_(keys, "keys", Element::kInt, {kAny}),
      panels_(panels, "panels", num_inputs, out_.size(0)) {
  require(out_.size(0) <= INT_MAX - kLanes, "too many outputs");
  check_span(keys_, 0, num_inputs);
  linear_.panels = panels_.bytes();
  linear_.panel_stride = panels_.stride();
  linear_.storage = panels_.storage();
  linear_.num_inputs = static_cast<int>(num_inputs);
  linear_.num_outputs = static_cast<int>(out_.size(0));
  const bool widens = linear_.storage != Storage::kFloat32;
  pool.reserve(0, widens ? static_cast<size_t>(num_inputs) * kLanes : 0);
}

void DigestPanels::run() {
  const int num_panels = (linear_.num_outputs + kLanes - 1) / kLanes;
  const auto work = [&](const Thread& thread, int, int start, int stop) {
    for (int panel = start; panel < stop; ++panel) {
      uint64_t lanes[kLanes];
      thread.kernels.digest_panel(linear_, panel, keys_.ints(), thread.own, lanes);
      const int count = std::min(kLanes, linear_.num_outputs - panel * kLanes);
      std::copy(lanes, lanes + count, out_.writable_words() + panel * kLanes);
    }
  };
  pool_.run({{num_panels, pool_.chunk(num_panels, 2)}}, work);
}

}  // namespace anyshard
