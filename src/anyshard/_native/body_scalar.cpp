// The kernels in plain C++, for any CPU.
#include <cstddef>
#include <cstdint>

#include "coefficients.h"
#include "half.h"
#include "kernels.h"

namespace anyshard {
namespace scalar_body {
namespace {
#include "vec_scalar.h"
//
#include "body.h"
}  // namespace
}  // namespace scalar_body

const Kernels kScalarKernels = scalar_body::kTable;

}  // namespace anyshard
