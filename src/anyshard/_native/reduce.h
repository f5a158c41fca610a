// The merges that row-parallel ranks leave over, then bias, then the residual.
#pragma once

// The top of the stack is held in a register; those below it are stored when it grows.
template <typename Load>
ANYSHARD_INLINE Vec merge_nodes(const int32_t* merges, int num_nodes, const Load& load_node) {
  Vec top = load_node(0);
  if (num_nodes == 1) return top;
  Vec below[kMaxDepth];
  int depth = 0;
  for (int j = 1; j < num_nodes; ++j) {
    Vec value = load_node(j);
    int rest = merges[j];
    if (rest == 0) {
      below[depth++] = top;
    } else {
      value = add(top, value);
      while (--rest > 0) value = add(below[--depth], value);
    }
    top = value;
  }
  return top;
}

inline void reduce(const float* const* nodes, const int32_t* merges, int num_nodes,
                   const float* bias, float* x, int count) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Vec value = merge_nodes(merges, num_nodes, [&](int j) { return load(nodes[j] + i); });
    if (bias != nullptr) value = add(value, load(bias + i));
    store(x + i, add(load(x + i), value));
  }
  if (i < count) {
    const int rest = count - i;
    Vec value =
        merge_nodes(merges, num_nodes, [&](int j) { return load_partial(nodes[j] + i, rest); });
    if (bias != nullptr) value = add(value, load_partial(bias + i, rest));
    store_partial(x + i, add(load_partial(x + i, rest), value), rest);
  }
}
