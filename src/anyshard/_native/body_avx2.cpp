// The kernels for AVX2 + FMA + F16C. Only this file is compiled with those flags: everything below
// is in an unnamed namespace, so that no function of it can stand in for one of another file.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "coefficients.h"
#include "kernels.h"

namespace anyshard {
namespace avx2_body {
namespace {
#include "vec_avx2.h"
//
#include "body.h"
}  // namespace
}  // namespace avx2_body

const Kernels kAvx2Kernels = avx2_body::kTable;

}  // namespace anyshard
