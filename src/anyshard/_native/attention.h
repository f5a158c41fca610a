// Attention over pages of 32 tokens: eight interleaved stripes with an integer maximum each,
// merged by a fixed tree. K pages are [d][32] (lane = key), V pages are [32][d]; in int8 the scales
// of each 32 dims, [d / 32][32 keys], come after them (kernels.h, KvStorage).
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

// An element of a page as a kernel reads it: eight of them widened, how many dims have a scale of
// their own (float32: all of them, and none), the bytes of one.
struct FloatElement {
  static constexpr int kBytes = 4;
  static constexpr int kLocality = 2;  // of what is asked for: L2
  static constexpr int kDims = kMaxHeadDim;
  static constexpr bool kScaled = false;
  static ANYSHARD_INLINE Vec get(const uint8_t* p) {
    return load(reinterpret_cast<const float*>(p));
  }
};
struct Int8Element {
  static constexpr int kBytes = 1;
  static constexpr int kLocality = 3;  // L1
  static constexpr int kDims = kKvGroup;
  static constexpr bool kScaled = true;
  static ANYSHARD_INLINE Vec get(const uint8_t* p) { return load_int8(p); }
};

// Asks memory for a row of a tile; of float32 it is `Lines` cache lines, of int8 a part of one.
template <typename Element, int Lines>
ANYSHARD_INLINE void ask(const uint8_t* p) {
  __builtin_prefetch(p, 0, Element::kLocality);
  if (Element::kBytes == 4 && Lines > 1) {
    __builtin_prefetch(p + kLineFloats * 4, 0, Element::kLocality);
  }
}

// Scores of Pairs queries against the 32 keys of a page, and probability-weighted sums of values:
// register tiles of pairs x vectors, indices named at compile time (see tile.h). Both ask for
// the next page (`next` bytes on) as they go.
template <int Pairs, typename Element, bool Asks>
struct ScoreTile {
  using PairIndices = typename CountTo<Pairs>::type;
  using Tile4 = Tile<Pairs, 4>;

  template <int... R>
  static ANYSHARD_INLINE void run(const Pair* pairs, const uint8_t* keys, ptrdiff_t next,
                                  int head_dim, float* scores, Sequence<R...> rows) {
    constexpr typename CountTo<4>::type vectors{};
    constexpr typename CountTo<Pairs * 4>::type all{};
    const float* q[Pairs] = {pairs[R].query...};
    const uint8_t* scales = keys + head_dim * kBlock * Element::kBytes;
    for (int first = 0; first < head_dim; first += Element::kDims, scales += 2 * kBlock) {
      const int rest = head_dim - first;
      const int stop = first + (rest < Element::kDims ? rest : Element::kDims);
      Vec acc[Pairs * 4];
      Tile4::clear(acc, all);
      for (int d = first; d < stop; ++d) {
        if (Asks) ask<Element, 2>(keys + next);
        step(acc, q, keys, d, rows, vectors);
        keys += kBlock * Element::kBytes;
      }
      if (Element::kScaled) {
        (add_scaled<R>(acc, scales, first == 0, scores, vectors), ...);
      } else {
        Tile4::push(acc, scores, all);
      }
    }
  }

  template <int... R, int... V>
  static ANYSHARD_INLINE void step(Vec (&acc)[Pairs * 4], const float* const (&q)[Pairs],
                                   const uint8_t* keys, int d, Sequence<R...> rows,
                                   Sequence<V...>) {
    const Vec queries[Pairs] = {broadcast(q[R][d])...};
    (vector_step<V>(acc, queries, Element::get(keys + V * kLanes * Element::kBytes), rows), ...);
  }
  template <int V, int... R>
  static ANYSHARD_INLINE void vector_step(Vec (&acc)[Pairs * 4], const Vec (&queries)[Pairs],
                                          Vec keys, Sequence<R...>) {
    ((acc[R * 4 + V] = fma(queries[R], keys, acc[R * 4 + V])), ...);
  }
  // scores = the chain of these dims times their scale, plus what is there (first: +0).
  template <int Row, int... V>
  static ANYSHARD_INLINE void add_scaled(const Vec (&acc)[Pairs * 4], const uint8_t* scales,
                                         bool first, float* scores, Sequence<V...>) {
    float* row = scores + Row * kBlock;
    (store(row + V * kLanes, fma(acc[Row * 4 + V], load_float16(scales + 2 * V * kLanes),
                                 first ? zero() : load(row + V * kLanes))),
     ...);
  }
};

// What the values of a page are multiplied with: of pair r and dim d, w + r * 32 + (d / 32) *
// `group` is one factor a key.
struct ValueWeights {
  const float* w;
  ptrdiff_t group;
};

template <int Pairs, int Vectors, typename Element, bool Asks>
struct ValueTile {
  // o[dims of the tile] = o * factor, then one chain over keys [0, count).
  template <int... R, int... V>
  static ANYSHARD_INLINE void run(const uint8_t* values, ptrdiff_t next, int head_dim,
                                  const float* weights, const float* factors, int count, float* out,
                                  size_t stride, Sequence<R...>, Sequence<V...> vectors) {
    Vec acc[Pairs * Vectors];
    (scale_row<R>(acc, out + R * stride, broadcast(factors[R]), vectors), ...);
    for (int j = 0; j < count; ++j) {
      if (Asks) ask<Element, Vectors / 2>(values + next);
      // vector by vector: sums, weights and one of values are all the registers there are
      const Vec w[Pairs] = {broadcast(weights[R * kBlock + j])...};
      (vector_step<V>(acc, w, Element::get(values + V * kLanes * Element::kBytes),
                      typename CountTo<Pairs>::type{}),
       ...);
      values += head_dim * Element::kBytes;
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

template <int Pairs, int Vectors, typename Element, bool Asks>
inline __attribute__((noinline)) void add_value_tile(const uint8_t* values, ptrdiff_t next,
                                                     int head_dim, const float* weights,
                                                     const float* factors, int count, float* out,
                                                     size_t stride) {
  ValueTile<Pairs, Vectors, Element, Asks>::run(values, next, head_dim, weights, factors, count,
                                                out, stride, typename CountTo<Pairs>::type{},
                                                typename CountTo<Vectors>::type{});
}

// All head_dim outputs of Pairs states, four vectors of dims at a time.
template <int Pairs, typename Element, bool Asks>
inline void add_values(const uint8_t* values, ptrdiff_t next, int head_dim, ValueWeights weights,
                       const float* factors, int count, float* out, size_t stride) {
  int d = 0;
  for (; d + kKvGroup <= head_dim; d += kKvGroup) {
    add_value_tile<Pairs, 4, Element, Asks>(values + d * Element::kBytes, next, head_dim,
                                            weights.w + d / kKvGroup * weights.group, factors,
                                            count, out + d, stride);
  }
  for (; d + 8 <= head_dim; d += 8) {
    add_value_tile<Pairs, 1, Element, Asks>(values + d * Element::kBytes, next, head_dim,
                                            weights.w + d / kKvGroup * weights.group, factors,
                                            count, out + d, stride);
  }
}

// scaled[group][pair][32] = probabilities times the scales of each group of a V page.
template <int Pairs>
inline void scale_weights(const float* scores, const uint8_t* scales, int head_dim, float* scaled) {
  for (int first = 0; first < head_dim; first += kKvGroup, scales += 2 * kBlock) {
    for (int v = 0; v < kBlock; v += kLanes) {
      const Vec scale = load_float16(scales + 2 * v);
      for (int r = 0; r < Pairs; ++r) {
        store(scaled + r * kBlock + v, mul(load(scores + r * kBlock + v), scale));
      }
    }
    scaled += Pairs * kBlock;
  }
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
    const IntVec is_bad = not_less_equal(absolute(s[v]), broadcast(kScoreLimit));
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

template <int Pairs, typename Element, bool Asks>
inline __attribute__((noinline)) void score_tile(const Pair* pairs, const uint8_t* keys,
                                                 ptrdiff_t next, int head_dim, float* scores) {
  ScoreTile<Pairs, Element, Asks>::run(pairs, keys, next, head_dim, scores,
                                       typename CountTo<Pairs>::type{});
}

// o of Pairs pairs: what the page adds, the keys that all of them see first.
template <int Pairs, typename Element, bool Asks>
inline void value_tile(const Pair* pairs, bool is_last, const uint8_t* values, ptrdiff_t next,
                       int head_dim, const float* scores, const float* factors, float* states,
                       size_t stride) {
  alignas(32) float scaled[Element::kScaled ? Pairs * kBlock * kMaxHeadDim / kKvGroup : 1];
  int common = kBlock;
  for (int r = 0; is_last && r < Pairs; ++r) {
    if (pairs[r].num_visible < common) common = pairs[r].num_visible;
  }
  ValueWeights weights{scores, 0};
  if (Element::kScaled) {
    scale_weights<Pairs>(scores, values + head_dim * kBlock * Element::kBytes, head_dim, scaled);
    weights = {scaled, Pairs * kBlock};
  }
  float* out = states + kStateHeader;
  add_values<Pairs, Element, Asks>(values, next, head_dim, weights, factors, common, out, stride);
  for (int r = 0; is_last && r < Pairs; ++r) {
    const int rest = pairs[r].num_visible - common;
    if (rest == 0) continue;
    const float one = 1.0f;  // o * 1 keeps the bits: the chain goes on
    add_values<1, Element, false>(values + common * head_dim * Element::kBytes, 0, head_dim,
                                  {weights.w + r * kBlock + common, weights.group}, &one, rest,
                                  out + r * stride, stride);
  }
}

using ScoreFunction = void (*)(const Pair*, const uint8_t*, ptrdiff_t, int, float*);
using ValueFunction = void (*)(const Pair*, bool, const uint8_t*, ptrdiff_t, int, const float*,
                               const float*, float*, size_t);

// [pairs - 1]
template <typename Element, bool Asks>
struct Visits {
  static constexpr ScoreFunction kScores[3] = {
      score_tile<1, Element, Asks>, score_tile<2, Element, Asks>, score_tile<3, Element, Asks>};
  static constexpr ValueFunction kValues[3] = {
      value_tile<1, Element, Asks>, value_tile<2, Element, Asks>, value_tile<3, Element, Asks>};
};
struct VisitFunctions {
  const ScoreFunction* scores;
  const ValueFunction* values;
};
template <typename Element, bool Asks>
inline VisitFunctions visits_of() {
  return {Visits<Element, Asks>::kScores, Visits<Element, Asks>::kValues};
}

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
// 4, float32 15 -> 21 GB/s (into L1: 13), int8 7 -> 11.5 (into L2: 8.5).
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
  const auto visits = [&](int r) {
    const bool asks = r == 0 && next != 0;
    if (is_int8) return asks ? visits_of<Int8Element, true>() : visits_of<Int8Element, false>();
    return asks ? visits_of<FloatElement, true>() : visits_of<FloatElement, false>();
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
