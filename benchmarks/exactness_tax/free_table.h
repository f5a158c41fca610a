// The table of kernels whose sums have no fixed order; those that sum nothing are the body's own.
#pragma once

#include "free_attention.h"
#include "free_linear.h"
#include "free_norm.h"
#include "free_reduce.h"

template <int Spans>
constexpr Kernels free_order(Kernels kernels) {
  kernels.norm = free_norm;
  kernels.linear = free_linear;
  kernels.attention_stripe = free_stripe<Spans>;
  kernels.attention_block = nullptr;
  kernels.attention_merge = free_merge;
  kernels.reduce = free_reduce;
  return kernels;
}
