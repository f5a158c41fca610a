// Linear layers over weight panels: one lane per output, leaves of at most 64 k, a fixed tree.
//
// A register tile is Rows x Panels vectors of 8 outputs. Accumulators are named through compile
// time indices: gcc 12 keeps an array that a plain loop indexes in memory, and stores it at every
// k (27 instead of 68 GFLOP/s). Held by: test_native_disassembly.py.
#pragma once

template <int... Indices>
struct Sequence {};
template <int Count, int... Indices>
struct CountTo : CountTo<Count - 1, Count - 1, Indices...> {};
template <int... Indices>
struct CountTo<0, Indices...> {
  using type = Sequence<Indices...>;
};

template <int Rows, int Panels>
struct Tile {
  using RowIndices = typename CountTo<Rows>::type;
  using PanelIndices = typename CountTo<Panels>::type;
  using AllIndices = typename CountTo<Rows * Panels>::type;
  static constexpr int kSize = Rows * Panels;

  template <int Row, int... P>
  static ANYSHARD_INLINE void row_step(Vec (&acc)[kSize], const Vec (&w)[Panels], Vec x,
                                       Sequence<P...>) {
    ((acc[Row * Panels + P] = fma(x, w[P], acc[Row * Panels + P])), ...);
  }

  template <int... R, int... P>
  static ANYSHARD_INLINE void step(Vec (&acc)[kSize], const float* const (&x)[Rows],
                                   const float* const (&w)[Panels], ptrdiff_t k, Sequence<R...>,
                                   Sequence<P...> panels) {
    const Vec weights[Panels] = {load(w[P] + k * kLanes)...};
    (row_step<R>(acc, weights, broadcast(x[R][k]), panels), ...);
  }

  template <int... I>
  static ANYSHARD_INLINE void clear(Vec (&acc)[kSize], Sequence<I...>) {
    ((acc[I] = zero()), ...);
  }
  template <int... I>
  static ANYSHARD_INLINE void add_left(Vec (&acc)[kSize], const float* left, Sequence<I...>) {
    ((acc[I] = add(load(left + I * kLanes), acc[I])), ...);
  }
  template <int... I>
  static ANYSHARD_INLINE void push(const Vec (&acc)[kSize], float* entry, Sequence<I...>) {
    (store(entry + I * kLanes, acc[I]), ...);
  }
  template <int... I>
  static ANYSHARD_INLINE void advance(const float* (&pointers)[sizeof...(I)], ptrdiff_t count,
                                      Sequence<I...>) {
    ((pointers[I] += count), ...);
  }

  // Runs leaves [start, stop); entries [0, top) of `stack` are open before, the result after.
  template <int... R, int... P>
  static ANYSHARD_INLINE int run(const LeafProgram& program, int start, int stop,
                                 const float* x_first, ptrdiff_t x_stride, const float* w_first,
                                 ptrdiff_t w_stride, float* stack, int top, Sequence<R...> rows,
                                 Sequence<P...> panels) {
    constexpr AllIndices all{};
    const float* x[Rows] = {(x_first + R * x_stride)...};
    const float* w[Panels] = {(w_first + P * w_stride)...};
    for (int leaf = start; leaf < stop; ++leaf) {
      Vec acc[kSize];
      clear(acc, all);
      const ptrdiff_t length = program.lengths[leaf];
      ptrdiff_t k = 0;
      for (; k + 4 <= length; k += 4) {
        step(acc, x, w, 0, rows, panels);
        step(acc, x, w, 1, rows, panels);
        step(acc, x, w, 2, rows, panels);
        step(acc, x, w, 3, rows, panels);
        advance(x, 4, rows);
        advance(w, 4 * kLanes, panels);
      }
      for (; k < length; ++k) {
        step(acc, x, w, 0, rows, panels);
        advance(x, 1, rows);
        advance(w, kLanes, panels);
      }
      for (int merge = program.merges[leaf]; merge > 0; --merge) {
        --top;
        add_left(acc, stack + top * (kSize * kLanes), all);
      }
      push(acc, stack + top * (kSize * kLanes), all);
      ++top;
    }
    return top;
  }

  static __attribute__((noinline)) int leaves(const LeafProgram& program, int start, int stop,
                                              const float* x, size_t x_stride, const float* w,
                                              size_t w_stride, float* stack, int top) {
    return run(program, start, stop, x, static_cast<ptrdiff_t>(x_stride), w,
               static_cast<ptrdiff_t>(w_stride), stack, top, RowIndices{}, PanelIndices{});
  }
};

using LeavesFunction = int (*)(const LeafProgram&, int, int, const float*, size_t, const float*,
                               size_t, float*, int);

// [rows - 1][panels - 1]; three and four rows take at most three panels (16 registers).
constexpr LeavesFunction kLeaves[4][4] = {
    {Tile<1, 1>::leaves, Tile<1, 2>::leaves, Tile<1, 3>::leaves, Tile<1, 4>::leaves},
    {Tile<2, 1>::leaves, Tile<2, 2>::leaves, Tile<2, 3>::leaves, Tile<2, 4>::leaves},
    {Tile<3, 1>::leaves, Tile<3, 2>::leaves, Tile<3, 3>::leaves, nullptr},
    {Tile<4, 1>::leaves, Tile<4, 2>::leaves, Tile<4, 3>::leaves, nullptr},
};

// Stack entries [0, num_nodes) of a tile go to their rows and outputs.
inline void emit(const Linear& linear, const Target& target, const float* stack, int row,
                 int num_rows, int panel, int num_panels) {
  for (int node = 0; node < linear.program.num_nodes; ++node) {
    for (int r = 0; r < num_rows; ++r) {
      float* out = target.out + static_cast<size_t>(node) * target.node_stride +
                   static_cast<size_t>(row + r) * target.row_stride;
      for (int p = 0; p < num_panels; ++p) {
        const int n = (panel + p) * kLanes;
        const int rest = linear.num_outputs - n;
        const int entry = (node * num_rows + r) * num_panels + p;
        Vec value = load(stack + entry * kLanes);
        float* place = out + (n - target.first_output);
        if (rest >= kLanes) {
          if (target.bias != nullptr) value = add(value, load(target.bias + n));
          store(place, value);
        } else {
          if (target.bias != nullptr) {
            value = add(value, load_partial(target.bias + n, rest));
          }
          store_partial(place, value, rest);
        }
      }
    }
  }
}

// Rows of tile number `tile` when `num_rows` are dealt as evenly as possible to `num_tiles`.
inline int rows_before(int tile, int num_tiles, int num_rows) {
  return static_cast<int>(static_cast<int64_t>(tile) * num_rows / num_tiles);
}

// Leaves of one pass over a row block: their weights for three panels fit the L1 cache.
constexpr int kLeavesPerPass = 3;

// All rows of a block against one group of panels, a few leaves at a time, so that the weights of
// a pass are read once from L2 and the open nodes of every row tile wait in `scratch`.
inline void linear_block(const Linear& linear, const float* x, size_t x_stride, int row_start,
                         int num_rows, int panel, int num_panels, const Target& target,
                         float* scratch) {
  const LeafProgram& program = linear.program;
  const int num_tiles = (num_rows + 3) / 4;
  const size_t entry_floats = static_cast<size_t>(kMaxTile) * kLanes;
  const size_t tile_floats = entry_floats * static_cast<size_t>(program.depth);
  const float* panels = linear.panels + static_cast<size_t>(panel) * linear.panel_stride;
  const int leaves_per_pass = num_tiles == 1 ? program.num_leaves : kLeavesPerPass;
  int top = 0;
  int k = 0;
  for (int leaf = 0; leaf < program.num_leaves; leaf += leaves_per_pass) {
    const int rest = program.num_leaves - leaf;
    const int stop = leaf + (rest < leaves_per_pass ? rest : leaves_per_pass);
    int top_after = top;
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int row = rows_before(tile, num_tiles, num_rows);
      const int tile_rows = rows_before(tile + 1, num_tiles, num_rows) - row;
      const float* x_tile = x + static_cast<size_t>(row_start + row) * x_stride + k;
      top_after = kLeaves[tile_rows - 1][num_panels - 1](
          program, leaf, stop, x_tile, x_stride, panels + static_cast<size_t>(k) * kLanes,
          linear.panel_stride, scratch + static_cast<size_t>(tile) * tile_floats, top);
    }
    for (int i = leaf; i < stop; ++i) k += program.lengths[i];
    top = top_after;
  }
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int row = rows_before(tile, num_tiles, num_rows);
    const int tile_rows = rows_before(tile + 1, num_tiles, num_rows) - row;
    emit(linear, target, scratch + static_cast<size_t>(tile) * tile_floats, row_start + row,
         tile_rows, panel, num_panels);
  }
}

inline void linear(const Linear& args, const float* x, size_t x_stride, int num_rows,
                   int panel_start, int panel_stop, const Target& target, float* scratch) {
  const int group = panel_group(num_rows);
  for (int row = 0; row < num_rows; row += kRowBlock) {
    const int rows = num_rows - row < kRowBlock ? num_rows - row : kRowBlock;
    for (int panel = panel_start; panel < panel_stop; panel += group) {
      const int panels = panel_stop - panel < group ? panel_stop - panel : group;
      linear_block(args, x, x_stride, row, rows, panel, panels, target, scratch);
    }
  }
}
