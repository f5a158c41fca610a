// Attention over pages of 32 tokens: eight interleaved stripes with an integer maximum each,
// merged by a fixed tree. K pages are [d][32] (lane = key), V pages are [32][d].
//
// A state is kStateHeader floats (M as int bits, l, out-of-range flag as int bits) and o[d].
#pragma once

#include "elementary.h"
#include "tile.h"

constexpr float kScoreLimit = 0x1p20f;

ANYSHARD_INLINE StateHeader read_header(const float* state) {
  StateHeader header;
  __builtin_memcpy(&header, state, sizeof header);
  return header;
}
ANYSHARD_INLINE void write_header(float* state, StateHeader header) {
  __builtin_memcpy(state, &header, sizeof header);
}

// Scores of Pairs queries against the 32 keys of a page, and probability-weighted sums of values:
// register tiles of pairs x vectors, indices named at compile time (see tile.h). Both ask for
// the next page (`next` floats on) as they go.
template <int Pairs, bool Asks>
struct ScoreTile {
  using PairIndices = typename CountTo<Pairs>::type;
  using Tile4 = Tile<Pairs, 4>;

  template <int... R>
  static ANYSHARD_INLINE void run(const Pair* pairs, const float* keys, ptrdiff_t next,
                                  int head_dim, float* scores, Sequence<R...> rows) {
    constexpr typename CountTo<4>::type vectors{};
    constexpr typename CountTo<Pairs * 4>::type all{};
    const float* q[Pairs] = {pairs[R].query...};
    Vec acc[Pairs * 4];
    Tile4::clear(acc, all);
    for (int d = 0; d < head_dim; ++d) {
      if (Asks) __builtin_prefetch(keys + next);
      if (Asks) __builtin_prefetch(keys + next + kLineFloats);
      step(acc, q, keys, d, rows, vectors);
      keys += kBlock;
    }
    Tile4::push(acc, scores, all);
  }

  template <int... R, int... V>
  static ANYSHARD_INLINE void step(Vec (&acc)[Pairs * 4], const float* const (&q)[Pairs],
                                   const float* keys, int d, Sequence<R...> rows, Sequence<V...>) {
    const Vec queries[Pairs] = {broadcast(q[R][d])...};
    (vector_step<V>(acc, queries, load(keys + V * kLanes), rows), ...);
  }
  template <int V, int... R>
  static ANYSHARD_INLINE void vector_step(Vec (&acc)[Pairs * 4], const Vec (&queries)[Pairs],
                                          Vec keys, Sequence<R...>) {
    ((acc[R * 4 + V] = fma(queries[R], keys, acc[R * 4 + V])), ...);
  }
};

template <int Pairs, int Vectors, bool Asks>
struct ValueTile {
  using PairTile = Tile<Pairs, Vectors>;

  // o[dims of the tile] = o * factor, then one chain over keys [0, count).
  template <int... R, int... V>
  static ANYSHARD_INLINE void run(const float* values, ptrdiff_t next, int head_dim,
                                  const float* weights, const float* factors, int count, float* out,
                                  size_t stride, Sequence<R...>, Sequence<V...> vectors) {
    Vec acc[Pairs * Vectors];
    (scale_row<R>(acc, out + R * stride, broadcast(factors[R]), vectors), ...);
    for (int j = 0; j < count; ++j) {
      if (Asks) __builtin_prefetch(values + next);
      if (Asks && Vectors > 2) __builtin_prefetch(values + next + kLineFloats);
      const Vec v[Vectors] = {load(values + V * kLanes)...};
      (PairTile::template row_step<R>(acc, v, broadcast(weights[R * kBlock + j]), vectors), ...);
      values += head_dim;
    }
    (store_row<R>(acc, out + R * stride, vectors), ...);
  }
  template <int Row, int... V>
  static ANYSHARD_INLINE void scale_row(Vec (&acc)[Pairs * Vectors], const float* out, Vec factor,
                                        Sequence<V...>) {
    ((acc[Row * Vectors + V] = mul(load(out + V * kLanes), factor)), ...);
  }
  template <int Row, int... V>
  static ANYSHARD_INLINE void store_row(const Vec (&acc)[Pairs * Vectors], float* out,
                                        Sequence<V...>) {
    (store(out + V * kLanes, acc[Row * Vectors + V]), ...);
  }
};

template <int Pairs, int Vectors, bool Asks>
inline __attribute__((noinline)) void add_value_tile(const float* values, ptrdiff_t next,
                                                     int head_dim, const float* weights,
                                                     const float* factors, int count, float* out,
                                                     size_t stride) {
  ValueTile<Pairs, Vectors, Asks>::run(values, next, head_dim, weights, factors, count, out, stride,
                                       typename CountTo<Pairs>::type{},
                                       typename CountTo<Vectors>::type{});
}

// All head_dim outputs of Pairs states, four vectors of dims at a time.
template <int Pairs, bool Asks>
inline void add_values(const float* values, ptrdiff_t next, int head_dim, const float* weights,
                       const float* factors, int count, float* out, size_t stride) {
  int d = 0;
  for (; d + 32 <= head_dim; d += 32) {
    add_value_tile<Pairs, 4, Asks>(values + d, next, head_dim, weights, factors, count, out + d,
                                   stride);
  }
  for (; d + 8 <= head_dim; d += 8) {
    add_value_tile<Pairs, 1, Asks>(values + d, next, head_dim, weights, factors, count, out + d,
                                   stride);
  }
}

// scores[32] become probabilities; returns the factor for what the state held before.
inline float update_header(float* scores, int num_visible, float* state) {
  StateHeader header = read_header(state);
  const Vec lowest = broadcast(-__builtin_inff());
  Vec s[4];
  Vec highest = lowest;
  IntVec bad = broadcast_int(0);
  for (int v = 0; v < 4; ++v) {
    const IntVec visible = first_lanes(num_visible - 8 * v);
    s[v] = load(scores + 8 * v);
    bad = or_mask(bad, and_mask(visible, not_less_equal(absolute(s[v]), broadcast(kScoreLimit))));
    s[v] = select(visible, s[v], lowest);
  }
  if (any(bad)) {
    header.out_of_range = 1;
    for (int v = 0; v < 4; ++v) {
      s[v] = select(first_lanes(num_visible - 8 * v), zero(), lowest);
    }
  }
  for (int v = 0; v < 4; ++v) highest = max(s[v], highest);
  const float top = largest(highest);
  int32_t high = static_cast<int32_t>(top);  // towards zero; |top| <= 2^20
  if (static_cast<float>(high) < top) ++high;
  if (header.high > high) high = header.high;
  Vec p[4];
  for (int v = 0; v < 4; ++v) {
    // invisible lanes: exp2 of -infinity would be NaN minus NaN, so they never enter
    const IntVec visible = first_lanes(num_visible - 8 * v);
    const Vec t = sub(select(visible, s[v], zero()), broadcast(static_cast<float>(high)));
    p[v] = select(visible, exp2_vec(t), zero());
    store(scores + 8 * v, p[v]);
  }
  const float factor = power_of_two(header.high - high);
  const float sum = halving_sum(add(add(p[0], p[2]), add(p[1], p[3])));
  header.total = header.total * factor + sum;
  header.high = high;
  write_header(state, header);
  return factor;
}

// One page for Pairs consecutive pairs; every pair sees `num_visible[r]` of its keys.
template <int Pairs, bool Asks>
inline __attribute__((noinline)) void visit_page(const Pair* pairs, bool is_last, const float* keys,
                                                 const float* values, ptrdiff_t next, int head_dim,
                                                 float* states, size_t stride) {
  alignas(32) float scores[Pairs * kBlock];
  float factors[Pairs];
  ScoreTile<Pairs, Asks>::run(pairs, keys, next, head_dim, scores, typename CountTo<Pairs>::type{});
  int common = kBlock;
  for (int r = 0; r < Pairs; ++r) {
    const int visible = is_last ? pairs[r].num_visible : kBlock;
    factors[r] = update_header(scores + r * kBlock, visible, states + r * stride);
    if (visible < common) common = visible;
  }
  float* out = states + kStateHeader;
  add_values<Pairs, Asks>(values, next, head_dim, scores, factors, common, out, stride);
  for (int r = 0; is_last && r < Pairs; ++r) {
    const int rest = pairs[r].num_visible - common;
    if (rest == 0) continue;
    const float one = 1.0f;  // o * 1 keeps the bits: the chain goes on
    add_values<1, false>(values + common * head_dim, 0, head_dim, scores + r * kBlock + common,
                         &one, rest, out + r * stride, stride);
  }
}

using VisitFunction = void (*)(const Pair*, bool, const float*, const float*, ptrdiff_t, int,
                               float*, size_t);

// [asks for the next page][pairs - 1]
constexpr VisitFunction kVisits[2][3] = {
    {visit_page<1, false>, visit_page<2, false>, visit_page<3, false>},
    {visit_page<1, true>, visit_page<2, true>, visit_page<3, true>},
};

// From a page to the one that the stripe visits after it, asked for while this one is computed: 0
// at the stripe's end.
inline ptrdiff_t floats_to_next_page(const AttentionUnit& unit, int block) {
  if (block + kStripes > unit.last_block) return 0;
  const ptrdiff_t pages = ptrdiff_t{unit.pages[block + kStripes]} - unit.pages[block];
  return pages * static_cast<ptrdiff_t>(unit.page_stride);
}

inline void visit_block(const AttentionUnit& unit, int block, ptrdiff_t next, float* states) {
  const size_t stride = static_cast<size_t>(unit.head_dim) + kStateHeader;
  const size_t page = static_cast<size_t>(unit.pages[block]) * unit.page_stride;
  for (int r = 0; r < unit.num_pairs; r += 3) {
    const int pairs = unit.num_pairs - r < 3 ? unit.num_pairs - r : 3;
    // of a stripe only the first tile asks (Zen 3: one row +20..40 % beyond the caches, a chunk of
    // rows no loss); a row that is alone does not (Zen 4: -25 %)
    kVisits[r == 0 && next != 0][pairs - 1](
        unit.pairs + r, block == unit.last_block, unit.k_head + page, unit.v_head + page, next,
        unit.head_dim, states + static_cast<size_t>(r) * stride, stride);
  }
}

// States before their first block; where there is none, what they hold is not looked at.
inline void open_states(const AttentionUnit& unit, bool is_empty, float* states) {
  const size_t stride = static_cast<size_t>(unit.head_dim) + kStateHeader;
  for (int r = 0; r < unit.num_pairs; ++r) {
    float* state = states + static_cast<size_t>(r) * stride;
    for (size_t i = 0; !is_empty && i < stride; i += 8) store(state + i, zero());
    write_header(state, {kEmptyMax, 0.0f, 0});
  }
}

inline void attention_page(const AttentionUnit& unit, int block, float* states) {
  if (block < kStripes) open_states(unit, false, states);
  visit_block(unit, block, 0, states);
}

inline void attention_stripe(const AttentionUnit& unit, int stripe, float* states) {
  const int first = stripe_of(stripe);
  open_states(unit, first > unit.last_block, states);
  for (int block = first; block <= unit.last_block; block += kStripes) {
    visit_block(unit, block, floats_to_next_page(unit, block), states);
  }
}

// Where the right one is empty the rule comes to left + 0, which a second time changes nothing. The
// left one is not empty then, or both are: stripe_of deals blocks to left ones first.
inline void attention_merge(int head_dim, int num_pairs, float* left, const float* right,
                            size_t stride) {
  for (int r = 0; r < num_pairs; ++r, left += stride, right += stride) {
    StateHeader a = read_header(left);
    const StateHeader b = read_header(right);
    if (b.high == kEmptyMax) {
      for (int d = kStateHeader; a.high != kEmptyMax && d < head_dim + kStateHeader; d += 8) {
        store(left + d, add(load(left + d), zero()));
      }
      continue;
    }
    const int32_t high = a.high > b.high ? a.high : b.high;
    const float fa = power_of_two(a.high - high);
    const float fb = power_of_two(b.high - high);
    a.total = a.total * fa + b.total * fb;
    a.high = high;
    a.out_of_range |= b.out_of_range;
    write_header(left, a);
    for (int d = kStateHeader; d < head_dim + kStateHeader; d += 8) {
      store(left + d, add(mul(load(left + d), broadcast(fa)), mul(load(right + d), broadcast(fb))));
    }
  }
}

inline bool attention_finish(int head_dim, const float* state, float* out) {
  const StateHeader header = read_header(state);
  const bool fine = header.out_of_range == 0;
  const Vec total = broadcast(header.total);
  const Vec nan = broadcast(__builtin_nanf(""));
  for (int d = 0; d < head_dim; d += 8) {
    store(out + d, fine ? div(load(state + kStateHeader + d), total) : nan);
  }
  return fine;
}
