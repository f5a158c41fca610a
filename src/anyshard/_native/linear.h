// Linear layers over weight panels: one lane per output, a chain of fma per leaf, a fixed tree.
//
// A register tile is Rows x Panels vectors of 8 outputs. Accumulators are named through compile
// time indices: gcc 12 keeps an array that a plain loop indexes in memory, and stores it at every
// k (27 instead of 68 GFLOP/s). Held by:
// test_native_pool.py::test_hot_loops_keep_their_sums_in_registers.
#pragma once

template <int... Indices>
struct Sequence {};
template <int Count, int... Indices>
struct CountTo : CountTo<Count - 1, Count - 1, Indices...> {};
template <int... Indices>
struct CountTo<0, Indices...> {
  using type = Sequence<Indices...>;
};

// What a tile asks memory for while it computes: that many of the two cache lines in each four k,
// `floats` after its own weights.
struct Ahead {
  ptrdiff_t floats;
  int lines;
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

  // Into L2: the lines that a group will need when its turn comes, after this one.
  template <int Lines, int... P>
  static ANYSHARD_INLINE void prefetch(const float* const (&w)[Panels], ptrdiff_t ahead,
                                       Sequence<P...>) {
    if (Lines >= 1) (__builtin_prefetch(w[P] + ahead, 0, 2), ...);
    if (Lines >= 2) (__builtin_prefetch(w[P] + ahead + kLineFloats, 0, 2), ...);
  }

  // All leaves; the nodes that are left stand at the bottom of `stack`.
  template <int Lines, int... R, int... P>
  static ANYSHARD_INLINE void run(const LeafProgram& program, const float* x_first,
                                  ptrdiff_t x_stride, const float* w_first, ptrdiff_t w_stride,
                                  ptrdiff_t ahead, float* stack, Sequence<R...> rows,
                                  Sequence<P...> panels) {
    constexpr AllIndices all{};
    constexpr ptrdiff_t kEntry = kSize * kLanes;
    const float* x[Rows] = {(x_first + R * x_stride)...};
    const float* w[Panels] = {(w_first + P * w_stride)...};
    for (int leaf = 0; leaf < program.num_leaves; ++leaf) {
      Vec acc[kSize];
      clear(acc, all);
      const ptrdiff_t length = program.lengths[leaf];
      ptrdiff_t k = 0;
      for (; k + 4 <= length; k += 4) {
        prefetch<Lines>(w, ahead, panels);
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
        stack -= kEntry;
        add_left(acc, stack, all);
      }
      push(acc, stack, all);
      stack += kEntry;
    }
  }

  static __attribute__((noinline)) void leaves(const LeafProgram& program, const float* x,
                                               size_t x_stride, const float* w, size_t w_stride,
                                               Ahead ahead, float* stack) {
    const ptrdiff_t x_step = static_cast<ptrdiff_t>(x_stride);
    const ptrdiff_t w_step = static_cast<ptrdiff_t>(w_stride);
    constexpr RowIndices rows{};
    constexpr PanelIndices panels{};
    if (ahead.lines == 2) {
      run<2>(program, x, x_step, w, w_step, ahead.floats, stack, rows, panels);
    } else if (ahead.lines == 1) {
      run<1>(program, x, x_step, w, w_step, ahead.floats, stack, rows, panels);
    } else {
      run<0>(program, x, x_step, w, w_step, 0, stack, rows, panels);
    }
  }
};

using LeavesFunction = void (*)(const LeafProgram&, const float*, size_t, const float*, size_t,
                                Ahead, float*);

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

// Panels up to this many leaves long are short streams: the hardware has hardly learnt one when
// it ends.
constexpr int kShortStream = 12;

// Which part of the next group's weights (`next_group` floats on) a tile asks for. Several tiles:
// the first two, one line each, so that memory works while the rest compute from L2 (8 rows: 46 ->
// 88 GFLOP/s). A single tile is bound by memory: asking helps where streams are short (1 row,
// K = 576: +8..14 %) or rows share the wait (4 rows: +2..26 %), and costs 5 % elsewhere.
inline Ahead ahead_of(int tile, int num_tiles, int tile_rows, int num_leaves, size_t next_group) {
  const ptrdiff_t floats = static_cast<ptrdiff_t>(next_group);
  if (num_tiles > 1) return {floats + tile * kLineFloats, tile < 2 ? 1 : 0};
  return {floats, tile_rows > 2 || num_leaves <= kShortStream ? 2 : 0};
}

// A block of rows against one group of panels, four rows at a time.
inline void linear_block(const Linear& linear, const float* x, size_t x_stride, int row_start,
                         int num_rows, int panel, int num_panels, bool more_panels,
                         const Target& target) {
  alignas(32) float stack[static_cast<size_t>(kMaxDepth) * kMaxTile * kLanes];
  const int num_tiles = (num_rows + 3) / 4;
  const float* panels = linear.panels + static_cast<size_t>(panel) * linear.panel_stride;
  const size_t next_group = static_cast<size_t>(num_panels) * linear.panel_stride;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int row = rows_before(tile, num_tiles, num_rows);
    const int tile_rows = rows_before(tile + 1, num_tiles, num_rows) - row;
    Ahead ahead = ahead_of(tile, num_tiles, tile_rows, linear.program.num_leaves, next_group);
    if (!more_panels) ahead.lines = 0;
    kLeaves[tile_rows - 1][num_panels - 1](linear.program,
                                           x + static_cast<size_t>(row_start + row) * x_stride,
                                           x_stride, panels, linear.panel_stride, ahead, stack);
    emit(linear, target, stack, row_start + row, tile_rows, panel, num_panels);
  }
}

inline void linear(const Linear& args, const float* x, size_t x_stride, int num_rows,
                   int panel_start, int panel_stop, const Target& target) {
  const int group = panel_group(num_rows);
  for (int row = 0; row < num_rows; row += kRowBlock) {
    const int rows = num_rows - row < kRowBlock ? num_rows - row : kRowBlock;
    for (int panel = panel_start; panel < panel_stop; panel += group) {
      const int panels = panel_stop - panel < group ? panel_stop - panel : group;
      linear_block(args, x, x_stride, row, rows, panel, panels, panel + group < panel_stop, target);
    }
  }
}
