// The ops of a step, bound once to their arrays. `run` checks the row count and every index that
// it will follow, then computes; it allocates nothing and needs no GIL.
//
// Letters: R rows_max, D hidden, H query heads here, G KV heads here, d head dim, F ffn here,
// V vocabulary rows here, P pages, S slots, B blocks of a slot, C positions.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "bound.h"
#include "parts.h"

namespace anyshard {

// out[row] = embedding row tokens[row], read from the packed panels.
class Embed : public Op {
 public:
  Embed(Pool& pool, PyObject* panels, int64_t vocab, PyObject* tokens, PyObject* out);
  void run(int rows) override;

 private:
  Pool& pool_;
  Array out_;
  Array tokens_;
  Panels panels_;
  int64_t vocab_;
};

// Norm, q/k/v with bias, RoPE, q scaled once, k and v stored in their pages; of a row whose block
// is of other stripes only q, since another rank keeps it.
class Qkv : public Op {
 public:
  struct Arguments {
    PyObject *x, *norm_weight;
    double eps;
    PyObject *q_panels, *k_panels, *v_panels, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm;
    PyObject *leaf_lengths, *merges;
    int head_dim;
    double q_scale;
    PyObject *cosine, *sine, *positions, *q_out, *k_cache, *v_cache, *page_table, *row_slot;
    PyObject* row_fault;
    int fault_code;
    int64_t first_stripe = 0, stop_stripe = kStripes;
  };
  Qkv(Pool& pool, const Arguments& arguments);
  void run(int rows) override;

 private:
  void list_owned(int rows);
  void prepare(const Thread& thread, int start, int stop) const;
  void project(const Thread& thread, int rows, int start, int stop) const;
  void place_head(const Thread& thread, int row, int head) const;
  void store_key(const Kernels& kernels, int64_t page, int head, int lane, const float* key) const;
  void store_value(const Kernels& kernels, int64_t page, int head, int lane,
                   const float* value) const;
  // Where k and v of a row stand until they are placed; negative: nowhere.
  int kv_row(int row) const { return stripes_.is_all() ? row : kv_rows_[static_cast<size_t>(row)]; }
  float* k_rows(const Thread& thread) const { return thread.common + row_floats_; }
  float* v_rows(const Thread& thread) const { return k_rows(thread) + kv_floats_; }
  float* owned_rows(const Thread& thread) const { return v_rows(thread) + kv_floats_; }
  void norm_head(const Kernels& kernels, const Array& weight, int row, float* head) const;

  Pool& pool_;
  int head_dim_;
  Array q_out_;
  KvPages k_cache_;
  KvPages v_cache_;
  BoundNorm norm_;
  Leaves leaves_;
  BoundLinear q_;
  BoundLinear k_;
  BoundLinear v_;
  RowForm form_;
  PreparedRows prepared_;
  Array cosine_;
  Array sine_;
  PagedRows paged_;
  Array q_norm_;
  Array k_norm_;
  Array row_fault_;
  float eps_;
  int32_t fault_code_;
  float q_scale_;
  size_t row_floats_;  // of all rows that q, k and v read
  size_t kv_floats_;   // of all rows' k, before their heads are placed
  StripeSpan stripes_;
  std::vector<int32_t> kv_rows_;  // of each row of the step its number among those owned, or -1
  std::vector<int32_t> owned_;    // rows of the step that are owned
  int num_owned_ = 0;
  int num_prepared_ = 0;  // rows that are normed
  bool copies_ = false;   // whether k and v read copies of those owned, which lie together
};

// What attention to keys 0..position of each row's slot is made of: which rows and heads go
// together, and the states of stripes. Queries lie in one array, or in one for each TP rank.
class AttentionUnits : public Op {
 protected:
  struct Inputs {
    PyObject *k_cache, *v_cache, *page_table, *row_slot, *positions;
    int head_dim;
    PyObject* kv_head_of;
  };
  AttentionUnits(Pool& pool, const std::vector<PyObject*>& queries, const Inputs& inputs);

  // Rows of one slot and last block, times query heads of one KV head.
  struct Unit {
    int row_start, row_stop, head_start, head_stop;
    int num_heads() const { return head_stop - head_start; }
    int num_pairs() const { return (row_stop - row_start) * num_heads(); }
  };
  void list_units(int rows);
  int num_pairs() const;  // of all units
  bool splits_stripes() const;
  // What kernels want of a unit; its queries as whole numbers in place `number`, 0 to kSweepUnits,
  // of a thread's own scratch, where pages are int8.
  AttentionUnit describe(const Thread& thread, const Unit& unit, size_t number = 0) const;
  // As the pool's, and room for those queries.
  void reserve(size_t common, size_t own);
  void run_stripe(const Thread& thread, size_t first, size_t step, int stripe, int place,
                  int num_places) const;
  // Of each unit its states in a thread's own scratch, stripe by stripe, `set` floats apart.
  struct Swept {
    float* states[kSweepUnits];
    size_t sets[kSweepUnits];
  };
  Swept sweep(const Thread& thread, size_t first, size_t step, size_t count,
              StripeSpan stripes) const;
  size_t sweep_floats() const;  // of a stripe
  // Whether every row is a unit by itself, in each group of heads.
  bool are_alone(int rows) const;
  // The unit that has that pair, of those of all units counted through; then its number there.
  size_t unit_of(int* pair) const;
  int rows_max() const { return static_cast<int>(queries_.front().size(0)); }
  int64_t num_heads() const { return kv_head_of_.size(0); }

  Pool& pool_;
  int head_dim_;
  std::deque<Array> queries_;
  KvPages k_cache_;
  KvPages v_cache_;
  PagedRows paged_;
  Array kv_head_of_;
  size_t state_floats_;
  size_t queries_at_ = 0;  // floats of a thread's own scratch before those queries
  // Of a head: row r's query is at `row_0` + r * stride.
  struct HeadQueries {
    const float* row_0;
    size_t stride;
  };
  std::vector<HeadQueries> heads_;
  std::vector<Unit> head_groups_;  // rows unset
  std::vector<Unit> units_;
  size_t num_units_ = 0;
  size_t stripe_units_ = 0;
};

// Each row attends to keys 0..position of its slot.
class Attention : public AttentionUnits {
 public:
  struct Arguments {
    PyObject *q, *k_cache, *v_cache, *page_table, *row_slot, *positions;
    int head_dim;
    PyObject *kv_head_of, *out, *row_fault;
    int fault_code;
  };
  Attention(Pool& pool, const Arguments& arguments);
  void run(int rows) override;

 private:
  void run_unit(const Thread& thread, const Unit& unit) const;
  void run_sweep(const Thread& thread, size_t first, size_t step, size_t count) const;
  void finish_pair(const Thread& thread, int item) const;
  void finish(const Unit& unit, int pair, const float* state) const;

  Array out_;
  Array row_fault_;
  int32_t fault_code_;
};

// This rank's nodes of a row-parallel linear: out = [nodes][rows][N], packed.
class RowLinear : public Op {
 public:
  RowLinear(Pool& pool, PyObject* a, PyObject* panels, int64_t num_outputs, PyObject* leaf_lengths,
            PyObject* merges, PyObject* out);
  void run(int rows) override;

 private:
  Pool& pool_;
  Array a_;
  Leaves leaves_;
  BoundLinear linear_;
  RowForm form_;
  PreparedRows prepared_;
  Array out_;
};

// Merges all ranks' nodes in tree order, adds the bias once and then the residual.
class Reduce : public Op {
 public:
  Reduce(Pool& pool, const std::vector<PyObject*>& sources,
         const std::vector<int64_t>& nodes_per_source, PyObject* merges, PyObject* bias,
         PyObject* x, int64_t num_outputs);
  void run(int rows) override;

 private:
  // Groups of 8 columns, of row after row.
  void run_groups(int rows, int start, int stop) const;
  void reduce_span(int row, int rows, int start, int stop) const;

  Pool& pool_;
  std::deque<Array> sources_;
  std::vector<int64_t> nodes_per_source_;
  std::vector<int32_t> merges_;
  Array x_;
  Array bias_;
  int num_outputs_;
};

// Norm, gate and up projections, out = SiLU(gate) * up.
class GateUp : public Op {
 public:
  struct Arguments {
    PyObject *x, *norm_weight;
    double eps;
    PyObject *gate_panels, *up_panels;
    int64_t num_outputs;
    PyObject *gate_bias, *up_bias, *leaf_lengths, *merges, *out, *row_fault;
    int fault_code;
  };
  GateUp(Pool& pool, const Arguments& arguments);
  void run(int rows) override;

 private:
  void run_panels(const Thread& thread, int rows, int start, int stop) const;

  Pool& pool_;
  Array out_;
  BoundNorm norm_;
  Leaves leaves_;
  BoundLinear gate_;
  BoundLinear up_;
  RowForm form_;
  PreparedRows prepared_;
  size_t up_floats_;  // of a thread's rows of up, before they meet gate's
};

// Final norm and vocabulary projection of the rows that are sampled: out[i] = row sample_rows[i].
class Head : public Op {
 public:
  struct Arguments {
    PyObject *x, *sample_rows, *norm_weight;
    double eps;
    PyObject* panels;
    int64_t num_outputs;
    PyObject *bias, *leaf_lengths, *merges, *out, *row_fault;
    int fault_code;
  };
  Head(Pool& pool, const Arguments& arguments);
  void run(int num_sampled) override;

 private:
  Pool& pool_;
  Array sample_rows_;
  Array out_;
  BoundNorm norm_;
  Leaves leaves_;
  BoundLinear linear_;
  RowForm form_;
  PreparedRows prepared_;
};

}  // namespace anyshard
