// The merges that row-parallel ranks leave over, then bias, then the residual.
#pragma once

inline Vec merge_nodes(const float* const* nodes, const int32_t* merges, int num_nodes, int i,
                       int count) {
  Vec stack[kMaxDepth];
  int top = 0;
  for (int j = 0; j < num_nodes; ++j) {
    Vec value = count == 8 ? load(nodes[j] + i) : load_partial(nodes[j] + i, count);
    for (int m = 0; m < merges[j]; ++m) value = add(stack[--top], value);
    stack[top++] = value;
  }
  return stack[0];
}

inline void reduce(const float* const* nodes, const int32_t* merges, int num_nodes,
                   const float* bias, float* x, int count) {
  for (int i = 0; i < count; i += 8) {
    const int lanes = count - i < 8 ? count - i : 8;
    Vec value = merge_nodes(nodes, merges, num_nodes, i, lanes);
    if (bias != nullptr) value = add(value, load_partial(bias + i, lanes));
    store_partial(x + i, add(load_partial(x + i, lanes), value), lanes);
  }
}
