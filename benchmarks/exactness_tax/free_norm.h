// RMSNorm with eight vectors of sums in place of four: 72 k of one chain are a long wait.
#pragma once

#include "tile.h"

using Squares = Tile<1, 8>;

template <int... V>
ANYSHARD_INLINE void add_squares(Vec (&sums)[Squares::kSize], const float* x, Sequence<V...>) {
  ((sums[V] = fma(load(x + V * kLanes), load(x + V * kLanes), sums[V])), ...);
}

inline bool free_norm(const Norm& args, const float* x, float* out) {
  constexpr Squares::AllIndices all{};
  constexpr int kStep = Squares::kSize * kLanes;
  const int width = args.width;
  Vec sums[Squares::kSize];
  Squares::clear(sums, all);
  int k = 0;
  for (; k + kStep <= width; k += kStep) add_squares(sums, x + k, all);
  for (; k < width; k += kLanes) {
    const Vec value = width - k >= kLanes ? load(x + k) : load_partial(x + k, width - k);
    sums[0] = fma(value, value, sums[0]);
  }
  const Vec left = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
  const Vec right = add(add(sums[4], sums[5]), add(sums[6], sums[7]));
  const float sum = halving_sum(add(left, right));
  const float mean = sum / static_cast<float>(width);
  const Vec inverse = broadcast(1.0f / square_root(mean + args.eps));
  for (k = 0; k + kLanes <= width; k += kLanes) {
    store(out + k, mul(mul(load(x + k), inverse), load(args.weight + k)));
  }
  if (k < width) {
    const int rest = width - k;
    const Vec value = mul(load_partial(x + k, rest), inverse);
    store_partial(out + k, mul(value, load_partial(args.weight + k, rest)), rest);
  }
  return sum <= 0x1.fffffep127f;
}
