// A residual row as int8 wires carry it: q [D], then float16 scales [D / 32, rounded up], made as
// an int8 page makes them (quantize_group); and what a row is once it was carried: q * scale,
// exact. A block that is not finite, or too large, has the scale NaN, and is NaN: the next norm
// sees it.
#pragma once

#include "quantize.h"

// 32 bytes of q as what they stand for, of which the first `count` are stored.
ANYSHARD_INLINE void widen_block(const uint8_t* q, uint32_t half, int count, float* out) {
  const Vec scale = broadcast(float16_value(half));
  for (int first = 0; first < count; first += kLanes) {
    const Vec value = mul(to_float(load_signed_bytes(q + first)), scale);
    if (count - first >= kLanes) {
      store(out + first, value);
    } else {
      store_partial(out + first, value, count - first);
    }
  }
}

inline void wire_round(float* x, int width, uint8_t* wire) {
  for (int first = 0, block = 0; first < width; first += kKvGroup, ++block) {
    const int count = width - first < kKvGroup ? width - first : kKvGroup;
    uint8_t q[kKvGroup];
    const uint32_t half = quantize_group(x + first, count, q);
    widen_block(q, half, count, x + first);
    if (wire == nullptr) continue;
    __builtin_memcpy(wire + first, q, static_cast<size_t>(count));
    uint8_t* scale = wire + width + 2 * block;
    scale[0] = static_cast<uint8_t>(half);
    scale[1] = static_cast<uint8_t>(half >> 8);
  }
}

inline void wire_decode(const uint8_t* wire, int width, float* x) {
  for (int first = 0, block = 0; first < width; first += kKvGroup, ++block) {
    const int count = width - first < kKvGroup ? width - first : kKvGroup;
    uint8_t q[kKvGroup] = {};
    __builtin_memcpy(q, wire + first, static_cast<size_t>(count));
    const uint8_t* scale = wire + width + 2 * block;
    widen_block(q, static_cast<uint32_t>(scale[0]) | static_cast<uint32_t>(scale[1]) << 8, count,
                x + first);
  }
}
