// RMSNorm of one row: 32 virtual lanes by fma chains, halving tree, y = (x * inv) * w.
#pragma once

inline bool norm(const Norm& args, const float* x, float* out) {
  const int width = args.width;
  Vec lanes[4] = {zero(), zero(), zero(), zero()};
  int k = 0;
  for (; k + 32 <= width; k += 32) {
    for (int v = 0; v < 4; ++v) {
      const Vec value = load(x + k + 8 * v);
      lanes[v] = fma(value, value, lanes[v]);
    }
  }
  // Missing lanes are +0: a sum of squares from +0 keeps its bits under fma(0, 0, acc).
  for (int v = 0; v < 4 && k < width; ++v, k += 8) {
    const Vec value = width - k >= 8 ? load(x + k) : load_partial(x + k, width - k);
    lanes[v] = fma(value, value, lanes[v]);
  }
  const Vec folded = add(add(lanes[0], lanes[2]), add(lanes[1], lanes[3]));
  const float sum = halving_sum(folded);
  const float mean = sum / static_cast<float>(width);
  const Vec inverse = broadcast(1.0f / square_root(mean + args.eps));
  for (k = 0; k + 8 <= width; k += 8) {
    store(out + k, mul(mul(load(x + k), inverse), load(args.weight + k)));
  }
  if (k < width) {
    const int rest = width - k;
    const Vec value = mul(load_partial(x + k, rest), inverse);
    store_partial(out + k, mul(value, load_partial(args.weight + k, rest)), rest);
  }
  return sum <= 0x1.fffffep127f;  // false for infinity and NaN
}
