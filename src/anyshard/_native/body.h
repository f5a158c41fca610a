// Every kernel once, for the Vec that the including file defined, and the table of them.
#pragma once

#include "attention.h"
#include "digest.h"
#include "elementary.h"
#include "int8.h"
#include "linear.h"
#include "norm.h"
#include "reduce.h"
#include "rope.h"
#include "sampling.h"
#include "silu.h"
#include "spread.h"
#include "widen.h"
#include "wire.h"

constexpr Kernels kTable = {
    norm,         quantize,   quantize_group,   quantize_query,  linear,          linear_int8,
    silu_product, rope,       attention_stripe, attention_block, attention_merge, attention_finish,
    reduce,       exp_into,   argmax,           gumbel_argmax,   spread,          digest,
    digest_panel, wire_round, wire_decode};
