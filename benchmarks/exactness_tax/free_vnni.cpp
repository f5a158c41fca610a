// The twins of body_vnni.cpp, compiled with its flags: int8 linears, and AVX2's of the rest.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "free_bodies.h"
#include "pool.h"

namespace anyshard {
namespace free_vnni {
namespace {
#include "vec_avx2.h"
//
#include "free_int8.h"

Kernels with_int8(Kernels kernels) {
  kernels.linear_int8 = free_linear_int8;
  return kernels;
}
}  // namespace
}  // namespace free_vnni

Kernels without_sweeps(Kernels kernels) {
  kernels.attention_block = nullptr;
  return kernels;
}

void add_free_order_bodies(std::vector<NamedBody>& bodies) {
  static const Kernels vnni_stripes = without_sweeps(kVnniKernels);
  static const Kernels avx2_stripes = without_sweeps(kAvx2Kernels);
  static const Kernels vnni = free_vnni::with_int8(kFreeAvx2);
  static const Kernels vnni_halves = free_vnni::with_int8(kFreeAvx2Halves);
  if (bodies.front().kernels == &kVnniKernels) {
    bodies.push_back({"vnni-stripes", &vnni_stripes});
    bodies.push_back({"vnni-free", &vnni});
    bodies.push_back({"vnni-free-halves", &vnni_halves});
  }
  bodies.push_back({"avx2-stripes", &avx2_stripes});
  bodies.push_back({"avx2-free", &kFreeAvx2});
  bodies.push_back({"avx2-free-halves", &kFreeAvx2Halves});
}

}  // namespace anyshard
