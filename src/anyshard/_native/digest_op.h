// The ops that hash what a step has written (kernel: digest.h), bound once to their arrays.
//
// `out` [R, P] of uint64 has a row for each row of the step and a column for each digest point of a
// rank; an op fills its own columns. `keys`, int32, is the table of ops/digest.py: key i for
// absolute index i, kLanes more than are used.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "bound.h"
#include "parts.h"

namespace anyshard {

// out[row][columns[i]] = digest of sources[i][row], whose first float is at index firsts[i].
class Digest : public Op {
 public:
  Digest(Pool& pool, const std::vector<PyObject*>& sources, const std::vector<int64_t>& firsts,
         const std::vector<int64_t>& columns, PyObject* keys, PyObject* out);
  void run(int rows) override;

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

  void run_row(const Kernels& kernels, int row) const;

  Pool& pool_;
  Array keys_;
  Array out_;
  std::deque<Part> parts_;
  int64_t rows_max_;
  int64_t floats_ = 0;
};

// Keys and values that a step has stored: out[row][column] and [column + 1] = digests of the KV
// heads [first_head, stop_head) of the cache, of which the first is at index `first`; 0 of a row
// whose block is of other stripes: another rank keeps it.
class DigestKv : public Op {
 public:
  struct Arguments {
    PyObject *k_cache, *v_cache, *page_table, *row_slot, *positions;
    int64_t first_head, stop_head, first, column;
    PyObject *keys, *out;
    int64_t first_stripe = 0, stop_stripe = kStripes;
  };
  DigestKv(Pool& pool, const Arguments& arguments);
  void run(int rows) override;

 private:
  void run_row(const Kernels& kernels, int row) const;

  Pool& pool_;
  KvPages k_cache_;
  KvPages v_cache_;
  Array keys_;
  Array out_;
  PagedRows paged_;
  int64_t first_head_;
  int64_t stop_head_;
  int64_t first_;
  int64_t column_;
  StripeSpan stripes_;
};

// out[n] = digest of output n's inputs, widened, from index 0 on.
class DigestPanels {
 public:
  DigestPanels(Pool& pool, PyObject* panels, PyObject* keys, int64_t num_inputs, PyObject* out);
  void run();

 private:
  Pool& pool_;
  Array out_;
  Array keys_;
  Panels panels_;
  Linear linear_{};
};

}  // namespace anyshard
