// Attention where TP ranks split the sequence: what a rank's stripes give all heads, and the merge
// of what all ranks' stripes give the heads of one rank.
//
// A state travels as d + 2 floats: M (int bits), l, o[d]; l is NaN where a score was out of range.
// Of an empty one (M is kEmptyMax) o is not set and not read. A rank's buffer has a part for each
// TP rank: [rows][heads of that rank][nodes of this one][d + 2], and `part_floats` a row with the
// padding.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "ops.h"

namespace anyshard {

constexpr int kWireHeader = 2;

// After each stripe of a span, how many merges of the two newest states: what is left are the
// nodes that cover the span in the tree over all stripes.
class StripeNodes {
 public:
  explicit StripeNodes(StripeSpan stripes);
  int merges_after(int stripe) const { return merges_[stripe]; }
  int count() const { return count_; }

 private:
  int merges_[kStripes] = {};
  int count_ = 0;
};

// The nodes of stripes first to stop, for each row and the heads of every rank in `queries`.
class AttentionStates : public AttentionUnits {
 public:
  struct Arguments {
    PyObject *k_cache, *v_cache, *page_table, *row_slot, *positions;
    int head_dim;
    PyObject* kv_head_of;
    int64_t first_stripe, stop_stripe, part_floats;
    PyObject* out;
  };
  AttentionStates(Pool& pool, const std::vector<PyObject*>& queries, const Arguments& arguments);
  void run(int rows) override;

 private:
  // Of a head: the rank that has it, and its number and how many there are.
  struct Place {
    size_t rank;
    size_t head;
    size_t num_heads;
  };
  void run_unit(const Thread& thread, const Unit& unit, int rows) const;
  void run_sweep(const Thread& thread, size_t first, size_t step, size_t count, int rows) const;
  void finish_pair(const Thread& thread, int item, int rows) const;
  int merge_stripes(const Kernels& kernels, float* states, size_t set, int num_pairs,
                    const float** nodes) const;
  void write(const Unit& unit, int pair, int node, const float* state, int rows) const;

  StripeSpan stripes_;
  StripeNodes nodes_;
  size_t part_floats_;
  std::vector<Place> places_;
  Array out_;
};

// out = the merge of all ranks' nodes of the heads of rank `mine`, o / l.
class MergeStates : public Op {
 public:
  struct Arguments {
    PyObject* merges;
    int64_t mine, part_floats;
    int head_dim;
    PyObject *out, *row_fault;
    int fault_code;
  };
  MergeStates(Pool& pool, const std::vector<PyObject*>& sources,
              const std::vector<int64_t>& nodes_per_source, const Arguments& arguments);
  void run(int rows) override;

 private:
  void merge(const Thread& thread, int row, int head, int rows) const;

  Pool& pool_;
  int head_dim_;
  size_t state_floats_;
  std::deque<Array> sources_;
  std::vector<size_t> nodes_per_source_;
  std::vector<int32_t> merges_;
  size_t mine_;
  size_t part_floats_;
  Array out_;
  Array row_fault_;
  int32_t fault_code_;
  size_t num_heads_;
};

}  // namespace anyshard
