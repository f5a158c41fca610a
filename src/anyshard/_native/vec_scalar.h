// Eight float lanes in plain C++: the body for every other CPU, and the twin that the AVX2 body
// is tested against. `__builtin_fmaf` is one instruction where the target has it and libm's
// correctly rounded fmaf elsewhere.
//
// Included inside the body's own namespace (body_scalar.cpp).
#pragma once

#define ANYSHARD_INLINE inline __attribute__((always_inline))

// Widened first, in memory: a fifth of the code, and fma is what takes the time here.
constexpr bool kWidensInTiles = false;

struct alignas(32) Vec {
  float lane[8];
};
struct alignas(32) IntVec {
  int32_t lane[8];
};

template <typename Result, typename Function>
ANYSHARD_INLINE Result each_lane(Function function) {
  Result result;
  for (int i = 0; i < 8; ++i) result.lane[i] = function(i);
  return result;
}
ANYSHARD_INLINE int32_t float_bits(float a) {
  int32_t result;
  __builtin_memcpy(&result, &a, sizeof result);
  return result;
}
ANYSHARD_INLINE float bits_float(int32_t a) {
  float result;
  __builtin_memcpy(&result, &a, sizeof result);
  return result;
}
// Wrapping arithmetic: int32 lanes behave as the hardware's do.
ANYSHARD_INLINE int32_t wrap(uint32_t a) { return static_cast<int32_t>(a); }
ANYSHARD_INLINE uint32_t word(int32_t a) { return static_cast<uint32_t>(a); }

#define ANYSHARD_EACH(type, expression) \
  return each_lane<type>([&](int i) __attribute__((always_inline)) { return expression; })

ANYSHARD_INLINE Vec zero() { ANYSHARD_EACH(Vec, 0.0f * static_cast<float>(i)); }
ANYSHARD_INLINE Vec load(const float* p) { ANYSHARD_EACH(Vec, p[i]); }
// Eight 16-bit floats, widened: exact, subnormals too.
ANYSHARD_INLINE Vec load_float16(const uint8_t* p) {
  ANYSHARD_EACH(Vec, widen_half(read_half(p + 2 * i)));
}
ANYSHARD_INLINE Vec load_bfloat16(const uint8_t* p) {
  ANYSHARD_EACH(Vec, widen_bfloat(read_half(p + 2 * i)));
}
// Eight int8, widened.
ANYSHARD_INLINE IntVec load_signed_bytes(const uint8_t* p) {
  ANYSHARD_EACH(IntVec, static_cast<int8_t>(p[i]));
}
// Pairs of 16-bit integers in the lanes: 16 int8 widened; one pair in all lanes; a sum and both
// products of each lane, which must fit.
ANYSHARD_INLINE int32_t pair_of(int32_t low, int32_t high) {
  return wrap((word(low) & 0xffffu) | word(high) << 16);
}
ANYSHARD_INLINE int32_t low_of(int32_t pair) { return static_cast<int16_t>(word(pair) & 0xffffu); }
ANYSHARD_INLINE int32_t high_of(int32_t pair) { return static_cast<int16_t>(word(pair) >> 16); }
ANYSHARD_INLINE IntVec load_byte_pairs(const uint8_t* p) {
  ANYSHARD_EACH(IntVec, pair_of(static_cast<int8_t>(p[2 * i]), static_cast<int8_t>(p[2 * i + 1])));
}
ANYSHARD_INLINE IntVec broadcast_pair(const int16_t* p) {
  ANYSHARD_EACH(IntVec, (static_cast<void>(i), pair_of(p[0], p[1])));
}
ANYSHARD_INLINE IntVec add_pairs(IntVec sum, IntVec a, IntVec b) {
  ANYSHARD_EACH(IntVec, sum.lane[i] + low_of(a.lane[i]) * low_of(b.lane[i]) +
                            high_of(a.lane[i]) * high_of(b.lane[i]));
}
// 16 lanes of a, then b, as int16; each is within it.
ANYSHARD_INLINE void store_shorts(int16_t* p, IntVec a, IntVec b) {
  for (int i = 0; i < 8; ++i) p[i] = static_cast<int16_t>(a.lane[i]);
  for (int i = 0; i < 8; ++i) p[i + 8] = static_cast<int16_t>(b.lane[i]);
}
// The nearest 16-bit float, even on ties, an infinity where it is too large; and its value.
ANYSHARD_INLINE uint32_t float16_bits(float a) { return narrow_half(a); }
ANYSHARD_INLINE float float16_value(uint32_t half) { return widen_half(half); }
ANYSHARD_INLINE void store(float* p, Vec a) { __builtin_memcpy(p, a.lane, sizeof a.lane); }
ANYSHARD_INLINE Vec broadcast(float a) { ANYSHARD_EACH(Vec, (static_cast<void>(i), a)); }
ANYSHARD_INLINE Vec add(Vec a, Vec b) { ANYSHARD_EACH(Vec, a.lane[i] + b.lane[i]); }
ANYSHARD_INLINE Vec sub(Vec a, Vec b) { ANYSHARD_EACH(Vec, a.lane[i] - b.lane[i]); }
ANYSHARD_INLINE Vec mul(Vec a, Vec b) { ANYSHARD_EACH(Vec, a.lane[i] * b.lane[i]); }
ANYSHARD_INLINE Vec div(Vec a, Vec b) { ANYSHARD_EACH(Vec, a.lane[i] / b.lane[i]); }
ANYSHARD_INLINE Vec fma(Vec a, Vec b, Vec c) {
  ANYSHARD_EACH(Vec, __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]));
}
// a if a > b else b, so b where either is NaN.
ANYSHARD_INLINE Vec max(Vec a, Vec b) {
  ANYSHARD_EACH(Vec, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]);
}
// Nearest even by adding and taking away 2^23; larger values are whole already.
ANYSHARD_INLINE float round_even_one(float a) {
  const float magnitude = a < 0.0f ? -a : a;
  if (!(magnitude < 0x1p23f)) return a;
  return __builtin_copysignf((magnitude + 0x1p23f) - 0x1p23f, a);
}
ANYSHARD_INLINE Vec round_even(Vec a) { ANYSHARD_EACH(Vec, round_even_one(a.lane[i])); }
ANYSHARD_INLINE float square_root(float a) { return __builtin_sqrtf(a); }

ANYSHARD_INLINE IntVec bits(Vec a) { ANYSHARD_EACH(IntVec, float_bits(a.lane[i])); }
ANYSHARD_INLINE Vec from_bits(IntVec a) { ANYSHARD_EACH(Vec, bits_float(a.lane[i])); }
ANYSHARD_INLINE IntVec broadcast_int(int32_t a) {
  ANYSHARD_EACH(IntVec, (static_cast<void>(i), a));
}
ANYSHARD_INLINE IntVec lane_numbers() { ANYSHARD_EACH(IntVec, i); }
ANYSHARD_INLINE IntVec load_int(const int32_t* p) { ANYSHARD_EACH(IntVec, p[i]); }
ANYSHARD_INLINE void store_int(int32_t* p, IntVec a) { __builtin_memcpy(p, a.lane, 32); }
// Nearest even; lanes outside int32 are unspecified.
ANYSHARD_INLINE int32_t to_int_one(float a) {
  const float whole = round_even_one(a);
  return whole >= -0x1p31f && whole < 0x1p31f ? static_cast<int32_t>(whole) : INT32_MIN;
}
ANYSHARD_INLINE IntVec to_int(Vec a) { ANYSHARD_EACH(IntVec, to_int_one(a.lane[i])); }
ANYSHARD_INLINE Vec to_float(IntVec a) { ANYSHARD_EACH(Vec, static_cast<float>(a.lane[i])); }
ANYSHARD_INLINE IntVec add_int(IntVec a, IntVec b) {
  ANYSHARD_EACH(IntVec, wrap(word(a.lane[i]) + word(b.lane[i])));
}
ANYSHARD_INLINE IntVec sub_int(IntVec a, IntVec b) {
  ANYSHARD_EACH(IntVec, wrap(word(a.lane[i]) - word(b.lane[i])));
}
ANYSHARD_INLINE IntVec xor_int(IntVec a, IntVec b) { ANYSHARD_EACH(IntVec, a.lane[i] ^ b.lane[i]); }
template <int Count>
ANYSHARD_INLINE IntVec shift_left(IntVec a) {
  ANYSHARD_EACH(IntVec, wrap(word(a.lane[i]) << Count));
}
template <int Count>
ANYSHARD_INLINE IntVec shift_right_signed(IntVec a) {
  ANYSHARD_EACH(IntVec, a.lane[i] >> Count);
}
template <int Count>
ANYSHARD_INLINE IntVec shift_right(IntVec a) {
  ANYSHARD_EACH(IntVec, wrap(word(a.lane[i]) >> Count));
}
// Byte number Byte of each lane (0 is the lowest) as the highest, zeros below.
template <int Byte>
ANYSHARD_INLINE IntVec top_byte(IntVec a) {
  ANYSHARD_EACH(IntVec, wrap(word(a.lane[i]) >> (8 * Byte) << 24));
}
// Low and high halves of the unsigned 64-bit products.
ANYSHARD_INLINE uint64_t product(int32_t a, int32_t b) {
  return static_cast<uint64_t>(word(a)) * word(b);
}
ANYSHARD_INLINE IntVec multiply_low(IntVec a, IntVec b) {
  ANYSHARD_EACH(IntVec, wrap(static_cast<uint32_t>(product(a.lane[i], b.lane[i]))));
}
ANYSHARD_INLINE IntVec multiply_high(IntVec a, IntVec b) {
  ANYSHARD_EACH(IntVec, wrap(static_cast<uint32_t>(product(a.lane[i], b.lane[i]) >> 32)));
}

// Four sums modulo 2^64. Products are of unsigned 32-bit lanes: 0, 2, 4, 6 or 1, 3, 5, 7.
struct alignas(32) Wide {
  uint64_t lane[4];
};
ANYSHARD_INLINE Wide wide_zero() { return Wide{{0, 0, 0, 0}}; }
ANYSHARD_INLINE Wide add_wide(Wide a, Wide b) {
  for (int i = 0; i < 4; ++i) a.lane[i] += b.lane[i];
  return a;
}
ANYSHARD_INLINE Wide even_products(IntVec a, IntVec b) {
  Wide result;
  for (int i = 0; i < 4; ++i) result.lane[i] = product(a.lane[2 * i], b.lane[2 * i]);
  return result;
}
ANYSHARD_INLINE Wide odd_products(IntVec a, IntVec b) {
  Wide result;
  for (int i = 0; i < 4; ++i) result.lane[i] = product(a.lane[2 * i + 1], b.lane[2 * i + 1]);
  return result;
}
ANYSHARD_INLINE void store_wide(uint64_t* p, Wide a) { __builtin_memcpy(p, a.lane, 32); }
ANYSHARD_INLINE uint64_t wide_sum(Wide a) { return a.lane[0] + a.lane[1] + a.lane[2] + a.lane[3]; }

// Masks are all ones or all zeros in each lane.
ANYSHARD_INLINE IntVec less(Vec a, Vec b) { ANYSHARD_EACH(IntVec, -(a.lane[i] < b.lane[i])); }
ANYSHARD_INLINE IntVec not_less_equal(Vec a, Vec b) {
  ANYSHARD_EACH(IntVec, -!(a.lane[i] <= b.lane[i]));
}
ANYSHARD_INLINE IntVec is_nan(Vec a) { ANYSHARD_EACH(IntVec, -(a.lane[i] != a.lane[i])); }
ANYSHARD_INLINE IntVec greater_int(IntVec a, IntVec b) {
  ANYSHARD_EACH(IntVec, -(a.lane[i] > b.lane[i]));
}
ANYSHARD_INLINE IntVec max_int(IntVec a, IntVec b) {
  ANYSHARD_EACH(IntVec, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]);
}
ANYSHARD_INLINE IntVec min_int(IntVec a, IntVec b) {
  ANYSHARD_EACH(IntVec, a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]);
}
ANYSHARD_INLINE IntVec absolute_int(IntVec a) {
  ANYSHARD_EACH(IntVec, a.lane[i] < 0 ? wrap(0 - word(a.lane[i])) : a.lane[i]);
}
ANYSHARD_INLINE IntVec and_mask(IntVec a, IntVec b) {
  ANYSHARD_EACH(IntVec, a.lane[i] & b.lane[i]);
}
ANYSHARD_INLINE IntVec or_mask(IntVec a, IntVec b) { ANYSHARD_EACH(IntVec, a.lane[i] | b.lane[i]); }
ANYSHARD_INLINE bool any(IntVec mask) {
  int32_t found = 0;
  for (int i = 0; i < 8; ++i) found |= mask.lane[i];
  return found != 0;
}
ANYSHARD_INLINE Vec select(IntVec mask, Vec yes, Vec no) {
  ANYSHARD_EACH(Vec, mask.lane[i] != 0 ? yes.lane[i] : no.lane[i]);
}
ANYSHARD_INLINE IntVec select_int(IntVec mask, IntVec yes, IntVec no) {
  ANYSHARD_EACH(IntVec, mask.lane[i] != 0 ? yes.lane[i] : no.lane[i]);
}
ANYSHARD_INLINE Vec absolute(Vec a) {
  ANYSHARD_EACH(Vec, bits_float(float_bits(a.lane[i]) & 0x7fffffff));
}
ANYSHARD_INLINE Vec negate(Vec a) {
  ANYSHARD_EACH(Vec, bits_float(float_bits(a.lane[i]) ^ INT32_MIN));
}

// Lanes below `count`; memory of the other lanes is not touched, loads give +0 there.
ANYSHARD_INLINE IntVec first_lanes(int count) { ANYSHARD_EACH(IntVec, -(count > i)); }
ANYSHARD_INLINE Vec load_partial(const float* p, int count) {
  ANYSHARD_EACH(Vec, i < count ? p[i] : 0.0f);
}
ANYSHARD_INLINE void store_partial(float* p, Vec a, int count) {
  for (int i = 0; i < 8 && i < count; ++i) p[i] = a.lane[i];
}

// Halving tree of eight lanes: i + (i + 4), then + 2, then + 1.
ANYSHARD_INLINE float halving_sum(Vec a) {
  for (int step = 4; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) a.lane[i] = a.lane[i] + a.lane[i + step];
  }
  return a.lane[0];
}
// Largest lane; no lane may be NaN.
ANYSHARD_INLINE float largest(Vec a) {
  float result = a.lane[0];
  for (int i = 1; i < 8; ++i) result = a.lane[i] > result ? a.lane[i] : result;
  return result;
}
ANYSHARD_INLINE int32_t largest_int(IntVec a) {
  int32_t result = a.lane[0];
  for (int i = 1; i < 8; ++i) result = a.lane[i] > result ? a.lane[i] : result;
  return result;
}
// Of all lanes, modulo 2^32.
ANYSHARD_INLINE int32_t sum_int(IntVec a) {
  uint32_t sum = 0;
  for (int i = 0; i < 8; ++i) sum += word(a.lane[i]);
  return wrap(sum);
}

// 32 bytes, the lanes of a, b, c, d in order; each lane is within int8.
ANYSHARD_INLINE void store_bytes(uint8_t* p, IntVec a, IntVec b, IntVec c, IntVec d) {
  for (int i = 0; i < 8; ++i) {
    p[i] = static_cast<uint8_t>(a.lane[i]);
    p[8 + i] = static_cast<uint8_t>(b.lane[i]);
    p[16 + i] = static_cast<uint8_t>(c.lane[i]);
    p[24 + i] = static_cast<uint8_t>(d.lane[i]);
  }
}

// Dots of int8: lane += the sum of its four bytes of w times the row's four bytes, whose magnitudes
// come beside them.
using RowBytes = const uint8_t*;
using DotWeights = const uint8_t*;
ANYSHARD_INLINE RowBytes row_bytes(const uint8_t* p) { return p; }
ANYSHARD_INLINE IntVec start_dot(const float*) { return broadcast_int(0); }
ANYSHARD_INLINE DotWeights dot_weights(const uint8_t* w) { return w; }
ANYSHARD_INLINE IntVec add_dot(IntVec sum, DotWeights w, RowBytes, RowBytes value) {
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 4; ++k) {
      sum.lane[i] += static_cast<int8_t>(w[4 * i + k]) * static_cast<int8_t>(value[k]);
    }
  }
  return sum;
}

#undef ANYSHARD_EACH
