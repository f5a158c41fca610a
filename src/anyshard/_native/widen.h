// Weights as stored, widened exactly to float32 in registers: what a panel holds at one k.
#pragma once

struct Float32 {
  static constexpr ptrdiff_t kBytes = 4 * kLanes;  // of one k of a panel
  static ANYSHARD_INLINE Vec get(const uint8_t* w) {
    return load(reinterpret_cast<const float*>(w));
  }
};
struct Bfloat16 {
  static constexpr ptrdiff_t kBytes = 2 * kLanes;
  static ANYSHARD_INLINE Vec get(const uint8_t* w) { return load_bfloat16(w); }
};
struct Float16 {
  static constexpr ptrdiff_t kBytes = 2 * kLanes;
  static ANYSHARD_INLINE Vec get(const uint8_t* w) { return load_float16(w); }
};

// A block of Q8_0: four k of 16 outputs (two panels) after another, then their scales.
constexpr int kQ8Group = 4;  // k that lie side by side
constexpr ptrdiff_t kQ8GroupBytes = 2 * kLanes * kQ8Group;
constexpr ptrdiff_t kQ8PanelBytes = kLanes * kQ8Group;  // of the group, one of the two panels'

// Scales of a panel, the first or second of the pair whose block begins at `w`. q * scale is
// q * 2^24, as the byte at the top of an integer reads, times scale * 2^-24: both exact, and so is
// the product (19 bits).
ANYSHARD_INLINE Vec q8_scales(const uint8_t* w, int half) {
  return mul(load_float16(w + kQ8Values + half * 2 * kLanes), broadcast(0x1p-24f));
}
template <int Byte>
ANYSHARD_INLINE Vec q8_weights(IntVec group, Vec scales) {
  return mul(to_float(top_byte<Byte>(group)), scales);
}
ANYSHARD_INLINE IntVec q8_group(const uint8_t* w) {
  return load_int(reinterpret_cast<const int32_t*>(w));
}

// Where panel `panel` begins. Of panels in blocks, a pair shares them.
inline const uint8_t* panel_at(const Linear& linear, int panel) {
  const size_t stride = linear.panel_stride;
  if (!in_blocks(linear.storage)) return linear.panels + static_cast<size_t>(panel) * stride;
  return linear.panels + static_cast<size_t>(panel / 2) * stride + (panel % 2) * kQ8PanelBytes;
}

template <typename Weights>
inline void widen_lanes(const uint8_t* w, int num_inputs, float* out) {
  for (int k = 0; k < num_inputs; ++k, w += Weights::kBytes)
    store(out + k * kLanes, Weights::get(w));
}

inline void widen_q8(const uint8_t* w, int half, int num_inputs, float* out) {
  for (int k = 0; k < num_inputs; k += kQ8Inputs, w += kQ8Bytes) {
    const Vec scales = q8_scales(w - half * kQ8PanelBytes, half);
    for (int g = 0; g < kQ8Inputs / kQ8Group; ++g, out += kQ8Group * kLanes) {
      const IntVec group = q8_group(w + g * kQ8GroupBytes);
      store(out, q8_weights<0>(group, scales));
      store(out + kLanes, q8_weights<1>(group, scales));
      store(out + 2 * kLanes, q8_weights<2>(group, scales));
      store(out + 3 * kLanes, q8_weights<3>(group, scales));
    }
  }
}

// Panel `panel` as float32, [K][8].
inline void widen_panel(const Linear& linear, int panel, float* out) {
  const uint8_t* w = panel_at(linear, panel);
  switch (linear.storage) {
    case Storage::kBfloat16:
      return widen_lanes<Bfloat16>(w, linear.num_inputs, out);
    case Storage::kFloat16:
      return widen_lanes<Float16>(w, linear.num_inputs, out);
    case Storage::kQ8:
    case Storage::kInt8:
      return widen_q8(w, panel % 2, linear.num_inputs, out);
    default:
      return widen_lanes<Float32>(w, linear.num_inputs, out);
  }
}
