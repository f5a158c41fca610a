#include "parts.h"

#include <algorithm>
#include <climits>
#include <stdexcept>

namespace anyshard {

int check_merges(const int32_t* merges, int64_t count) {
  int left = 0;
  int depth = 0;
  for (int64_t i = 0; i < count; ++i) {
    ++left;
    depth = std::max(depth, left);
    require(merges[i] >= 0 && merges[i] < left,
            "merges[" + std::to_string(i) + "] is " + std::to_string(merges[i]) + ", but " +
                std::to_string(left) + " nodes are on the stack");
    left -= merges[i];
  }
  require(depth <= kMaxDepth, "merges leaves " + std::to_string(depth) +
                                  " nodes open at once; at most " + std::to_string(kMaxDepth) +
                                  " are supported");
  return left;
}

Leaves::Leaves(PyObject* lengths, PyObject* merges, int64_t num_inputs, bool whole) {
  const Array length_array(lengths, "leaf_lengths", Element::kInt, {kAny});
  const int64_t count = length_array.size(0);
  const Array merge_array(merges, "merges", Element::kInt, {count});
  lengths_.assign(length_array.ints(), length_array.ints() + count);
  merges_.assign(merge_array.ints(), merge_array.ints() + count);
  int64_t sum = 0;
  for (const int32_t length : lengths_) {
    starts_.push_back(static_cast<int32_t>(sum));
    require(length >= 1 && length <= num_inputs, "a leaf length is " + std::to_string(length) +
                                                     "; 1 to " + std::to_string(num_inputs) +
                                                     " is possible");
    sum += length;
  }
  require(sum == num_inputs, "leaf_lengths sum to " + std::to_string(sum) + ", but there are " +
                                 std::to_string(num_inputs) + " inputs");
  num_nodes_ = check_merges(merges_.data(), count);
  require(!whole || num_nodes_ == 1,
          "merges leaves " + std::to_string(num_nodes_) + " nodes; a whole sum leaves 1");
}

bool Leaves::made_of(int inputs) const {
  return std::all_of(lengths_.begin(), lengths_.end(),
                     [inputs](int32_t length) { return length % inputs == 0; });
}

bool Leaves::fit_in(int inputs) const {
  return std::all_of(lengths_.begin(), lengths_.end(),
                     [inputs](int32_t length) { return length <= inputs; });
}

LeafProgram Leaves::program() const {
  return {starts_.data(), lengths_.data(), merges_.data(), static_cast<int>(lengths_.size()),
          num_nodes_};
}

namespace {

// Inputs of panels as they lie in memory: where each leaf is a block, those that pad it count.
int64_t stored_inputs(PyObject* panels, int64_t num_inputs, const Leaves& leaves) {
  return holds_int8(panels) ? int64_t{kQ8Inputs} * leaves.program().num_leaves : num_inputs;
}

}  // namespace

BoundLinear::BoundLinear(PyObject* panels, PyObject* bias, const char* name, int64_t num_inputs,
                         int64_t num_outputs, const Leaves& leaves)
    : panels_(panels, (std::string(name) + "panels").c_str(),
              stored_inputs(panels, num_inputs, leaves), num_outputs),
      bias_(optional_array(bias, (std::string(name) + "bias").c_str(), Element::kFloat,
                           {num_outputs})) {
  require(num_outputs <= INT_MAX / 2, std::string(name) + "panels has too many outputs");
  require(panels_.storage() != Storage::kQ8 || leaves.made_of(kQ8Inputs),
          std::string(name) + "panels are Q8_0 blocks of 32 inputs; a leaf is not made of them");
  require(panels_.storage() != Storage::kInt8 || leaves.fit_in(kQ8Inputs),
          std::string(name) + "panels are int8 blocks of 32 inputs; a leaf is longer");
  const int64_t stored = stored_inputs(panels, num_inputs, leaves);
  require(stored <= INT_MAX, std::string(name) + "panels has too many inputs");
  linear_.panels = panels_.bytes();
  linear_.panel_stride = panels_.stride();
  linear_.storage = panels_.storage();
  linear_.num_inputs = static_cast<int>(stored);
  linear_.num_outputs = static_cast<int>(num_outputs);
  linear_.program = leaves.program();
}

void BoundLinear::run(const Kernels& kernels, int start, int stop, const float* x, size_t x_stride,
                      int num_rows, const Target& target, float* scratch) const {
  if (linear_.storage == Storage::kInt8) {
    kernels.linear_int8(linear_, x, x_stride, num_rows, start, stop, target);
  } else {
    kernels.linear(linear_, x, x_stride, num_rows, start, stop, target, scratch);
  }
}

void BoundLinear::run(const Kernels& kernels, int start, int stop, const float* x, size_t x_stride,
                      int num_rows, float* out, size_t node_stride, size_t row_stride,
                      float* scratch) const {
  const Target target{out, node_stride, row_stride, 0, bias()};
  run(kernels, start, stop, x, x_stride, num_rows, target, scratch);
}

RowForm::RowForm(const Leaves& leaves, int64_t width,
                 std::initializer_list<const BoundLinear*> linears)
    : program_(leaves.program()), stride_(static_cast<size_t>(width)) {
  int num_quantized = 0;
  int num_others = 0;
  for (const BoundLinear* linear : linears) {
    if (linear->num_outputs() == 0) continue;
    ++(linear->linear().storage == Storage::kInt8 ? num_quantized : num_others);
  }
  require(num_quantized == 0 || num_others == 0,
          "panels of int8 arithmetic and of float32 arithmetic cannot be mixed");
  quantized_ = num_quantized > 0;
  if (quantized_) stride_ = quantized_row_floats(program_.num_leaves);
}

namespace {

constexpr int kPieceLeaves = 16;

}  // namespace

int RowForm::num_pieces() const { return (program_.num_leaves + kPieceLeaves - 1) / kPieceLeaves; }

void RowForm::write_piece(const Kernels& kernels, int piece, const float* x, float* row) const {
  const int start = piece * kPieceLeaves;
  kernels.quantize(program_, start, std::min(start + kPieceLeaves, program_.num_leaves), x, row);
}

void RowForm::write(const Kernels& kernels, const float* x, float* row) const {
  kernels.quantize(program_, 0, program_.num_leaves, x, row);
}

void mark_fault(int32_t* row_fault, int row, int32_t code) {
  if (__atomic_load_n(row_fault + row, __ATOMIC_RELAXED) == 0) {
    __atomic_store_n(row_fault + row, code, __ATOMIC_RELAXED);
  }
}

BoundNorm::BoundNorm(PyObject* x, PyObject* weight, double eps, PyObject* row_fault, int fault_code)
    : x_(x, "x", Element::kFloat, {kAny, kAny}),
      weight_(weight, "norm_weight", Element::kFloat, {x_.size(1)}),
      row_fault_(row_fault, "row_fault", Element::kInt, {x_.size(0)}, true),
      fault_code_(fault_code) {
  require(x_.size(1) >= 1 && x_.size(1) <= INT_MAX / 8, "x has no columns");
  require(fault_code != 0, "fault_code is 0, which stands for no fault");
  norm_ = {weight_.floats(), nearest_float(eps), static_cast<int>(x_.size(1))};
}

void BoundNorm::run(const Thread& thread, const RowForm& form, int start, int stop,
                    const int32_t* gather) const {
  const size_t width = static_cast<size_t>(norm_.width);
  for (int r = start; r < stop; ++r) {
    const int row = gather != nullptr ? gather[r] : r;
    const float* x = x_.floats() + static_cast<size_t>(row) * width;
    float* out = thread.common + static_cast<size_t>(r) * form.stride();
    float* normed = form.quantized() ? thread.own : out;
    const bool fine = thread.kernels.norm(norm_, x, normed);
    if (form.quantized()) form.write(thread.kernels, normed, out);
    if (!fine) mark_fault(row_fault_.writable_ints(), row, fault_code_);
  }
}

PagedRows::PagedRows(PyObject* page_table, PyObject* row_slot, PyObject* positions,
                     int64_t rows_max, int64_t num_pages, int64_t num_positions)
    : page_table_(page_table, "page_table", Element::kInt, {kAny, kAny}),
      row_slot_(row_slot, "row_slot", Element::kInt, {rows_max}),
      positions_(positions, "positions", Element::kInt, {rows_max}),
      num_pages_(num_pages),
      num_positions_(std::min(num_positions, page_table_.size(1) * kBlock)) {}

namespace {

[[noreturn]] void refuse(int row, const char* what, int64_t value, int64_t limit) {
  throw std::invalid_argument("row " + std::to_string(row) + " has " + what + " " +
                              std::to_string(value) + "; 0 to " + std::to_string(limit - 1) +
                              " is possible");
}

}  // namespace

const int32_t* PagedRows::pages(int row) const {
  return page_table_.ints() + static_cast<int64_t>(slot(row)) * page_table_.size(1);
}

void PagedRows::check(int num_rows, bool history, StripeSpan stripes) const {
  int checked_slot = -1;
  int checked_blocks = 0;
  for (int row = 0; row < num_rows; ++row) {
    if (slot(row) < 0 || slot(row) >= page_table_.size(0)) {
      refuse(row, "slot", slot(row), page_table_.size(0));
    }
    if (position(row) < 0 || position(row) >= num_positions_) {
      refuse(row, "position", position(row), num_positions_);
    }
    const int num_blocks = position(row) / kBlock + 1;
    if (slot(row) != checked_slot) checked_blocks = 0;
    const int first = history ? checked_blocks : num_blocks - 1;
    for (int block = first; block < num_blocks; ++block) {
      if (!stripes.holds(block)) continue;
      const int page = pages(row)[block];
      if (page < 0 || page >= num_pages_) refuse(row, "page", page, num_pages_);
    }
    checked_slot = slot(row);
    checked_blocks = std::max(checked_blocks, num_blocks);
  }
}

StripeSpan checked_stripes(int64_t first, int64_t stop) {
  require(0 <= first && first < stop && stop <= kStripes,
          "stripes " + std::to_string(first) + " to " + std::to_string(stop) + "; 0 to " +
              std::to_string(kStripes) + " is possible, and at least one");
  return {static_cast<int>(first), static_cast<int>(stop)};
}

void check_rows(int rows, int rows_max) {
  if (rows < 0 || rows > rows_max) {
    throw std::invalid_argument("rows is " + std::to_string(rows) + "; 0 to " +
                                std::to_string(rows_max) + " is possible");
  }
}

}  // namespace anyshard
