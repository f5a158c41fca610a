// What several ops are made of: leaf programs, linears, the norm before them, paged rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "array.h"
#include "pool.h"

namespace anyshard {

// A checked post-order stack program; copies its arrays.
class Leaves {
 public:
  // `lengths` must sum to num_inputs; a column-parallel linear wants `whole` sums: one node.
  Leaves(PyObject* lengths, PyObject* merges, int64_t num_inputs, bool whole);
  LeafProgram program() const;
  int num_nodes() const { return num_nodes_; }
  // Whether every leaf is made of whole blocks of that many inputs.
  bool made_of(int inputs) const;
  // Whether every leaf is one block of at most so many inputs.
  bool fit_in(int inputs) const;

 private:
  std::vector<int32_t> starts_;
  std::vector<int32_t> lengths_;
  std::vector<int32_t> merges_;
  int num_nodes_ = 0;
};

// Runs the stack of `merges` over as many nodes, and returns the number of nodes left.
int check_merges(const int32_t* merges, int64_t count);

// One linear of an op: panels, bias and the dealing of panels to threads.
class BoundLinear {
 public:
  BoundLinear(PyObject* panels, PyObject* bias, const char* name, int64_t num_inputs,
              int64_t num_outputs, const Leaves& leaves);

  int num_outputs() const { return linear_.num_outputs; }
  int num_panels() const { return (linear_.num_outputs + kLanes - 1) / kLanes; }
  const Linear& linear() const { return linear_; }
  const float* bias() const { return bias_.floats(); }
  // The phase that computes it for some rows: an item is a panel.
  Phase phase(const Pool& pool, int num_rows) const {
    return {num_panels(), pool.chunk(num_panels(), panel_group(linear_.storage, num_rows))};
  }
  // What it wants of a thread's own scratch.
  size_t scratch_floats() const { return whole_lines(linear_scratch(linear_)); }
  // Panels [start, stop) to where the target says.
  void run(const Kernels& kernels, int start, int stop, const float* x, size_t x_stride,
           int num_rows, const Target& target, float* scratch) const;
  // Panels [start, stop) of out[node][row][n].
  void run(const Kernels& kernels, int start, int stop, const float* x, size_t x_stride,
           int num_rows, float* out, size_t node_stride, size_t row_stride, float* scratch) const;

 private:
  Panels panels_;
  Array bias_;
  Linear linear_{};
};

// How linears over the same leaves read a row: as floats, or (int8) quantised by leaf.
class RowForm {
 public:
  // Throws std::invalid_argument if some of `linears` are of int8 arithmetic and some are not.
  RowForm(const Leaves& leaves, int64_t width, std::initializer_list<const BoundLinear*> linears);

  bool quantized() const { return quantized_; }
  size_t stride() const { return stride_; }  // floats from row to row
  size_t scratch_floats(int64_t rows) const {
    return whole_lines(static_cast<size_t>(rows) * stride_);
  }
  // Pieces of a row that threads may write by themselves, and one of them.
  int num_pieces() const;
  void write_piece(const Kernels& kernels, int piece, const float* x, float* row) const;
  void write(const Kernels& kernels, const float* x, float* row) const;

 private:
  LeafProgram program_;  // of the leaves given: they must stay
  bool quantized_ = false;
  size_t stride_;
};

// How the rows of a step become those that its linears read: once for all threads, in the common
// scratch; or, a single row, by each thread in its own, which is done sooner than a thread is
// waited for. Knows where they lie.
class PreparedRows {
 public:
  explicit PreparedRows(const RowForm& form) : own_floats_(form.scratch_floats(1)) {}

  // Of a thread's own scratch, from its start: what else is there comes after.
  size_t own_floats() const { return own_floats_; }
  static bool by_each(int rows) { return rows == 1; }
  // A thread as whoever prepares or reads the rows sees it: they stand in its common scratch.
  Thread seen_by(const Thread& thread, int rows) const {
    return {thread.kernels, by_each(rows) ? thread.own : thread.common, thread.own + own_floats_};
  }

 private:
  size_t own_floats_;
};

// Marks a row's first fault; threads may race with the same code only.
void mark_fault(int32_t* row_fault, int row, int32_t code);

// RMSNorm of the rows of a step, before the linears of an op.
class BoundNorm {
 public:
  BoundNorm(PyObject* x, PyObject* weight, double eps, PyObject* row_fault, int fault_code);

  int width() const { return norm_.width; }
  int num_rows() const { return static_cast<int>(x_.size(0)); }
  // What it wants of a thread's own scratch, from its start.
  size_t own_floats(const RowForm& form) const {
    return form.quantized() ? whole_lines(static_cast<size_t>(norm_.width)) : 0;
  }
  Phase phase(const Pool& pool, int num_rows) const {
    return {num_rows, pool.chunk(num_rows, 1), PreparedRows::by_each(num_rows)};
  }
  // Fills rows [start, stop) of the thread's common scratch, in that form. Row r is x[gather[r]],
  // or x[r] if gather is null.
  void run(const Thread& thread, const RowForm& form, int start, int stop,
           const int32_t* gather) const;

 private:
  Array x_;
  Array weight_;
  Array row_fault_;
  int32_t fault_code_;
  Norm norm_;
};

// Where rows live in the paged cache, with the checks that keep a bad frame from reading outside.
class PagedRows {
 public:
  PagedRows(PyObject* page_table, PyObject* row_slot, PyObject* positions, int64_t rows_max,
            int64_t num_pages, int64_t num_positions);

  int position(int row) const { return positions_.ints()[row]; }
  int slot(int row) const { return row_slot_.ints()[row]; }
  // Pages of a row's sequence, by block.
  const int32_t* pages(int row) const;
  // Throws std::invalid_argument if a row's slot, position or page is out of range; `history`:
  // also the pages of all earlier blocks. Only pages of blocks of these stripes are looked at.
  void check(int num_rows, bool history, StripeSpan stripes = {}) const;

 private:
  Array page_table_;
  Array row_slot_;
  Array positions_;
  int64_t num_pages_;
  int64_t num_positions_;
};

// Throws std::invalid_argument unless there are stripes first to stop, at least one.
StripeSpan checked_stripes(int64_t first, int64_t stop);

// Throws std::invalid_argument unless 0 <= rows <= rows_max.
void check_rows(int rows, int rows_max);

}  // namespace anyshard
