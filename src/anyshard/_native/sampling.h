// Greedy and Gumbel-max sampling over a row of logits: the lowest id wins a tie.
//
// The random word of an id depends on (seed, position, choice, stream, id) only: Philox4x32-10,
// Salmon et al. 2011, word id & 3 of the counter (position, id >> 2, choice, stream).
#pragma once

#include "elementary.h"

// Largest value with the lowest index over lanes; every lane holds its own first best.
inline Best best_of_lanes(Vec values, IntVec indices) {
  float value[8];
  int32_t index[8];
  store(value, values);
  store_int(index, indices);
  int best = 0;
  for (int i = 1; i < 8; ++i) {
    const bool better = value[i] > value[best];
    const bool tie = value[i] == value[best] && index[i] < index[best];
    if (better || tie) best = i;
  }
  return {index[best], value[best]};
}

inline bool is_finite(float value) { return __builtin_fabsf(value) <= 0x1.fffffep127f; }

// Keeps the first best of each lane while values come in increasing order of index.
struct Running {
  Vec best = broadcast(-__builtin_inff());
  IntVec index = broadcast_int(0);
  IntVec nan = broadcast_int(0);

  ANYSHARD_INLINE void take(Vec value, IntVec at) {
    const IntVec better = less(best, value);
    best = select(better, value, best);
    index = select_int(better, at, index);
    nan = or_mask(nan, is_nan(value));
  }
  Best finish() const {
    Best result = best_of_lanes(best, index);
    if (any(nan)) return {-1, __builtin_nanf("")};
    if (!is_finite(result.value)) result.index = -1;
    return result;
  }
};

inline Best argmax(const float* logits, int64_t count) {
  Running running;
  const Vec lowest = broadcast(-__builtin_inff());
  for (int64_t i = 0; i < count; i += 8) {
    const int rest = count - i < 8 ? static_cast<int>(count - i) : 8;
    Vec value = rest == 8 ? load(logits + i) : load_partial(logits + i, rest);
    if (rest < 8) value = select(first_lanes(rest), value, lowest);
    running.take(value, add_int(broadcast_int(static_cast<int32_t>(i)), lane_numbers()));
  }
  return running.finish();
}

// Words of eight consecutive counters: words[4 * i + j] is word j of counter group + i.
inline void philox(const Sampler& args, int32_t group, int32_t* words) {
  IntVec x0 = broadcast_int(static_cast<int32_t>(args.position));
  IntVec x1 = add_int(broadcast_int(group), lane_numbers());
  IntVec x2 = broadcast_int(static_cast<int32_t>(args.choice));
  IntVec x3 = broadcast_int(static_cast<int32_t>(args.stream));
  uint32_t key0 = args.key[0];
  uint32_t key1 = args.key[1];
  const IntVec multiplier0 = broadcast_int(static_cast<int32_t>(0xD2511F53u));
  const IntVec multiplier1 = broadcast_int(static_cast<int32_t>(0xCD9E8D57u));
  for (int round = 0; round < 10; ++round) {
    const IntVec high0 = multiply_high(x0, multiplier0);
    const IntVec low0 = multiply_low(x0, multiplier0);
    const IntVec high1 = multiply_high(x2, multiplier1);
    const IntVec low1 = multiply_low(x2, multiplier1);
    x0 = xor_int(xor_int(high1, x1), broadcast_int(static_cast<int32_t>(key0)));
    x1 = low1;
    x2 = xor_int(xor_int(high0, x3), broadcast_int(static_cast<int32_t>(key1)));
    x3 = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  int32_t columns[4][8];
  store_int(columns[0], x0);
  store_int(columns[1], x1);
  store_int(columns[2], x2);
  store_int(columns[3], x3);
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 4; ++j) words[4 * i + j] = columns[j][i];
  }
}

ANYSHARD_INLINE Vec gumbel(IntVec words) {
  const Vec whole = to_float(shift_right<9>(words));
  const Vec u = mul(add(whole, broadcast(0.5f)), broadcast(0x1p-23f));
  return negate(log_vec(negate(log_vec(u))));
}

inline Best gumbel_argmax(const Sampler& args, const float* logits, int64_t count) {
  Running running;
  const Vec lowest = broadcast(-__builtin_inff());
  int32_t words[32];
  for (int64_t start = 0; start < count; start += 32) {
    philox(args, static_cast<int32_t>(start / 4), words);
    for (int64_t i = start; i < start + 32 && i < count; i += 8) {
      const int rest = count - i < 8 ? static_cast<int>(count - i) : 8;
      const Vec noise = gumbel(load_int(words + (i - start)));
      Vec score = add(load_partial(logits + i, rest), mul(broadcast(args.temperature), noise));
      score = select(first_lanes(rest), score, lowest);
      if (args.mask != nullptr) {
        int32_t allowed[8] = {};
        for (int lane = 0; lane < rest; ++lane) allowed[lane] = args.mask[i + lane];
        const IntVec yes = greater_int(load_int(allowed), broadcast_int(0));
        score = select(yes, score, lowest);
      }
      running.take(score, add_int(broadcast_int(static_cast<int32_t>(i)), lane_numbers()));
    }
  }
  return running.finish();
}
