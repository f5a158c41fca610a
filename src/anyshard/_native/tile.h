// Register tiles: Rows x Panels vectors of 8 outputs, the stack of open tree nodes, and where what
// is left of it goes.
//
// Accumulators are named through compile time indices: gcc 12 keeps an array that a plain loop
// indexes in memory, and stores it at every k (27 instead of 68 GFLOP/s). Held by:
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

template <int Rows, int Panels>
struct Tile {
  using RowIndices = typename CountTo<Rows>::type;
  using PanelIndices = typename CountTo<Panels>::type;
  using AllIndices = typename CountTo<Rows * Panels>::type;
  static constexpr int kSize = Rows * Panels;

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
  template <typename Pointer, int... I>
  static ANYSHARD_INLINE void advance(Pointer (&pointers)[sizeof...(I)], ptrdiff_t count,
                                      Sequence<I...>) {
    ((pointers[I] += count), ...);
  }

  // One k: every row's x times the weights of every panel.
  template <int... R>
  static ANYSHARD_INLINE void step(Vec (&acc)[kSize], const float* const (&x)[Rows], ptrdiff_t k,
                                   const Vec (&w)[Panels], Sequence<R...>) {
    (row_step<R>(acc, w, broadcast(x[R][k]), PanelIndices{}), ...);
  }
  template <int Row, int... P>
  static ANYSHARD_INLINE void row_step(Vec (&acc)[kSize], const Vec (&w)[Panels], Vec x,
                                       Sequence<P...>) {
    ((acc[Row * Panels + P] = fma(x, w[P], acc[Row * Panels + P])), ...);
  }

  // A leaf's sums meet what is open to their left, as often as the program says. Returns the top.
  static ANYSHARD_INLINE float* close_leaf(Vec (&acc)[kSize], int merges, float* stack) {
    constexpr AllIndices all{};
    constexpr ptrdiff_t kEntry = kSize * kLanes;
    for (; merges > 0; --merges) {
      stack -= kEntry;
      add_left(acc, stack, all);
    }
    push(acc, stack, all);
    return stack + kEntry;
  }
};

// Panels [first, first + count) as they stand in memory.
struct PanelSpan {
  const uint8_t* weights;
  ptrdiff_t stride;  // bytes between panels (pairs of them, kQ8)
  Storage storage;
  int first;
  int count;
  ptrdiff_t next;  // bytes to the group that this thread computes next, or 0
};

// What a tile asks memory for while it computes: that many of the cache lines in each four k,
// `bytes` after its own weights.
struct Ahead {
  ptrdiff_t bytes;
  int lines;
};

// All leaves of a tile; the nodes that are left stand at the bottom of `stack`.
struct TileWork {
  const LeafProgram& program;
  const float* x;
  ptrdiff_t x_stride;
  const PanelSpan& span;
  Ahead ahead;
  float* stack;
};

using TileFunction = void (*)(const TileWork&);

// Stack entries [0, num_nodes) of a tile go to their rows and outputs, those of panels [start,
// stop).
inline void emit(const Linear& linear, const Target& target, const float* stack, int row,
                 int num_rows, int panel, int num_panels, int start, int stop) {
  for (int node = 0; node < linear.program.num_nodes; ++node) {
    for (int r = 0; r < num_rows; ++r) {
      float* out = target.out + static_cast<size_t>(node) * target.node_stride +
                   static_cast<size_t>(row + r) * target.row_stride;
      for (int p = 0; p < num_panels; ++p) {
        if (panel + p < start || panel + p >= stop) continue;
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
