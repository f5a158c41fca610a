// Rotary embedding of one head, pairs (i, i + d/2), and the one scaling of q.
#pragma once

inline void rope(const Rope& args, const float* x, const float* scale, float* out) {
  const int half = args.head_dim / 2;
  for (int i = 0; i < half; i += 8) {
    const int count = half - i < 8 ? half - i : 8;
    const Vec c = load_partial(args.cosine + i, count);
    const Vec s = load_partial(args.sine + i, count);
    const Vec x0 = load_partial(x + i, count);
    const Vec x1 = load_partial(x + half + i, count);
    Vec y0 = fma(x0, c, negate(mul(x1, s)));
    Vec y1 = fma(x1, c, mul(x0, s));
    if (scale != nullptr) {
      y0 = mul(y0, broadcast(*scale));
      y1 = mul(y1, broadcast(*scale));
    }
    store_partial(out + i, y0, count);
    store_partial(out + half + i, y1, count);
  }
}
