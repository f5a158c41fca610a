// The residual plus every node as it comes, then the bias: no stack.
#pragma once

inline void free_reduce(const float* const* nodes, const int32_t*, int num_nodes, const float* bias,
                        float* x, int count) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Vec value = load(x + i);
    for (int j = 0; j < num_nodes; ++j) value = add(value, load(nodes[j] + i));
    if (bias != nullptr) value = add(value, load(bias + i));
    store(x + i, value);
  }
  if (i < count) {
    const int rest = count - i;
    Vec value = load_partial(x + i, rest);
    for (int j = 0; j < num_nodes; ++j) value = add(value, load_partial(nodes[j] + i, rest));
    if (bias != nullptr) value = add(value, load_partial(bias + i, rest));
    store_partial(x + i, value, rest);
  }
}
