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

// q = rint(x / scale) of whole vectors, clamped to +-limit.
template <int Vectors>
ANYSHARD_INLINE void round_to(const Vec (&value)[Vectors], float scale, int32_t limit,
                              IntVec (&q)[Vectors]) {
  const IntVec most = broadcast_int(limit);
  const IntVec least = broadcast_int(-limit);
  const Vec divisor = broadcast(scale);
  for (int v = 0; v < Vectors; ++v) {
    q[v] = max_int(min_int(to_int(div(value[v], divisor)), most), least);
  }
}

// Up to 32 floats, zeros past `count`; returns the bits of the largest magnitude, which as integers
// have NaN above infinity.
template <int Vectors>
ANYSHARD_INLINE int32_t read_group(const float* x, int count, Vec (&value)[Vectors]) {
  IntVec highest = broadcast_int(0);
  for (int v = 0; v < Vectors; ++v) {
    const int rest = count - v * kLanes;
    value[v] = rest >= kLanes ? load(x + v * kLanes) : load_partial(x + v * kLanes, rest);
    highest = max_int(highest, bits(absolute(value[v])));
  }
  return largest_int(highest);
}

// A 127th of it (kInt8Most); NaN where it is an infinity or NaN.
ANYSHARD_INLINE float scale_of(int32_t top) {
  float magnitude;
  __builtin_memcpy(&magnitude, &top, sizeof magnitude);
  return top < 0x7f800000 ? magnitude / static_cast<float>(kInt8Most) : __builtin_nanf("");
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
  const float scale = scale_of(read_group(x, count, value));
  const bool finite = scale == scale;
  if (!finite || scale == 0.0f) {
    __builtin_memset(values, 0, kQ8Inputs);
    __builtin_memset(magnitudes, 0, kQ8Inputs);
    return {scale, 0};
  }
  IntVec q[kVectors];
  round_to(value, scale, kInt8Most, q);
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

// Of K or V in an int8 page: the scale is rounded to float16, and NaN (with q = 0) also where it is
// too large for that, so that a score or an output shows it.
inline uint32_t quantize_group(const float* x, int count, uint8_t* q) {
  constexpr int kVectors = kKvGroup / kLanes;
  constexpr uint32_t kNanHalf = 0x7e00;
  Vec value[kVectors];
  const float wanted = scale_of(read_group(x, count, value));
  const uint32_t half = wanted == wanted ? float16_bits(wanted) : kNanHalf;
  if (half == 0 || half >= 0x7c00) {
    __builtin_memset(q, 0, kKvGroup);
    return half == 0 ? 0 : kNanHalf;
  }
  IntVec rounded[kVectors];
  round_to(value, float16_value(half), kInt8Most, rounded);
  store_bytes(q, rounded[0], rounded[1], rounded[2], rounded[3]);
  return half;
}

// A query by groups of kKvGroup dims: scale = largest magnitude / 32767, whole = rint(query /
// scale). A group that is not finite has the scale NaN, so that its scores show it.
inline void quantize_query(const float* query, int head_dim, int16_t* whole, float* scales) {
  constexpr int kVectors = kKvGroup / kLanes;
  for (int first = 0; first < head_dim; first += kKvGroup, ++scales) {
    const int rest = head_dim - first;
    Vec value[kVectors];
    const int32_t top = read_group(query + first, rest < kKvGroup ? rest : kKvGroup, value);
    float magnitude;
    __builtin_memcpy(&magnitude, &top, sizeof magnitude);
    const bool finite = top < 0x7f800000;
    *scales = finite ? magnitude / static_cast<float>(kKvWhole) : __builtin_nanf("");
    IntVec q[kVectors];
    if (finite && *scales > 0.0f) {
      round_to(value, *scales, kKvWhole, q);
    } else {
      for (int v = 0; v < kVectors; ++v) q[v] = broadcast_int(0);
    }
    for (int v = 0; v < kVectors; v += 2) {
      if (first + v * kLanes >= head_dim) break;  // the buffer has room for whole groups of 16
      store_shorts(whole + first + v * kLanes, q[v], q[v + 1]);
    }
  }
}
