// 16-bit floats of checkpoints, for code that reads them one by one. Exact: every binary16 and
// every bfloat16 value is a binary32 value.
#pragma once

#include <cstdint>
#include <cstring>

namespace anyshard {

inline float from_pattern(uint32_t pattern) {
  float value;
  std::memcpy(&value, &pattern, sizeof value);
  return value;
}

inline uint32_t read_half(const uint8_t* p) {
  return static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8;
}

inline void write_half(uint8_t* p, uint32_t half) {
  p[0] = static_cast<uint8_t>(half);
  p[1] = static_cast<uint8_t>(half >> 8);
}

inline float widen_bfloat(uint32_t half) { return from_pattern(half << 16); }

// Subnormals go through an exact subtraction.
inline float widen_half(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t exponent = half & 0x7c00u;
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  if (exponent == 0x7c00u) return from_pattern(sign | magnitude | 0x7f800000u);
  if (exponent != 0) return from_pattern(sign | (magnitude + (112u << 23)));
  const float value = from_pattern(magnitude + (113u << 23)) - from_pattern(113u << 23);
  uint32_t pattern;
  std::memcpy(&pattern, &value, sizeof pattern);
  return from_pattern(sign | pattern);
}

// Nearest binary16, even on ties; an infinity where it is too large. Not for NaN.
inline uint32_t narrow_half(float value) {
  uint32_t pattern;
  std::memcpy(&pattern, &value, sizeof pattern);
  const uint32_t sign = pattern >> 16 & 0x8000u;
  const float magnitude = from_pattern(pattern & 0x7fffffffu);
  if (magnitude >= 65520.0f) return sign | 0x7c00u;
  if (magnitude < 0x1p-14f) {  // a whole number of 2^-24: adding 2^-1 rounds it there
    const float shifted = magnitude + 0.5f;
    std::memcpy(&pattern, &shifted, sizeof pattern);
    return sign | (pattern - 0x3f000000u);
  }
  pattern &= 0x7fffffffu;
  const uint32_t odd = pattern >> 13 & 1u;
  return sign | ((pattern - (112u << 23) + 0xfffu + odd) >> 13);
}

}  // namespace anyshard
