// SiLU(gate) * up. SiLU(x) = x / (1 + e) for x >= 0, (x * e) / (1 + e) below, e = exp(-|x|).
#pragma once

#include "elementary.h"

ANYSHARD_INLINE Vec silu_vec(Vec x) {
  const Vec e = exp_vec(negate(absolute(x)));
  const Vec numerator = select(less(x, zero()), mul(x, e), x);
  return div(numerator, add(broadcast(1.0f), e));
}

inline void silu_product(float* gate, const float* up, int count) {
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    store(gate + i, mul(silu_vec(load(gate + i)), load(up + i)));
  }
  if (i < count) {
    const int rest = count - i;
    const Vec value = silu_vec(load_partial(gate + i, rest));
    store_partial(gate + i, mul(value, load_partial(up + i, rest)), rest);
  }
}
