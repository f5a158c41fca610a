// Attention over pages of 32 tokens: eight interleaved stripes with an integer maximum each,
// merged by a fixed tree. K pages are [d][32] (lane = key), V pages are [32][d]; those of int8 have
// pairs of dims, or of keys, side by side (kernels.h, KvStorage).
//
// A state is kStateHeader floats (M as int bits, l, out-of-range flag as int bits) and o[d].
#pragma once

#include "elementary.h"
#include "quantize.h"
#include "tile.h"

ANYSHARD_INLINE StateHeader read_header(const float* state) {
  StateHeader header;
  __builtin_memcpy(&header, state, sizeof header);
  return header;
}
ANYSHARD_INLINE void write_header(float* state, StateHeader header) {
  __builtin_memcpy(state, &header, sizeof header);
}

// Of a row of a tile, which is so many cache lines, asks memory early.
template <int Lines, int Locality>
ANYSHARD_INLINE void ask(const uint8_t* p) {
  __builtin_prefetch(p, 0, Locality);
  if (Lines > 1) __builtin_prefetch(p + kLineFloats * 4, 0, Locality);
}

// Into L1 what comes next, and into L2 what comes after that: L1 has too few misses open for
// memory.
ANYSHARD_INLINE void ask_twice(const uint8_t* p, ptrdiff_t next) {
  __builtin_prefetch(p + next, 0, 3);
  __builtin_prefetch(p + 2 * next, 0, 2);
}

// Scores of Pairs queries against the 32 keys of a page, and probability-weighted sums of values:
// register tiles of pairs x vectors, indices named at compile time (see tile.h). Both ask for
// the next page (`next` bytes on) as they go, float32 into L2, int8 into L1 and the one after into
// L2.
template <int Pairs, bool Asks>
struct ScoreTile {
  using Tile4 = Tile<Pairs, 4>;

  template <int... R>
  static ANYSHARD_INLINE void run(const Pair* pairs, const uint8_t* keys, ptrdiff_t next,
                                  int head_dim, float* scores, Sequence<R...> rows) {
    constexpr typename CountTo<4>::type vectors{};
    constexpr typename CountTo<Pairs * 4>::type all{};
    const float* q[Pairs] = {pairs[R].query...};
    Vec acc[Pairs * 4];
    Tile4::clear(acc, all);
    for (int d = 0; d < head_dim; ++d) {
      if (Asks) ask<2, 2>(keys + next);
      step(acc, q, reinterpret_cast<const float*>(keys), d, rows, vectors);
      keys += kBlock * sizeof(float);
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
  // o[dims of the tile] = o * factor, then one chain over keys [0, count).
  template <int... R, int... V>
  static ANYSHARD_INLINE void run(const uint8_t* values, ptrdiff_t next, int head_dim,
                                  const float* weights, const float* factors, int count, float* out,
                                  size_t stride, Sequence<R...>, Sequence<V...> vectors) {
    Vec acc[Pairs * Vectors];
    (scale_row<R>(acc, out + R * stride, broadcast(factors[R]), vectors), ...);
    for (int j = 0; j < count; ++j) {
      if (Asks) ask<Vectors / 2, 2>(values + next);
      // vector by vector: sums, weights and one of values are all the registers there are
      const Vec w[Pairs] = {broadcast(weights[R * kBlock + j])...};
      (vector_step<V>(acc, w, load(reinterpret_cast<const float*>(values) + V * kLanes),
                      typename CountTo<Pairs>::type{}),
       ...);
      values += head_dim * static_cast<ptrdiff_t>(sizeof(float));
    }
    (store_row<R>(acc, out + R * stride, vectors), ...);
  }
  template <int V, int... R>
  static ANYSHARD_INLINE void vector_step(Vec (&acc)[Pairs * Vectors], const Vec (&w)[Pairs],
                                          Vec value, Sequence<R...>) {
    ((acc[R * Vectors + V] = fma(w[R], value, acc[R * Vectors + V])), ...);
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

// The same of int8 pages: sums of products of whole numbers, exact in any order, two dims of 8 keys
// or two keys of 8 dims to an instruction.
template <int Pairs, int Vectors>
struct WholeTile {
  template <int... I>
  static ANYSHARD_INLINE void clear(IntVec (&acc)[Pairs * Vectors], Sequence<I...>) {
    ((acc[I] = broadcast_int(0)), ...);
  }
  // bytes: pairs of 8 lanes, vector by vector; whole[R]: the pair that row R multiplies them with.
  template <int... R, int... V>
  static ANYSHARD_INLINE void step(IntVec (&acc)[Pairs * Vectors], const uint8_t* bytes,
                                   const int16_t* const (&whole)[Pairs], int at,
                                   Sequence<R...> rows, Sequence<V...>) {
    const IntVec w[Pairs] = {broadcast_pair(whole[R] + at)...};
    (vector_step<V>(acc, w, load_byte_pairs(bytes + V * 2 * kLanes), rows), ...);
  }
  template <int V, int... R>
  static ANYSHARD_INLINE void vector_step(IntVec (&acc)[Pairs * Vectors], const IntVec (&w)[Pairs],
                                          IntVec bytes, Sequence<R...>) {
    ((acc[R * Vectors + V] = add_pairs(acc[R * Vectors + V], w[R], bytes)), ...);
  }
};

template <int Pairs, bool Asks>
struct Int8Scores {
  using Tile4 = WholeTile<Pairs, 4>;

  template <int... R>
  static ANYSHARD_INLINE void run(const Pair* pairs, const uint8_t* keys, ptrdiff_t next,
                                  int head_dim, float* scores, Sequence<R...> rows) {
    constexpr typename CountTo<4>::type vectors{};
    const int16_t* q[Pairs] = {pairs[R].whole...};
    const uint8_t* scales = keys + head_dim * kBlock;
    for (int first = 0; first < head_dim; first += kKvGroup, scales += 2 * kBlock) {
      const int stop = first + kKvGroup < head_dim ? first + kKvGroup : head_dim;
      IntVec acc[Pairs * 4];
      Tile4::clear(acc, typename CountTo<Pairs * 4>::type{});
      for (int d = first; d < stop; d += 2) {
        if (Asks) ask_twice(keys, next);
        Tile4::step(acc, keys, q, d, rows, vectors);
        keys += 2 * kBlock;
      }
      const int group = first / kKvGroup;
      (add_scaled<R>(acc, scales, broadcast(pairs[R].scales[group]), first == 0, scores, vectors),
       ...);
    }
  }
  // scores = the sum of these dims times both scales, plus what is there (first: +0).
  template <int Row, int... V>
  static ANYSHARD_INLINE void add_scaled(const IntVec (&acc)[Pairs * 4], const uint8_t* scales,
                                         Vec scale, bool first, float* scores, Sequence<V...>) {
    float* row = scores + Row * kBlock;
    (store(row + V * kLanes,
           fma(to_float(acc[Row * 4 + V]), mul(scale, load_float16(scales + 2 * V * kLanes)),
               first ? zero() : load(row + V * kLanes))),
     ...);
  }
};

// What the values of a page are multiplied with, of Pairs pairs and each group of dims.
template <int Pairs>
struct WholeWeights {
  static constexpr int kGroups = kMaxHeadDim / kKvGroup;
  alignas(32) int16_t whole[kGroups][Pairs][kBlock];
  alignas(32) float scales[kGroups][kLanes];  // what one of them is worth, by pair
};

// Probabilities times the scales of V, as whole numbers: of a pair and group the largest is 32767.
// Keys that are not seen weigh nothing, whatever their scale is. Sums below 2^-100 are nothing.
template <int Pairs>
inline void weigh(const Pair* pairs, bool is_last, const float* scores, const uint8_t* scales,
                  int head_dim, WholeWeights<Pairs>& weights) {
  const Vec limit = broadcast(static_cast<float>(kKvWhole));
  const IntVec least = bits(broadcast(coefficients::kKvLeastWeight));
  for (int group = 0; group * kKvGroup < head_dim; ++group, scales += 2 * kBlock) {
    Vec w[Pairs * 4];
    alignas(32) int32_t tops[kLanes] = {};
    for (int r = 0; r < Pairs; ++r) {
      const int num_visible = is_last ? pairs[r].num_visible : kBlock;
      IntVec highest = broadcast_int(0);
      for (int v = 0; v < 4; ++v) {
        Vec value =
            mul(load(scores + r * kBlock + v * kLanes), load_float16(scales + 2 * v * kLanes));
        if (is_last) value = select(first_lanes(num_visible - v * kLanes), value, zero());
        w[r * 4 + v] = value;
        highest = max_int(highest, bits(absolute(value)));
      }
      tops[r] = largest_int(highest);
    }
    const IntVec top = load_int(tops);
    const Vec most = from_bits(top);
    const IntVec is_finite = greater_int(broadcast_int(0x7f800000), top);
    const IntVec is_used = and_mask(is_finite, greater_int(top, least));
    alignas(32) float factors[kLanes];
    store(factors, select(is_used, div(limit, most), zero()));
    const Vec worth = select(is_used, div(most, limit), zero());
    store(weights.scales[group], select(is_finite, worth, broadcast(__builtin_nanf(""))));
    for (int r = 0; r < Pairs; ++r) {
      int16_t* whole = weights.whole[group][r];
      if (factors[r] == 0.0f) {
        __builtin_memset(whole, 0, kBlock * sizeof(int16_t));
        continue;
      }
      const Vec factor = broadcast(factors[r]);
      for (int v = 0; v < 4; v += 2) {
        store_shorts(whole + v * kLanes, to_int(mul(w[r * 4 + v], factor)),
                     to_int(mul(w[r * 4 + v + 1], factor)));
      }
    }
  }
}

template <int Pairs, int Vectors, bool Asks>
struct Int8Values {
  using PairTile = WholeTile<Pairs, Vectors>;

  // o[dims of the tile] = o * factor, plus the sum over all keys times what one of it is worth.
  template <int... R, int... V>
  static ANYSHARD_INLINE void run(const uint8_t* values, ptrdiff_t next, int head_dim,
                                  const int16_t (&whole)[Pairs][kBlock], const float* worth,
                                  const float* factors, float* out, size_t stride,
                                  Sequence<R...> rows, Sequence<V...> vectors) {
    const int16_t* w[Pairs] = {whole[R]...};
    IntVec acc[Pairs * Vectors];
    PairTile::clear(acc, typename CountTo<Pairs * Vectors>::type{});
    for (int j = 0; j < kBlock; j += 2) {
      if (Asks) ask_twice(values, next);
      PairTile::step(acc, values, w, j, rows, vectors);
      values += 2 * head_dim;
    }
    (add_row<R>(acc, broadcast(worth[R]), broadcast(factors[R]), out + R * stride, vectors), ...);
  }
  template <int Row, int... V>
  static ANYSHARD_INLINE void add_row(const IntVec (&acc)[Pairs * Vectors], Vec worth, Vec factor,
                                      float* out, Sequence<V...>) {
    (store(out + V * kLanes,
           fma(to_float(acc[Row * Vectors + V]), worth, mul(load(out + V * kLanes), factor))),
     ...);
  }
};

template <int Pairs, int Vectors, bool Asks>
inline __attribute__((noinline)) void add_value_tile(const uint8_t* values, ptrdiff_t next,
                                                     int head_dim, const float* weights,
                                                     const float* factors, int count, float* out,
                                                     size_t stride) {
  ValueTile<Pairs, Vectors, Asks>::run(values, next, head_dim, weights, factors, count, out, stride,
                                       typename CountTo<Pairs>::type{},
                                       typename CountTo<Vectors>::type{});
}

// All head_dim outputs of Pairs states, four vectors of dims at a time.
template <int Pairs, bool Asks>
inline void add_values(const uint8_t* values, ptrdiff_t next, int head_dim, const float* weights,
                       const float* factors, int count, float* out, size_t stride) {
  int d = 0;
  for (; d + 32 <= head_dim; d += 32) {
    add_value_tile<Pairs, 4, Asks>(values + d * sizeof(float), next, head_dim, weights, factors,
                                   count, out + d, stride);
  }
  for (; d + 8 <= head_dim; d += 8) {
    add_value_tile<Pairs, 1, Asks>(values + d * sizeof(float), next, head_dim, weights, factors,
                                   count, out + d, stride);
  }
}

template <int Pairs, int Vectors, bool Asks>
inline __attribute__((noinline)) void add_int8_tile(const uint8_t* values, ptrdiff_t next,
                                                    int head_dim,
                                                    const int16_t (&whole)[Pairs][kBlock],
                                                    const float* worth, const float* factors,
                                                    float* out, size_t stride) {
  Int8Values<Pairs, Vectors, Asks>::run(values, next, head_dim, whole, worth, factors, out, stride,
                                        typename CountTo<Pairs>::type{},
                                        typename CountTo<Vectors>::type{});
}

// scores[32] become probabilities; returns the factor for what the state held before. Whole: every
// key is visible, as in all pages but the last.
template <bool Whole>
ANYSHARD_INLINE float update_header(float* scores, int num_visible, float* state) {
  StateHeader header = read_header(state);
  const Vec lowest = broadcast(-__builtin_inff());
  const auto visible = [num_visible](int v) { return first_lanes(num_visible - 8 * v); };
  Vec s[4];
  Vec highest = lowest;
  IntVec bad = broadcast_int(0);
  for (int v = 0; v < 4; ++v) {
    s[v] = load(scores + 8 * v);
    const IntVec is_bad = not_less_equal(absolute(s[v]), broadcast(coefficients::kScoreLimit));
    bad = or_mask(bad, Whole ? is_bad : and_mask(visible(v), is_bad));
    if (!Whole) s[v] = select(visible(v), s[v], lowest);
  }
  if (__builtin_expect(any(bad), 0)) {
    header.out_of_range = 1;
    for (int v = 0; v < 4; ++v) s[v] = Whole ? zero() : select(visible(v), zero(), lowest);
  }
  for (int v = 0; v < 4; ++v) highest = max(s[v], highest);
  const float top = largest(highest);
  int32_t high = static_cast<int32_t>(top);  // towards zero; |top| <= 2^20
  if (static_cast<float>(high) < top) ++high;
  if (header.high > high) high = header.high;
  Vec p[4];
  for (int v = 0; v < 4; ++v) {
    // invisible lanes: exp2 of -infinity would be NaN minus NaN, so they never enter
    const Vec seen = Whole ? s[v] : select(visible(v), s[v], zero());
    p[v] = exp2_vec(sub(seen, broadcast(static_cast<float>(high))));
    if (!Whole) p[v] = select(visible(v), p[v], zero());
    store(scores + 8 * v, p[v]);
  }
  const float factor = power_of_two(header.high - high);
  const float sum = halving_sum(add(add(p[0], p[2]), add(p[1], p[3])));
  header.total = header.total * factor + sum;
  header.high = high;
  write_header(state, header);
  return factor;
}

template <int Pairs, bool Asks>
inline __attribute__((noinline)) void score_tile(const Pair* pairs, const uint8_t* keys,
                                                 ptrdiff_t next, int head_dim, float* scores) {
  ScoreTile<Pairs, Asks>::run(pairs, keys, next, head_dim, scores, typename CountTo<Pairs>::type{});
}
template <int Pairs, bool Asks>
inline __attribute__((noinline)) void int8_score_tile(const Pair* pairs, const uint8_t* keys,
                                                      ptrdiff_t next, int head_dim, float* scores) {
  Int8Scores<Pairs, Asks>::run(pairs, keys, next, head_dim, scores,
                               typename CountTo<Pairs>::type{});
}

// o of Pairs pairs: what the page adds, the keys that all of them see first.
template <int Pairs, bool Asks>
inline void value_tile(const Pair* pairs, bool is_last, const uint8_t* values, ptrdiff_t next,
                       int head_dim, const float* scores, const float* factors, float* states,
                       size_t stride) {
  int common = kBlock;
  for (int r = 0; is_last && r < Pairs; ++r) {
    if (pairs[r].num_visible < common) common = pairs[r].num_visible;
  }
  float* out = states + kStateHeader;
  add_values<Pairs, Asks>(values, next, head_dim, scores, factors, common, out, stride);
  for (int r = 0; is_last && r < Pairs; ++r) {
    const int rest = pairs[r].num_visible - common;
    if (rest == 0) continue;
    const float one = 1.0f;  // o * 1 keeps the bits: the chain goes on
    add_values<1, false>(values + static_cast<size_t>(common * head_dim) * sizeof(float), 0,
                         head_dim, scores + r * kBlock + common, &one, rest, out + r * stride,
                         stride);
  }
}
template <int Pairs, bool Asks>
inline void int8_value_tile(const Pair* pairs, bool is_last, const uint8_t* values, ptrdiff_t next,
                            int head_dim, const float* scores, const float* factors, float* states,
                            size_t stride) {
  WholeWeights<Pairs> weights;
  weigh<Pairs>(pairs, is_last, scores, values + head_dim * kBlock, head_dim, weights);
  float* out = states + kStateHeader;
  int d = 0;
  for (; d + kKvGroup <= head_dim; d += kKvGroup) {
    const int group = d / kKvGroup;
    add_int8_tile<Pairs, 4, Asks>(values + 2 * d, next, head_dim, weights.whole[group],
                                  weights.scales[group], factors, out + d, stride);
  }
  for (; d < head_dim; d += kLanes) {
    const int group = d / kKvGroup;
    add_int8_tile<Pairs, 1, Asks>(values + 2 * d, next, head_dim, weights.whole[group],
                                  weights.scales[group], factors, out + d, stride);
  }
}

using ScoreFunction = void (*)(const Pair*, const uint8_t*, ptrdiff_t, int, float*);
using ValueFunction = void (*)(const Pair*, bool, const uint8_t*, ptrdiff_t, int, const float*,
                               const float*, float*, size_t);

// [pairs - 1]
struct VisitFunctions {
  ScoreFunction scores[3];
  ValueFunction values[3];
};
template <bool Asks>
struct Visits {
  static constexpr VisitFunctions kFloat = {
      {score_tile<1, Asks>, score_tile<2, Asks>, score_tile<3, Asks>},
      {value_tile<1, Asks>, value_tile<2, Asks>, value_tile<3, Asks>}};
  static constexpr VisitFunctions kInt8 = {
      {int8_score_tile<1, Asks>, int8_score_tile<2, Asks>, int8_score_tile<3, Asks>},
      {int8_value_tile<1, Asks>, int8_value_tile<2, Asks>, int8_value_tile<3, Asks>}};
};

// From a page to that of a later block, asked for while this one is computed: 0 where there is
// none.
inline ptrdiff_t bytes_to_page(const AttentionUnit& unit, int block, int later) {
  if (later > unit.last_block) return 0;
  const ptrdiff_t pages = ptrdiff_t{unit.pages[later]} - unit.pages[block];
  return pages * static_cast<ptrdiff_t>(unit.page_stride);
}

// One block of some units that have it: all K, then all probabilities, then all V, so that what is
// read is a long stream. states[i]: of unit i's pairs, in the stripe of the block. Beside the first
// tile of each page the page `next` bytes on is asked for: at 8,192 keys, one row, one thread, Zen
// 4, float32 15 -> 20 GB/s (into L1: 13), int8 7 -> 14 (into L1 only 11.5, into L2 only 8.5).
inline void visit_block(const AttentionUnit* units, int num_units, int block, ptrdiff_t next,
                        float* const* states) {
  alignas(32) float scores[kSweepUnits * kMaxPairs * kBlock];
  float factors[kSweepUnits * kMaxPairs];
  const int head_dim = units[0].head_dim;
  const size_t stride = static_cast<size_t>(head_dim) + kStateHeader;
  const bool is_int8 = units[0].storage == KvStorage::kInt8;
  const auto at = [block](const AttentionUnit& unit) {
    return static_cast<size_t>(unit.pages[block]) * unit.page_stride;
  };
  const auto visits = [&](int r) -> const VisitFunctions& {
    const bool asks = r == 0 && next != 0;
    if (is_int8) return asks ? Visits<true>::kInt8 : Visits<false>::kInt8;
    return asks ? Visits<true>::kFloat : Visits<false>::kFloat;
  };
  const auto tile = [](const AttentionUnit& unit, int r) {
    return unit.num_pairs - r < 3 ? unit.num_pairs - r : 3;
  };
  int done = 0;
  for (int i = 0; i < num_units; ++i) {
    const AttentionUnit& unit = units[i];
    for (int r = 0; r < unit.num_pairs; r += 3) {
      visits(r).scores[tile(unit, r) - 1](unit.pairs + r, unit.k_head + at(unit), next, head_dim,
                                          scores + (done + r) * kBlock);
    }
    done += unit.num_pairs;
  }
  done = 0;
  for (int i = 0; i < num_units; ++i) {
    const AttentionUnit& unit = units[i];
    const bool is_last = block == unit.last_block;
    for (int r = 0; r < unit.num_pairs; ++r) {
      float* state = states[i] + static_cast<size_t>(r) * stride;
      float* of_pair = scores + (done + r) * kBlock;
      factors[done + r] = is_last ? update_header<false>(of_pair, unit.pairs[r].num_visible, state)
                                  : update_header<true>(of_pair, kBlock, state);
    }
    done += unit.num_pairs;
  }
  done = 0;
  for (int i = 0; i < num_units; ++i) {
    const AttentionUnit& unit = units[i];
    for (int r = 0; r < unit.num_pairs; r += 3) {
      visits(r).values[tile(unit, r) - 1](unit.pairs + r, block == unit.last_block,
                                          unit.v_head + at(unit), next, head_dim,
                                          scores + (done + r) * kBlock, factors + done + r,
                                          states[i] + static_cast<size_t>(r) * stride, stride);
    }
    done += unit.num_pairs;
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

inline void attention_block(const AttentionUnit* units, int num_units, int block, int step,
                            float* const* states) {
  for (int i = 0; block < kStripes && i < num_units; ++i) open_states(units[i], false, states[i]);
  visit_block(units, num_units, block, bytes_to_page(units[0], block, block + step), states);
}

inline void attention_stripe(const AttentionUnit& unit, int stripe, float* states) {
  const int first = stripe_of(stripe);
  open_states(unit, first > unit.last_block, states);
  for (int block = first; block <= unit.last_block; block += kStripes) {
    visit_block(&unit, 1, block, bytes_to_page(unit, block, block + kStripes), &states);
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
