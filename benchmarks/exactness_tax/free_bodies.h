// Bodies whose sums have no fixed order: of `avx2` and `vnni` the twins `avx2-free`, `vnni-free`
// and, for decode steps on several threads, `-free-halves` (free_attention.h). `-stripes` are the
// shipped kernels, going through KV head by head as the twins do. pool.h declares what the pool
// asks of them.
#pragma once

#include "kernels.h"

namespace anyshard {

extern const Kernels kFreeAvx2;
extern const Kernels kFreeAvx2Halves;

}  // namespace anyshard
