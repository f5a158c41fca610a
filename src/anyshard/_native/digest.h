// Digests of float32 bits: sum over i of mix(b_i + i * golden ratio) * key_i, modulo 2^64, i the
// absolute index. Integers only, so shards add up to the whole in any order, and every body is
// equal (docs/numerics.md, Digests).
#pragma once

#include "widen.h"

constexpr int32_t kDigestStep = static_cast<int32_t>(0x9E3779B9u);

// The 32-bit finaliser of murmur3: a bijection.
ANYSHARD_INLINE IntVec digest_mix(IntVec h) {
  h = multiply_low(xor_int(h, shift_right<16>(h)),
                   broadcast_int(static_cast<int32_t>(0x85EBCA6Bu)));
  h = multiply_low(xor_int(h, shift_right<13>(h)),
                   broadcast_int(static_cast<int32_t>(0xC2B2AE35u)));
  return xor_int(h, shift_right<16>(h));
}

// Of count floats, the first of them at absolute index `first`; keys[i] is the key of x[i], and
// seven more may be read after the last.
inline uint64_t digest(const float* x, int count, uint32_t first, const int32_t* keys) {
  IntVec offset = multiply_low(add_int(broadcast_int(static_cast<int32_t>(first)), lane_numbers()),
                               broadcast_int(kDigestStep));
  const IntVec stride =
      broadcast_int(static_cast<int32_t>(kLanes * static_cast<uint32_t>(kDigestStep)));
  Wide sum = wide_zero();
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const IntVec mixed = digest_mix(add_int(bits(load(x + i)), offset));
    const IntVec key = load_int(keys + i);
    sum = add_wide(sum, add_wide(even_products(mixed, key), odd_products(mixed, key)));
    offset = add_int(offset, stride);
  }
  if (i < count) {
    const IntVec mixed = digest_mix(add_int(bits(load_partial(x + i, count - i)), offset));
    const IntVec key = and_mask(load_int(keys + i), first_lanes(count - i));
    sum = add_wide(sum, add_wide(even_products(mixed, key), odd_products(mixed, key)));
  }
  return wide_sum(sum);
}

// Of the eight outputs of a panel, each over its inputs. scratch: [K][8], for narrower storage.
inline void digest_panel(const Linear& linear, int panel, const int32_t* keys, float* scratch,
                         uint64_t* out) {
  const float* w = scratch;
  if (linear.storage == Storage::kFloat32) {
    w = reinterpret_cast<const float*>(panel_at(linear, panel));
  } else {
    widen_panel(linear, panel, scratch);
  }
  IntVec offset = broadcast_int(0);
  Wide even = wide_zero();
  Wide odd = wide_zero();
  for (int k = 0; k < linear.num_inputs; ++k) {
    const IntVec mixed = digest_mix(add_int(bits(load(w + k * kLanes)), offset));
    const IntVec key = broadcast_int(keys[k]);
    even = add_wide(even, even_products(mixed, key));
    odd = add_wide(odd, odd_products(mixed, key));
    offset = add_int(offset, broadcast_int(kDigestStep));
  }
  uint64_t lanes[2][kLanes / 2];
  store_wide(lanes[0], even);
  store_wide(lanes[1], odd);
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = lanes[lane % 2][lane / 2];
}
