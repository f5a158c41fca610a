// Register tiles: Rows x Panels vectors of 8 outputs, and the stack of open tree nodes.
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
