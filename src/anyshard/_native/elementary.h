// exp2, exp, log and 2^integer on eight lanes: fma polynomials in a written order, no libm.
// Coefficients: src/anyshard/ops/coefficients.py, turned into coefficients.h by the build.
#pragma once

// bits(p) + n * 2^23 where the result is a normal number, else +0.
ANYSHARD_INLINE Vec scale_by_exponent(Vec p, Vec n) {
  const IntVec sum = add_int(bits(p), shift_left<23>(to_int(n)));
  return select(greater_int(sum, broadcast_int(0x007fffff)), from_bits(sum), zero());
}

ANYSHARD_INLINE Vec exp2_polynomial(Vec f) {
  Vec p = broadcast(coefficients::kExp2[7]);
  for (int i = 6; i >= 0; --i) p = fma(p, f, broadcast(coefficients::kExp2[i]));
  return p;
}

// 2^t for t <= 0; +0 below -200 and wherever the result would be below 2^-126.
ANYSHARD_INLINE Vec exp2_vec(Vec t) {
  const Vec n = round_even(t);
  const Vec result = scale_by_exponent(exp2_polynomial(sub(t, n)), n);
  return select(less(t, broadcast(-200.0f)), zero(), result);
}

// e^x for x <= 0: 2^(x * log2 e), the product in two parts; +0 below -130.
ANYSHARD_INLINE Vec exp_vec(Vec x) {
  const Vec high_factor = broadcast(coefficients::kLog2eHigh);
  const Vec h = mul(x, high_factor);
  Vec l = fma(x, high_factor, negate(h));
  l = fma(x, broadcast(coefficients::kLog2eLow), l);
  const Vec n = round_even(h);
  const Vec f = add(sub(h, n), l);
  const Vec result = scale_by_exponent(exp2_polynomial(f), n);
  return select(less(x, broadcast(-130.0f)), zero(), result);
}

inline void exp_into(const float* x, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, exp_vec(load(x + i)));
  const int rest = static_cast<int>(count - i);
  if (rest > 0) store_partial(out + i, exp_vec(load_partial(x + i, rest)), rest);
}

// Natural logarithm of a positive normal number.
ANYSHARD_INLINE Vec log_vec(Vec x) {
  const IntVec e = shift_right_signed<23>(sub_int(bits(x), broadcast_int(0x3f3504f3)));
  const Vec m = from_bits(sub_int(bits(x), shift_left<23>(e)));
  const Vec f = sub(m, broadcast(1.0f));
  const Vec z = mul(f, f);
  Vec p = broadcast(coefficients::kLog[coefficients::kNumLog - 1]);
  for (int i = coefficients::kNumLog - 2; i >= 0; --i) {
    p = fma(p, f, broadcast(coefficients::kLog[i]));
  }
  Vec y = mul(mul(f, z), p);
  y = fma(broadcast(-0.5f), z, y);
  const Vec exponent = to_float(e);
  Vec t = fma(exponent, broadcast(coefficients::kLn2Low), y);
  t = add(f, t);
  return fma(exponent, broadcast(coefficients::kLn2High), t);
}

// 2^difference for difference <= 0; +0 below 2^-126.
ANYSHARD_INLINE float power_of_two(int32_t difference) {
  const int32_t exponent = difference + 127;
  const int32_t pattern = exponent >= 1 ? static_cast<int32_t>(exponent << 23) : 0;
  float result;
  __builtin_memcpy(&result, &pattern, sizeof result);
  return result;
}
