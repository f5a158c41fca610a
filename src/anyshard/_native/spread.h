// How sure a row of logits is of its token: the entropy of its softmax, and its best two.
//
// No bit of any token depends on it. Sums of 256 go by lanes in float32, those of sums in double.
#pragma once

#include "elementary.h"

// The best two of each lane, while values come in increasing order of index; the first one that
// came is the better of equals.
struct RunningTwo {
  Vec best = broadcast(-__builtin_inff());
  Vec second = broadcast(-__builtin_inff());
  IntVec best_index = broadcast_int(INT32_MAX);
  IntVec second_index = broadcast_int(INT32_MAX);

  ANYSHARD_INLINE void take(Vec value, int32_t start) {
    const IntVec better = less(second, value);
    if (!any(better)) return;  // nearly always: of a long row
    const IntVec at = add_int(broadcast_int(start), lane_numbers());
    const IntVec first = less(best, value);
    second = select(first, best, select(better, value, second));
    second_index = select_int(first, best_index, select_int(better, at, second_index));
    best = select(first, value, best);
    best_index = select_int(first, at, best_index);
  }
  // Of all lanes.
  void finish(Best* two) const {
    float value[16];
    int32_t index[16];
    store(value, best);
    store(value + 8, second);
    store_int(index, best_index);
    store_int(index + 8, second_index);
    two[0] = two[1] = {INT32_MAX, -__builtin_inff()};
    for (int i = 0; i < 16; ++i) {
      const Best found = {index[i], value[i]};
      if (is_before(found, two[0])) {
        two[1] = two[0];
        two[0] = found;
      } else if (is_before(found, two[1])) {
        two[1] = found;
      }
    }
  }
  static bool is_before(const Best& a, const Best& b) {
    return a.value > b.value || (a.value == b.value && a.index < b.index);
  }
};

inline Spread spread(const float* logits, int64_t count) {
  RunningTwo running;
  const Vec lowest = broadcast(-__builtin_inff());
  for (int64_t i = 0; i < count; i += kLanes) {
    const int rest = count - i < kLanes ? static_cast<int>(count - i) : kLanes;
    Vec value = rest == kLanes ? load(logits + i) : load_partial(logits + i, rest);
    if (rest < kLanes) value = select(first_lanes(rest), value, lowest);
    running.take(value, static_cast<int32_t>(i));
  }
  Best two[2];
  running.finish(two);
  constexpr int64_t kRun = 32 * kLanes;
  const Vec largest = broadcast(two[0].value);
  double mass = 0.0;      // of e^x, x = logit - largest
  double distance = 0.0;  // of -x e^x
  for (int64_t start = 0; start < count; start += kRun) {
    Vec masses = zero();
    Vec distances = zero();
    for (int64_t i = start; i < start + kRun && i < count; i += kLanes) {
      const int rest = count - i < kLanes ? static_cast<int>(count - i) : kLanes;
      const Vec x =
          sub(rest == kLanes ? load(logits + i) : load_partial(logits + i, rest), largest);
      Vec power = exp_vec(x);
      Vec product = mul(negate(x), power);
      if (rest < kLanes) {
        power = select(first_lanes(rest), power, zero());
        product = select(first_lanes(rest), product, zero());
      }
      masses = add(masses, power);
      distances = add(distances, product);
    }
    mass += static_cast<double>(halving_sum(masses));
    distance += static_cast<double>(halving_sum(distances));
  }
  float logarithm[8];
  float gap[8];
  store(logarithm, log_vec(broadcast(static_cast<float>(mass))));
  store(gap, exp_vec(broadcast(two[1].value - two[0].value)));
  const float entropy = logarithm[0] + static_cast<float>(distance / mass);
  // of what is not finite no sum is: NaN - NaN, infinity - infinity, 0 * infinity
  if (!(entropy >= 0.0f && entropy < __builtin_inff())) {
    return {__builtin_nanf(""), __builtin_nanf(""), -1, -1};
  }
  if (count == 1) return {entropy, 1.0f, two[0].index, -1};
  const float margin = static_cast<float>((1.0 - static_cast<double>(gap[0])) / mass);
  return {entropy, margin, two[0].index, two[1].index};
}
