// Attention over a float32 history as it lies: no stripes, one softmax over a segment of pages, the
// sums of values in registers over all of it. What a state holds, and the tiles, are attention.h's.
//
// The op asks for eight stripes. Stripe 0 is the whole history; for a decode step on several
// threads (Spans == 2) it is the first half, and stripe 4, which the tree merges with it last, the
// other. The other stripes are empty, and merging them costs a look at their header.
#pragma once

#include "attention.h"

constexpr ptrdiff_t kFloatBytes = sizeof(float);
constexpr int kFewPairs = 3;        // one tile: a decode step, which reads every page once
constexpr int kSegmentBlocks = 16;  // 512 keys; 8 are as fast, 4 and 2 slower

struct Segment {
  const AttentionUnit& unit;
  int start;  // blocks
  int stop;
  const uint8_t* keys(int block) const { return unit.k_head + page(block); }
  const uint8_t* values(int block) const { return unit.v_head + page(block); }
  // From a page to the next, to be asked for early: 0 at the end.
  ptrdiff_t next(int block) const {
    if (block == unit.last_block) return 0;
    return static_cast<ptrdiff_t>(page(block + 1)) - static_cast<ptrdiff_t>(page(block));
  }
  bool has_last() const { return stop == unit.last_block + 1; }

 private:
  size_t page(int block) const { return static_cast<size_t>(unit.pages[block]) * unit.page_stride; }
};

// scores [blocks][stride] become probabilities; returns the factor for what the state held before.
inline float soften(float* scores, size_t stride, int num_blocks, int last_visible, float* state) {
  StateHeader header = read_header(state);
  const Vec lowest = broadcast(-__builtin_inff());
  Vec highest[4] = {lowest, lowest, lowest, lowest};
  IntVec bad = broadcast_int(0);
  float* last = scores + static_cast<size_t>(num_blocks - 1) * stride;
  for (int v = 0; v < 4; ++v) {  // what the row does not see
    const IntVec visible = first_lanes(last_visible - 8 * v);
    store(last + 8 * v, select(visible, load(last + 8 * v), lowest));
  }
  const Vec limit = broadcast(coefficients::kScoreLimit);
  for (int b = 0; b < num_blocks; ++b) {
    for (int v = 0; v < 4; ++v) {
      const Vec s = load(scores + static_cast<size_t>(b) * stride + 8 * v);
      const IntVec seen = not_less_equal(lowest, s);
      bad = or_mask(bad, and_mask(seen, not_less_equal(absolute(s), limit)));
      highest[v] = max(s, highest[v]);
    }
  }
  if (any(bad)) header.out_of_range = 1;
  const float top = largest(max(max(highest[0], highest[1]), max(highest[2], highest[3])));
  int32_t high = static_cast<int32_t>(top);
  if (static_cast<float>(high) < top) ++high;
  if (header.high > high) high = header.high;
  const Vec shift = broadcast(static_cast<float>(high));
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  for (int b = 0; b < num_blocks; ++b) {
    float* block = scores + static_cast<size_t>(b) * stride;
    const int visible = b == num_blocks - 1 ? last_visible : kBlock;
    for (int v = 0; v < 4; ++v) {
      Vec p = exp2_vec(sub(load(block + 8 * v), shift));
      if (visible < kBlock) p = select(first_lanes(visible - 8 * v), p, zero());
      sums[v] = add(sums[v], p);
      store(block + 8 * v, p);
    }
  }
  const float factor = power_of_two(header.high - high);
  header.total =
      header.total * factor + halving_sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  header.high = high;
  write_header(state, header);
  return factor;
}

// o = o * factor + probabilities * values over all pages of a segment, the sums in registers.
template <int Pairs, int Vectors>
struct SpanTile {
  using Values = ValueTile<Pairs, Vectors, false>;

  template <int... R, int... V>
  static ANYSHARD_INLINE void run(const Segment& segment, int dim, const float* weights,
                                  const float* factors, int last_count, float* out, size_t stride,
                                  Sequence<R...>, Sequence<V...> vectors) {
    const int head_dim = segment.unit.head_dim;
    Vec acc[Pairs * Vectors];
    (Values::template scale_row<R>(acc, out + R * stride, broadcast(factors[R]), vectors), ...);
    for (int block = segment.start; block < segment.stop; ++block) {
      const uint8_t* values = segment.values(block) + dim * kFloatBytes;
      const ptrdiff_t next = segment.next(block);
      const int count = block == segment.stop - 1 ? last_count : kBlock;
      for (int j = 0; j < count; ++j) {
        ask<Vectors / 2, 2>(values + next);
        const Vec w[Pairs] = {broadcast(weights[R * kBlock + j])...};
        (Values::template vector_step<V>(acc, w,
                                         load(reinterpret_cast<const float*>(values) + V * kLanes),
                                         typename CountTo<Pairs>::type{}),
         ...);
        values += head_dim * kFloatBytes;
      }
      weights += Pairs * kBlock;
    }
    (Values::template store_row<R>(acc, out + R * stride, vectors), ...);
  }
};

template <int Pairs, int Vectors>
inline __attribute__((noinline)) void add_span(const Segment& segment, int dim,
                                               const float* weights, const float* factors,
                                               int last_count, float* out, size_t stride) {
  SpanTile<Pairs, Vectors>::run(segment, dim, weights, factors, last_count, out, stride,
                                typename CountTo<Pairs>::type{}, typename CountTo<Vectors>::type{});
}

template <int Pairs>
inline __attribute__((noinline)) void visit_segment(const Segment& segment, const Pair* pairs,
                                                    float* states, size_t stride) {
  alignas(32) float scores[static_cast<size_t>(kSegmentBlocks) * Pairs * kBlock];
  constexpr size_t kStep = static_cast<size_t>(Pairs) * kBlock;
  const int head_dim = segment.unit.head_dim;
  const int num_blocks = segment.stop - segment.start;
  for (int block = segment.start; block < segment.stop; ++block) {
    ScoreTile<Pairs, true>::run(pairs, segment.keys(block), segment.next(block), head_dim,
                                scores + static_cast<size_t>(block - segment.start) * kStep,
                                typename CountTo<Pairs>::type{});
  }
  float factors[Pairs];
  int common = kBlock;
  for (int r = 0; r < Pairs; ++r) {
    const int visible = segment.has_last() ? pairs[r].num_visible : kBlock;
    factors[r] = soften(scores + r * kBlock, kStep, num_blocks, visible, states + r * stride);
    if (visible < common) common = visible;
  }
  float* out = states + kStateHeader;
  int d = 0;
  for (; d + 32 <= head_dim; d += 32) {
    add_span<Pairs, 4>(segment, d, scores, factors, common, out + d, stride);
  }
  for (; d + 8 <= head_dim; d += 8) {
    add_span<Pairs, 1>(segment, d, scores, factors, common, out + d, stride);
  }
  const float* last = scores + static_cast<size_t>(num_blocks - 1) * kStep;
  for (int r = 0; segment.has_last() && r < Pairs; ++r) {
    const int rest = pairs[r].num_visible - common;
    if (rest == 0) continue;
    const float one = 1.0f;
    add_values<1, false>(segment.values(segment.stop - 1) + common * head_dim * kFloatBytes, 0,
                         head_dim, last + r * kBlock + common, &one, rest, out + r * stride,
                         stride);
  }
}

template <int Spans>
inline void free_stripe(const AttentionUnit& unit, int stripe, float* states) {
  const size_t stride = static_cast<size_t>(unit.head_dim) + kStateHeader;
  const bool few = unit.num_pairs <= kFewPairs;
  const int spans = few ? Spans : 1;
  const int span = stripe * spans / kStripes;
  const bool empty = stripe * spans % kStripes != 0;
  const int num_blocks = unit.last_block + 1;
  const int first = (num_blocks * span + spans - 1) / spans;  // the first span is never empty
  const int stop = (num_blocks * (span + 1) + spans - 1) / spans;
  for (int r = 0; r < unit.num_pairs; ++r) {
    float* state = states + static_cast<size_t>(r) * stride;
    if (!empty) {
      for (size_t i = 0; i < stride; i += kLanes) store(state + i, zero());
    }
    write_header(state, {kEmptyMax, 0.0f, 0});
  }
  if (empty) return;
  for (int start = first; start < stop; start += kSegmentBlocks) {
    const Segment segment{unit, start,
                          start + kSegmentBlocks < stop ? start + kSegmentBlocks : stop};
    for (int r = 0; r < unit.num_pairs; r += 3) {
      const Pair* pairs = unit.pairs + r;
      float* state = states + static_cast<size_t>(r) * stride;
      const int count = unit.num_pairs - r;
      if (count >= 3) {
        visit_segment<3>(segment, pairs, state, stride);
      } else if (count == 2) {
        visit_segment<2>(segment, pairs, state, stride);
      } else {
        visit_segment<1>(segment, pairs, state, stride);
      }
    }
  }
}

inline void free_merge(int head_dim, int num_pairs, float* left, const float* right,
                       size_t stride) {
  for (int r = 0; r < num_pairs; ++r, left += stride, right += stride) {
    if (read_header(right).high != kEmptyMax) attention_merge(head_dim, 1, left, right, stride);
  }
}
