// Eight float lanes on AVX2 + FMA. Same names and same bits as vec_scalar.h.
//
// Included inside the body's own namespace (body_avx2.cpp), so that no inline function compiled
// with wider instructions can be merged by the linker into code for an older CPU.
#pragma once

#define ANYSHARD_INLINE inline __attribute__((always_inline))

// Whether register tiles take weights of every storage, widening them on the way.
constexpr bool kWidensInTiles = true;

using Vec = __m256;
using IntVec = __m256i;

ANYSHARD_INLINE Vec zero() { return _mm256_setzero_ps(); }
ANYSHARD_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
// Eight 16-bit floats, widened: exact, subnormals too.
ANYSHARD_INLINE Vec load_float16(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
ANYSHARD_INLINE Vec load_bfloat16(const uint8_t* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
// Eight int8, widened.
ANYSHARD_INLINE IntVec load_signed_bytes(const uint8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
// Pairs of 16-bit integers in the lanes: 16 int8 widened; one pair in all lanes; a sum and both
// products of each lane, which must fit.
ANYSHARD_INLINE IntVec load_byte_pairs(const uint8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
ANYSHARD_INLINE IntVec broadcast_pair(const int16_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm256_set1_epi32(word);
}
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
ANYSHARD_INLINE IntVec add_pairs(IntVec sum, IntVec a, IntVec b) {
  return _mm256_dpwssd_epi32(sum, a, b);
}
#else
ANYSHARD_INLINE IntVec add_pairs(IntVec sum, IntVec a, IntVec b) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  asm volatile("" : "+x"(sum));  // gcc 12 makes all products first, and has no registers for them
  return sum;
}
#endif
// 16 lanes of a, then b, as int16; each is within it.
ANYSHARD_INLINE void store_shorts(int16_t* p, IntVec a, IntVec b) {
  const __m256i mixed = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), mixed);
}
// The nearest 16-bit float, even on ties, an infinity where it is too large; and its value.
ANYSHARD_INLINE uint32_t float16_bits(float a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return static_cast<uint32_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(a), kNearest), 0));
}
ANYSHARD_INLINE float float16_value(uint32_t half) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(half))));
}
ANYSHARD_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
ANYSHARD_INLINE Vec broadcast(float a) { return _mm256_set1_ps(a); }
ANYSHARD_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
ANYSHARD_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
ANYSHARD_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
ANYSHARD_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
ANYSHARD_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// a if a > b else b, so b where either is NaN.
ANYSHARD_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
ANYSHARD_INLINE Vec round_even(Vec a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
ANYSHARD_INLINE float square_root(float a) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(a))); }

ANYSHARD_INLINE IntVec bits(Vec a) { return _mm256_castps_si256(a); }
ANYSHARD_INLINE Vec from_bits(IntVec a) { return _mm256_castsi256_ps(a); }
ANYSHARD_INLINE IntVec broadcast_int(int32_t a) { return _mm256_set1_epi32(a); }
ANYSHARD_INLINE IntVec lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
ANYSHARD_INLINE IntVec load_int(const int32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
ANYSHARD_INLINE void store_int(int32_t* p, IntVec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
}
// Nearest even; lanes outside int32 are unspecified.
ANYSHARD_INLINE IntVec to_int(Vec a) { return _mm256_cvtps_epi32(a); }
ANYSHARD_INLINE Vec to_float(IntVec a) { return _mm256_cvtepi32_ps(a); }
ANYSHARD_INLINE IntVec add_int(IntVec a, IntVec b) { return _mm256_add_epi32(a, b); }
ANYSHARD_INLINE IntVec sub_int(IntVec a, IntVec b) { return _mm256_sub_epi32(a, b); }
ANYSHARD_INLINE IntVec xor_int(IntVec a, IntVec b) { return _mm256_xor_si256(a, b); }
template <int Count>
ANYSHARD_INLINE IntVec shift_left(IntVec a) {
  return _mm256_slli_epi32(a, Count);
}
template <int Count>
ANYSHARD_INLINE IntVec shift_right_signed(IntVec a) {
  return _mm256_srai_epi32(a, Count);
}
template <int Count>
ANYSHARD_INLINE IntVec shift_right(IntVec a) {
  return _mm256_srli_epi32(a, Count);
}
// Byte number Byte of each lane (0 is the lowest) as the highest, zeros below.
template <int Byte>
ANYSHARD_INLINE IntVec top_byte(IntVec a) {
  if (Byte == 0) return _mm256_slli_epi32(a, 24);
  if (Byte == 3) return _mm256_and_si256(a, _mm256_set1_epi32(INT32_MIN >> 7));
  constexpr int kAt = Byte << 24 | 0x808080;
  return _mm256_shuffle_epi8(
      a, _mm256_setr_epi32(kAt, kAt + 0x04000000, kAt + 0x08000000, kAt + 0x0c000000, kAt,
                           kAt + 0x04000000, kAt + 0x08000000, kAt + 0x0c000000));
}
// Low and high halves of the unsigned 64-bit products.
ANYSHARD_INLINE IntVec multiply_low(IntVec a, IntVec b) { return _mm256_mullo_epi32(a, b); }
ANYSHARD_INLINE IntVec multiply_high(IntVec a, IntVec b) {
  const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
  return _mm256_blend_epi32(even, odd, 0xAA);
}

// Four sums modulo 2^64. Products are of unsigned 32-bit lanes: 0, 2, 4, 6 or 1, 3, 5, 7.
using Wide = __m256i;
ANYSHARD_INLINE Wide wide_zero() { return _mm256_setzero_si256(); }
ANYSHARD_INLINE Wide add_wide(Wide a, Wide b) { return _mm256_add_epi64(a, b); }
ANYSHARD_INLINE Wide even_products(IntVec a, IntVec b) { return _mm256_mul_epu32(a, b); }
ANYSHARD_INLINE Wide odd_products(IntVec a, IntVec b) {
  return _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
}
ANYSHARD_INLINE void store_wide(uint64_t* p, Wide a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
}
ANYSHARD_INLINE uint64_t wide_sum(Wide a) {
  uint64_t lanes[4];
  store_wide(lanes, a);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

// Masks are all ones or all zeros in each lane.
ANYSHARD_INLINE IntVec less(Vec a, Vec b) { return bits(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
ANYSHARD_INLINE IntVec not_less_equal(Vec a, Vec b) {
  return bits(_mm256_cmp_ps(a, b, _CMP_NLE_UQ));
}
ANYSHARD_INLINE IntVec is_nan(Vec a) { return bits(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
ANYSHARD_INLINE IntVec greater_int(IntVec a, IntVec b) { return _mm256_cmpgt_epi32(a, b); }
ANYSHARD_INLINE IntVec max_int(IntVec a, IntVec b) { return _mm256_max_epi32(a, b); }
ANYSHARD_INLINE IntVec min_int(IntVec a, IntVec b) { return _mm256_min_epi32(a, b); }
ANYSHARD_INLINE IntVec absolute_int(IntVec a) { return _mm256_abs_epi32(a); }
ANYSHARD_INLINE IntVec and_mask(IntVec a, IntVec b) { return _mm256_and_si256(a, b); }
ANYSHARD_INLINE IntVec or_mask(IntVec a, IntVec b) { return _mm256_or_si256(a, b); }
ANYSHARD_INLINE bool any(IntVec mask) { return _mm256_movemask_ps(_mm256_castsi256_ps(mask)) != 0; }
ANYSHARD_INLINE Vec select(IntVec mask, Vec yes, Vec no) {
  return _mm256_blendv_ps(no, yes, from_bits(mask));
}
ANYSHARD_INLINE IntVec select_int(IntVec mask, IntVec yes, IntVec no) {
  return _mm256_blendv_epi8(no, yes, mask);
}
ANYSHARD_INLINE Vec absolute(Vec a) {
  return _mm256_and_ps(a, from_bits(_mm256_set1_epi32(0x7fffffff)));
}
ANYSHARD_INLINE Vec negate(Vec a) {
  return _mm256_xor_ps(a, from_bits(_mm256_set1_epi32(INT32_MIN)));
}

// Lanes below `count`; memory of the other lanes is not touched, loads give +0 there.
ANYSHARD_INLINE IntVec first_lanes(int count) {
  return greater_int(broadcast_int(count), lane_numbers());
}
ANYSHARD_INLINE Vec load_partial(const float* p, int count) {
  return _mm256_maskload_ps(p, first_lanes(count));
}
ANYSHARD_INLINE void store_partial(float* p, Vec a, int count) {
  _mm256_maskstore_ps(p, first_lanes(count), a);
}

// Halving tree of eight lanes: i + (i + 4), then + 2, then + 1.
ANYSHARD_INLINE float halving_sum(Vec a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  half = _mm_add_ss(half, _mm_shuffle_ps(half, half, 1));
  return _mm_cvtss_f32(half);
}
// Largest lane; no lane may be NaN.
ANYSHARD_INLINE float largest(Vec a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  half = _mm_max_ss(half, _mm_shuffle_ps(half, half, 1));
  return _mm_cvtss_f32(half);
}
ANYSHARD_INLINE int32_t largest_int(IntVec a) {
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtsi128_si32(half);
}
// Of all lanes, modulo 2^32.
ANYSHARD_INLINE int32_t sum_int(IntVec a) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtsi128_si32(half);
}

// 32 bytes, the lanes of a, b, c, d in order; each lane is within int8.
ANYSHARD_INLINE void store_bytes(uint8_t* p, IntVec a, IntVec b, IntVec c, IntVec d) {
  const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(mixed, order));
}

// Dots of int8: lane += the sum of its four bytes of w times the row's four bytes, whose magnitudes
// come beside them. The sum starts from start_dot, which reads the leaf's offset where the weights
// are taken as w + 128.
using RowBytes = IntVec;
using DotWeights = IntVec;
ANYSHARD_INLINE RowBytes row_bytes(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm256_set1_epi32(word);
}
ANYSHARD_INLINE IntVec load_bytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
ANYSHARD_INLINE IntVec start_dot(const float* offset) {
  return row_bytes(reinterpret_cast<const uint8_t*>(offset));
}
ANYSHARD_INLINE DotWeights dot_weights(const uint8_t* w) {
  return _mm256_xor_si256(load_bytes(w), _mm256_set1_epi8(-128));
}
ANYSHARD_INLINE IntVec add_dot(IntVec sum, DotWeights w, RowBytes, RowBytes value) {
  return _mm256_dpbusd_epi32(sum, w, value);
}
#else
ANYSHARD_INLINE IntVec start_dot(const float*) { return _mm256_setzero_si256(); }
ANYSHARD_INLINE DotWeights dot_weights(const uint8_t* w) { return load_bytes(w); }
// A pair of products is at most 2 * 127 * 127, within int16, as no byte is -128.
ANYSHARD_INLINE IntVec add_dot(IntVec sum, DotWeights w, RowBytes magnitude, RowBytes value) {
  const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(w, value));
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  // gcc 12 makes a tree of the additions of a block, whose leaves do not fit in registers
  asm("" : "+x"(sum));
  return sum;
}
#endif
