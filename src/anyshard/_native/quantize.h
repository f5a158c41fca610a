// Rows as int8 linears read them: per leaf of at most 32 k a float scale amax / 127 and q =
// rint(x / scale), clamped to +-127.
//
// A leaf whose largest magnitude is an infinity or NaN gets the scale NaN, so that what is wrong
// reaches the residual, where the next norm sees it. A scale that rounds to 0 makes the leaf zero.
#pragma once

struct QuantizedRow {
  const uint8_t* values;  // q [leaf][32]
  ptrdiff_t plane;        // bytes from a q to its |q|
  const float* scales;    // [leaf]
  const float* offsets;   // [leaf], the bits of int32
};

inline QuantizedRow quantized_row(const float* row, int num_leaves) {
  const ptrdiff_t leaves = num_leaves;
  const float* scales = row + leaves * kQ8Inputs / static_cast<ptrdiff_t>(sizeof(float));
  return {reinterpret_cast<const uint8_t*>(row),
          leaves * static_cast<ptrdiff_t>(kQ8Inputs + 2 * sizeof(float)), scales, scales + leaves};
}

struct QuantizedLeaf {
  float scale;
  int32_t sum;
};

// x: up to 32 floats; q and |q|: 32 bytes each.
inline QuantizedLeaf quantize_leaf(const float* x, int count, uint8_t* values,
                                   uint8_t* magnitudes) {
  constexpr int kVectors = kQ8Inputs / kLanes;
  Vec value[kVectors];
  IntVec highest = broadcast_int(0);
  for (int v = 0; v < kVectors; ++v) {
    const int rest = count - v * kLanes;
    value[v] = rest >= kLanes ? load(x + v * kLanes) : load_partial(x + v * kLanes, rest);
    highest = max_int(highest, bits(absolute(value[v])));  // as integers NaN is above infinity
  }
  const int32_t top = largest_int(highest);
  float magnitude;
  __builtin_memcpy(&magnitude, &top, sizeof magnitude);
  const bool finite = top < 0x7f800000;
  const float scale = finite ? magnitude / 127.0f : __builtin_nanf("");
  if (!finite || scale == 0.0f) {
    __builtin_memset(values, 0, kQ8Inputs);
    __builtin_memset(magnitudes, 0, kQ8Inputs);
    return {scale, 0};
  }
  const IntVec most = broadcast_int(127);
  const IntVec least = broadcast_int(-127);
  const Vec divisor = broadcast(scale);
  IntVec q[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    q[v] = max_int(min_int(to_int(div(value[v], divisor)), most), least);
  }
  store_bytes(values, q[0], q[1], q[2], q[3]);
  store_bytes(magnitudes, absolute_int(q[0]), absolute_int(q[1]), absolute_int(q[2]),
              absolute_int(q[3]));
  return {scale, sum_int(add_int(add_int(q[0], q[1]), add_int(q[2], q[3])))};
}

inline void quantize(const LeafProgram& program, int start, int stop, const float* x, float* row) {
  uint8_t* values = reinterpret_cast<uint8_t*>(row);
  const QuantizedRow made = quantized_row(row, program.num_leaves);
  float* scales = row + (made.scales - row);
  float* offsets = row + (made.offsets - row);
  for (int leaf = start; leaf < stop; ++leaf) {
    uint8_t* q = values + static_cast<ptrdiff_t>(leaf) * kQ8Inputs;
    const QuantizedLeaf found =
        quantize_leaf(x + program.starts[leaf], program.lengths[leaf], q, q + made.plane);
    const int32_t offset = -128 * found.sum;
    scales[leaf] = found.scale;
    __builtin_memcpy(offsets + leaf, &offset, sizeof offset);
  }
}
