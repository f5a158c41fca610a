// The twins of body_avx2.cpp, compiled with its flags.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "coefficients.h"
#include "free_bodies.h"

namespace anyshard {
namespace free_avx2 {
namespace {
#include "vec_avx2.h"
//
#include "body.h"
//
#include "free_int8.h"
#include "free_table.h"

template <int Spans>
constexpr Kernels with_int8() {
  Kernels kernels = free_order<Spans>(kTable);
  kernels.linear_int8 = free_linear_int8;
  return kernels;
}
}  // namespace
}  // namespace free_avx2

const Kernels kFreeAvx2 = free_avx2::with_int8<1>();
const Kernels kFreeAvx2Halves = free_avx2::with_int8<2>();

}  // namespace anyshard
