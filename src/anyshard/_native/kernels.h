// The table of kernels that each body (AVX2, scalar) exports, and the plain records they take.
//
// Kernels know no threads, no Python and no allocation: the ops (ops.h) hand each thread a range.
// Letters: R rows, D hidden, N outputs, K inputs, P panels of 8 outputs, d head dim.
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstdint>

#include "coefficients.h"

// A wrong build on purpose (CMakeLists.txt, ANYSHARD_MUTANT) goes through: checks must see it.
#if !defined(ANYSHARD_MUTANT)
#if defined(__FAST_MATH__) || __FINITE_MATH_ONLY__ || defined(__ASSOCIATIVE_MATH__) || \
    defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#error "anyshard computes in a written order: compile it without -ffast-math and its parts"
#endif
static_assert(FLT_EVAL_METHOD == 0, "float arithmetic must round to float: no x87");
#endif

namespace anyshard {

// Counts that decide bits (ops/coefficients.py says of what). Kernels are written for these.
using coefficients::kBlock;
using coefficients::kInt8Most;
using coefficients::kKvGroup;
using coefficients::kKvWhole;
using coefficients::kStripes;
static_assert(kBlock == 32 && kKvGroup == 32 && kStripes == 8 && coefficients::kNormLanes == 32,
              "kernels hold a block, a group and the lanes of a norm in four vectors");

constexpr int kLanes = 8;         // outputs of one panel
constexpr int kMaxDepth = 32;     // most open tree nodes while a leaf program runs
constexpr int kMaxHeadDim = 256;  // dims of one head
constexpr int kMaxPairs = 32;     // (row, query head) pairs of one attention unit
constexpr int kSweepUnits = 4;    // KV heads that one row goes through side by side, block by block
constexpr int kStateHeader = 8;   // floats before o[d] in an attention state
constexpr int kRowBlock = 256;    // rows that share one pass over a group of panels
constexpr int kLineFloats = 16;   // floats of a cache line
constexpr int kMaxTile = 12;      // vectors of the largest register tile
constexpr int kMaxNodes = 1024;   // nodes of one reduce, all ranks together

// The stripe of a block, or of a stripe its first block: three bits back to front.
inline int stripe_of(int block) { return ((block & 1) << 2) | (block & 2) | ((block >> 2) & 1); }

// The stripes whose blocks a rank keeps.
struct StripeSpan {
  int first = 0;
  int stop = kStripes;

  int size() const { return stop - first; }
  bool is_all() const { return size() == kStripes; }
  bool holds(int block) const {
    const int stripe = stripe_of(block);
    return first <= stripe && stripe < stop;
  }
};

// What an attention state begins with. The maximum of one that has seen no key:
constexpr int32_t kEmptyMax = -(1 << 30);
struct StateHeader {
  int32_t high;
  float total;
  int32_t out_of_range;
};

// Post-order leaf program: after leaf i, merges[i] times top = second + top.
struct LeafProgram {
  const int32_t* starts;  // k at which each leaf begins
  const int32_t* lengths;
  const int32_t* merges;
  int num_leaves;
  int num_nodes;  // stack entries left at the end
};

// How the weights of a matrix lie in memory; every value is widened exactly to float32.
//   kFloat32, kBfloat16, kFloat16: [P][K][8]
//   kQ8: [P/2][K/32] blocks { int8 q[8][16][4]; float16 scale[16] }: q[k / 4][n][k % 4] * scale[n]
//   kInt8: the same blocks, one a leaf, zeros where a leaf is short, no q of -128. These are not
//   widened: a linear multiplies them with rows that were quantised as well (quantize.h).
enum class Storage { kFloat32, kBfloat16, kFloat16, kQ8, kInt8 };

inline bool in_blocks(Storage storage) {
  return storage == Storage::kQ8 || storage == Storage::kInt8;
}

constexpr int kQ8Inputs = 32;   // k of a block
constexpr int kQ8Outputs = 16;  // outputs of a block: two panels
constexpr int kQ8Values = kQ8Inputs * kQ8Outputs;
constexpr int kQ8Bytes = kQ8Values + 2 * kQ8Outputs;

// A row that int8 linears read: q of every leaf [32], then all scales (float), all offsets (int32,
// -128 times the leaf's sum of q), and |q| of every leaf [32]. VNNI reads no |q|: four rows and the
// weights that go by stay in L1.
inline size_t quantized_row_floats(int num_leaves) {
  const size_t bytes = static_cast<size_t>(num_leaves) * (2 * kQ8Inputs + 2 * sizeof(float));
  return (bytes + 4 * kLineFloats - 1) / (4 * kLineFloats) * kLineFloats;
}

// Bytes of a panel (a pair of them, blocks) over num_inputs k.
inline size_t panel_bytes(Storage storage, int64_t num_inputs) {
  const size_t k = static_cast<size_t>(num_inputs);
  if (in_blocks(storage)) return k / kQ8Inputs * kQ8Bytes;
  return k * kLanes * (storage == Storage::kFloat32 ? 4 : 2);
}

// y[n] = tree over leaves of fma chains over k.
struct Linear {
  const uint8_t* panels;
  size_t panel_stride;  // bytes from a panel (a pair of them, blocks) to the next
  Storage storage;
  int num_inputs;  // kInt8: those that pad a leaf count
  int num_outputs;
  LeafProgram program;
};

// Where a linear writes: out[node * node_stride + row * row_stride + n - first_output].
struct Target {
  float* out;
  size_t node_stride;
  size_t row_stride;
  int first_output;
  const float* bias;  // [N], added after the tree, or null
};

struct Norm {
  const float* weight;
  float eps;
  int width;
};

struct Rope {
  const float* cosine;  // [d/2] of this row's position
  const float* sine;
  int head_dim;
};

// How K and V lie in a page of one KV head; the rows of a page hold a dim of all its keys (K), or a
// key (V).
//   kFloat32: K [d][32], V [32][d]
//   kInt8: K [d / 2][32][2], V [16][d][2] of int8, so that what a product of pairs takes lies side
//   by side, then float16 scales [d / kKvGroup, rounded up][32 keys]
enum class KvStorage { kFloat32, kInt8 };

// Where element d of key `lane` lies in an int8 page, in bytes from its start.
inline size_t kv_key_at(int64_t d, int64_t lane) {
  return static_cast<size_t>(d / 2 * 2 * kBlock + 2 * lane + d % 2);
}
inline size_t kv_value_at(int64_t head_dim, int64_t d, int64_t lane) {
  return static_cast<size_t>(lane / 2 * 2 * head_dim + 2 * d + lane % 2);
}

// Bytes of a page of one KV head.
inline size_t kv_page_bytes(KvStorage storage, int64_t head_dim) {
  const size_t values = static_cast<size_t>(head_dim) * kBlock;
  const size_t groups = static_cast<size_t>((head_dim + kKvGroup - 1) / kKvGroup);
  return storage == KvStorage::kFloat32 ? 4 * values : values + 2 * kBlock * groups;
}

// One (row, query head) of an attention unit.
struct Pair {
  const float* query;    // [d], scaled by log2(e)/sqrt(d)
  int num_visible;       // keys of the last block that this row sees, 1..32
  const int16_t* whole;  // over int8 pages: query by groups of kKvGroup as whole numbers,
  const float* scales;   // and what one of them is worth, [d / kKvGroup, rounded up]
};

// Rows of one sequence with the same last block, and query heads of one KV head.
struct AttentionUnit {
  const uint8_t* k_head;  // of page 0
  const uint8_t* v_head;
  KvStorage storage;
  size_t page_stride;    // bytes between pages
  const int32_t* pages;  // page of block b
  int last_block;
  int head_dim;
  int num_pairs;
  Pair pairs[kMaxPairs];
};

struct Sampler {
  float temperature;
  uint32_t key[2];
  uint32_t position;
  uint32_t choice;
  uint32_t stream;
  const uint8_t* mask;  // [V], zero forbids, or null
};

struct Best {
  int64_t index;  // -1: the largest value is not finite
  float value;
};

// Of a row of logits; NaN and -1 if one of them is not finite. margin: of the chances of the best
// two, first and second; second -1 of a row of one.
struct Spread {
  float entropy;
  float margin;
  int64_t first;
  int64_t second;
};

struct Kernels {
  // One row; returns false if the sum of squares is not finite. out may be x.
  bool (*norm)(const Norm&, const float* x, float* out);
  // Leaves [start, stop) of a row as int8 linears read it, into quantized_row_floats() floats.
  void (*quantize)(const LeafProgram&, int start, int stop, const float* x, float* row);
  // Up to kKvGroup floats as an int8 page holds them: q[kKvGroup], zeros past `count`; returns the
  // float16 scale.
  uint32_t (*quantize_group)(const float* x, int count, uint8_t* q);
  // A query as int8 pages want it: see Pair.
  void (*quantize_query)(const float* query, int head_dim, int16_t* whole, float* scales);
  // Rows x panels [panel_start, panel_stop). scratch: linear_scratch() floats.
  void (*linear)(const Linear&, const float* x, size_t x_stride, int num_rows, int panel_start,
                 int panel_stop, const Target&, float* scratch);
  // The same in int8 arithmetic: x are quantised rows, x_stride floats apart.
  void (*linear_int8)(const Linear&, const float* x, size_t x_stride, int num_rows, int panel_start,
                      int panel_stop, const Target&);
  // gate = SiLU(gate) * up
  void (*silu_product)(float* gate, const float* up, int count);
  // One head: out = rope(x), times scale if it is not null. out may be x.
  void (*rope)(const Rope&, const float* x, const float* scale, float* out);
  // Fills states[pair] (stride head_dim + kStateHeader floats) for one stripe; of one that has no
  // block only the header, and no more of it is read.
  void (*attention_stripe)(const AttentionUnit&, int stripe, float* states);
  // One block of up to kSweepUnits units of one row; the next call's is `step` blocks on.
  // states[i]: of unit i's pairs, in the block's stripe. Null: only whole stripes can be had.
  void (*attention_block)(const AttentionUnit* units, int num_units, int block, int step,
                          float* const* states);
  // left = merge(left, right), num_pairs states with the given stride.
  void (*attention_merge)(int head_dim, int num_pairs, float* left, const float* right,
                          size_t stride);
  // out = o / l; false, and NaN in out, if a score was out of range.
  bool (*attention_finish)(int head_dim, const float* state, float* out);
  // x[i] += merges over nodes[j][i] (+ bias[i]), i < count.
  void (*reduce)(const float* const* nodes, const int32_t* merges, int num_nodes, const float* bias,
                 float* x, int count);
  // out[i] = e^x[i], x <= 0. out may be x.
  void (*exp_into)(const float* x, float* out, int64_t count);
  Best (*argmax)(const float* logits, int64_t count);
  Best (*gumbel_argmax)(const Sampler&, const float* logits, int64_t count);
  Spread (*spread)(const float* logits, int64_t count);
  // See digest.h.
  uint64_t (*digest)(const float* x, int count, uint32_t first, const int32_t* keys);
  void (*digest_panel)(const Linear&, int panel, const int32_t* keys, float* scratch,
                       uint64_t* out);
  // A row becomes what an int8 wire makes of it; `wire` gets its bytes (wire.h), or is null.
  void (*wire_round)(float* x, int width, uint8_t* wire);
  void (*wire_decode)(const uint8_t* wire, int width, float* x);
};

// Panels of one register tile. One and two rows: four streams, eight of 16-bit weights at one row
// (bfloat16 +15..25 %, float16 +5..15 %), of short float32 panels one (linear.h, group_of). More
// rows: three. Int8: one pair of panels.
constexpr int kFewRows = 2;
constexpr int kMostPanels = 4;    // of any other tile
constexpr int kNarrowPanels = 8;  // of a tile of one row and 16-bit weights
// From so many rows on, panels are widened once for all of them (bfloat16 0.84 -> 0.98 of float32's
// speed at 128 rows, Q8_0 0.8 -> 1.0).
constexpr int kManyRowsQ8 = 24;
constexpr int kManyRows = 64;
inline int panel_group(Storage storage, int num_rows) {
  if (storage == Storage::kInt8) return 2;
  const bool narrow = storage == Storage::kBfloat16 || storage == Storage::kFloat16;
  if (num_rows == 1 && narrow) return kNarrowPanels;
  return num_rows <= kFewRows ? kMostPanels : 3;
}

// Floats of the panels that a linear holds widened while many rows pass over them.
inline size_t linear_scratch(const Linear& linear) {
  if (linear.storage == Storage::kFloat32 || linear.storage == Storage::kInt8) return 0;
  return static_cast<size_t>(linear.num_inputs) * kLanes * kMostPanels;
}

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kVnniKernels;  // AVX2's, but for linear_int8 and attention over int8 pages
#endif

}  // namespace anyshard
