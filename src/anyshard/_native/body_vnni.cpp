// Int8 linears and attention for AVX-512 VNNI, in vectors of 256 bits: one instruction where AVX2
// takes four, or two. All other kernels are AVX2's; wider vectors have not been tried.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "coefficients.h"
#include "kernels.h"

namespace anyshard {
namespace vnni_body {
namespace {
#include "vec_avx2.h"
//
#include "attention.h"
#include "int8.h"

Kernels with_int8(Kernels kernels) {
  kernels.linear_int8 = linear_int8;
  kernels.attention_stripe = attention_stripe;
  kernels.attention_block = attention_block;
  return kernels;
}
}  // namespace
}  // namespace vnni_body

const Kernels kVnniKernels = vnni_body::with_int8(kAvx2Kernels);

}  // namespace anyshard
