// Linear layers over weight panels: one lane per output, a chain of fma per leaf, a fixed tree.
//
// Weights are widened on their way into the register tile, again for each tile of rows; where that
// costs more than memory traffic (Q8_0 and many rows), once for all rows.
#pragma once

#include "tile.h"
#include "widen.h"

constexpr ptrdiff_t kLineBytes = 4 * kLineFloats;

// Panels of 8 outputs at each k.
template <typename Weights, int Rows, int Panels>
struct LaneTile {
  using T = Tile<Rows, Panels>;
  using RowIndices = typename T::RowIndices;
  using PanelIndices = typename T::PanelIndices;

  template <int... P>
  static ANYSHARD_INLINE void step(Vec (&acc)[T::kSize], const float* const (&x)[Rows],
                                   const uint8_t* const (&w)[Panels], ptrdiff_t k, Sequence<P...>) {
    if constexpr (Rows == 1) {  // one by one: gcc spills eight weights that are widened first
      const Vec value = broadcast(x[0][k]);
      ((acc[P] = fma(value, Weights::get(w[P] + k * Weights::kBytes), acc[P])), ...);
    } else {
      const Vec weights[Panels] = {Weights::get(w[P] + k * Weights::kBytes)...};
      T::step(acc, x, k, weights, RowIndices{});
    }
  }

  // Into L2: the lines that a group will need when its turn comes, after this one.
  template <int Lines, int... P>
  static ANYSHARD_INLINE void prefetch(const uint8_t* const (&w)[Panels], ptrdiff_t ahead,
                                       Sequence<P...>) {
    if (Lines >= 1) (__builtin_prefetch(w[P] + ahead, 0, 2), ...);
    if (Lines >= 2) (__builtin_prefetch(w[P] + ahead + kLineBytes, 0, 2), ...);
  }

  template <int Lines, int... R, int... P>
  static ANYSHARD_INLINE void run(const TileWork& work, Sequence<R...> rows,
                                  Sequence<P...> panels) {
    const LeafProgram& program = work.program;
    const ptrdiff_t ahead = work.ahead.bytes;
    float* stack = work.stack;
    const float* x[Rows] = {(work.x + R * work.x_stride)...};
    const uint8_t* w[Panels] = {(work.span.weights + P * work.span.stride)...};
    for (int leaf = 0; leaf < program.num_leaves; ++leaf) {
      Vec acc[T::kSize];
      T::clear(acc, typename T::AllIndices{});
      const ptrdiff_t length = program.lengths[leaf];
      ptrdiff_t k = 0;
      for (; k + 4 <= length; k += 4) {
        prefetch<Lines>(w, ahead, panels);
        step(acc, x, w, 0, panels);
        step(acc, x, w, 1, panels);
        step(acc, x, w, 2, panels);
        step(acc, x, w, 3, panels);
        T::advance(x, 4, rows);
        T::advance(w, 4 * Weights::kBytes, panels);
      }
      for (; k < length; ++k) {
        step(acc, x, w, 0, panels);
        T::advance(x, 1, rows);
        T::advance(w, Weights::kBytes, panels);
      }
      stack = T::close_leaf(acc, program.merges[leaf], stack);
    }
  }

  static __attribute__((noinline)) void leaves(const TileWork& work) {
    constexpr RowIndices rows{};
    constexpr PanelIndices panels{};
    if (work.ahead.lines == 2) {
      run<2>(work, rows, panels);
    } else if (work.ahead.lines == 1) {
      run<1>(work, rows, panels);
    } else {
      run<0>(work, rows, panels);
    }
  }
};

// Blocks of Q8_0.
template <int Rows, int Panels>
struct Q8Tile {
  using T = Tile<Rows, Panels>;
  using RowIndices = typename T::RowIndices;

  template <int Byte, int... P>
  static ANYSHARD_INLINE void step(Vec (&acc)[T::kSize], const float* const (&x)[Rows],
                                   const IntVec (&group)[Panels], const Vec (&scales)[Panels],
                                   Sequence<P...>) {
    const Vec weights[Panels] = {q8_weights<Byte>(group[P], scales[P])...};
    T::step(acc, x, Byte, weights, RowIndices{});
  }

  // Odd: the first panel is the second of its pair. Each pair has one pointer.
  template <bool Odd, int... R, int... P, int... Pair>
  static ANYSHARD_INLINE void run(const TileWork& work, Sequence<R...> rows, Sequence<P...> panels,
                                  Sequence<Pair...> pairs) {
    const LeafProgram& program = work.program;
    const ptrdiff_t ahead = work.ahead.bytes;  // 0: a line that is here already
    float* stack = work.stack;
    const float* x[Rows] = {(work.x + R * work.x_stride)...};
    const uint8_t* first = work.span.weights - Odd * kQ8PanelBytes;
    const uint8_t* w[sizeof...(Pair)] = {(first + Pair * work.span.stride)...};
    for (int leaf = 0; leaf < program.num_leaves; ++leaf) {
      Vec acc[T::kSize];
      T::clear(acc, typename T::AllIndices{});
      for (int k = program.lengths[leaf]; k > 0; k -= kQ8Inputs) {
        const Vec scales[Panels] = {q8_scales(w[(P + Odd) / 2], (P + Odd) % 2)...};
        for (int g = 0; g < kQ8Inputs; g += kQ8Group) {
          (__builtin_prefetch(w[Pair] + ahead, 0, 2), ...);
          const IntVec group[Panels] = {
              q8_group(w[(P + Odd) / 2] + (P + Odd) % 2 * kQ8PanelBytes)...};
          step<0>(acc, x, group, scales, panels);
          step<1>(acc, x, group, scales, panels);
          step<2>(acc, x, group, scales, panels);
          step<3>(acc, x, group, scales, panels);
          T::advance(x, kQ8Group, rows);
          T::advance(w, kQ8GroupBytes, pairs);
        }
        T::advance(w, kQ8Bytes - kQ8Values, pairs);
      }
      stack = T::close_leaf(acc, program.merges[leaf], stack);
    }
  }

  static __attribute__((noinline)) void leaves(const TileWork& work) {
    constexpr RowIndices rows{};
    constexpr typename T::PanelIndices panels{};
    if (work.span.first % 2 != 0) {
      run<true>(work, rows, panels, typename CountTo<Panels / 2 + 1>::type{});
    } else {
      run<false>(work, rows, panels, typename CountTo<(Panels + 1) / 2>::type{});
    }
  }
};

using TileTable = TileFunction[4][4];

// [rows - 1][panels - 1]; three and four rows take at most three panels (16 registers).
template <template <int, int> class Kind>
constexpr TileTable kTiles = {
    {Kind<1, 1>::leaves, Kind<1, 2>::leaves, Kind<1, 3>::leaves, Kind<1, 4>::leaves},
    {Kind<2, 1>::leaves, Kind<2, 2>::leaves, Kind<2, 3>::leaves, Kind<2, 4>::leaves},
    {Kind<3, 1>::leaves, Kind<3, 2>::leaves, Kind<3, 3>::leaves, nullptr},
    {Kind<4, 1>::leaves, Kind<4, 2>::leaves, Kind<4, 3>::leaves, nullptr},
};
template <int Rows, int Panels>
using Float32Tile = LaneTile<Float32, Rows, Panels>;
template <int Rows, int Panels>
using Bfloat16Tile = LaneTile<Bfloat16, Rows, Panels>;
template <int Rows, int Panels>
using Float16Tile = LaneTile<Float16, Rows, Panels>;

inline TileFunction tile_of(Storage storage, int rows, int panels) {
  const TileTable* tiles = &kTiles<Float32Tile>;
  if constexpr (kWidensInTiles) {
    if (panels == kNarrowPanels) {
      return storage == Storage::kBfloat16 ? Bfloat16Tile<1, kNarrowPanels>::leaves
                                           : Float16Tile<1, kNarrowPanels>::leaves;
    }
    if (storage == Storage::kBfloat16) tiles = &kTiles<Bfloat16Tile>;
    if (storage == Storage::kFloat16) tiles = &kTiles<Float16Tile>;
    if (storage == Storage::kQ8) tiles = &kTiles<Q8Tile>;
  }
  return (*tiles)[rows - 1][panels - 1];
}

// Whether a group of panels is widened once for all rows that pass over it.
inline bool widens_first(Storage storage, int num_rows) {
  if (storage == Storage::kFloat32) return false;
  return !kWidensInTiles || num_rows >= (storage == Storage::kQ8 ? kManyRowsQ8 : kManyRows);
}

// Panels up to this long are short streams: the hardware has hardly learnt several when they end.
// Of one or two rows of float32 they are read as one stream, panel after panel (K = 576: 25 -> 32
// GB/s on one thread); of longer ones four streams are as fast, and at two rows faster.
constexpr size_t kShortStream = 24576;
inline int group_of(const Linear& linear, Storage storage, int num_rows) {
  const bool is_short = panel_bytes(storage, linear.num_inputs) <= kShortStream;
  if (storage == Storage::kFloat32 && num_rows <= kFewRows && is_short) return 1;
  return panel_group(storage, num_rows);
}

// Which part of the next group's weights a tile asks for. Several tiles: the first ones, one line
// each, so that memory works while the rest compute from L2 (8 rows: 46 -> 88 GFLOP/s). A single
// tile is bound by memory: asking helps float32 where rows share the wait (4 rows: +2..26 %), and
// costs 5 % and more elsewhere; it helps what is narrower (K = 4864: Q8_0 +20 % at 1 row, 16-bit
// +20 % at 2).
inline Ahead ahead_of(int tile, int num_tiles, int tile_rows, const PanelSpan& span) {
  if (span.next == 0) return {0, 0};
  const bool narrow = span.storage != Storage::kFloat32;
  const int lines = narrow ? 1 : 2;  // in four k
  if (num_tiles > 1) return {span.next + tile * kLineBytes, tile < lines ? 1 : 0};
  return {span.next, narrow || tile_rows > kFewRows ? lines : 0};
}

// A block of rows against one group of panels, four rows at a time.
inline void linear_block(const Linear& linear, const float* x, size_t x_stride, int row_start,
                         int num_rows, const PanelSpan& span, const Target& target) {
  alignas(32) float stack[static_cast<size_t>(kMaxDepth) * kMaxTile * kLanes];
  const int num_tiles = (num_rows + 3) / 4;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int row = rows_before(tile, num_tiles, num_rows);
    const int tile_rows = rows_before(tile + 1, num_tiles, num_rows) - row;
    tile_of(span.storage, tile_rows,
            span.count)({linear.program, x + static_cast<size_t>(row_start + row) * x_stride,
                         static_cast<ptrdiff_t>(x_stride), span,
                         ahead_of(tile, num_tiles, tile_rows, span), stack});
    emit(linear, target, stack, row_start + row, tile_rows, span.first, span.count, span.first,
         span.first + span.count);
  }
}

// The group of panels [first, ...) below `stop`, where it lies.
inline PanelSpan stored_span(const Linear& linear, int first, int count, int stop) {
  const uint8_t* weights = panel_at(linear, first);
  const ptrdiff_t next = first + count < stop ? panel_at(linear, first + count) - weights : 0;
  return {weights, static_cast<ptrdiff_t>(linear.panel_stride), linear.storage, first, count, next};
}

// The same, widened into `scratch`.
inline PanelSpan widened_span(const Linear& linear, int first, int count, float* scratch) {
  const size_t floats = static_cast<size_t>(linear.num_inputs) * kLanes;
  for (int i = 0; i < count; ++i) {
    widen_panel(linear, first + i, scratch + static_cast<size_t>(i) * floats);
  }
  const size_t bytes = floats * sizeof(float);
  return {reinterpret_cast<const uint8_t*>(scratch),
          static_cast<ptrdiff_t>(bytes),
          Storage::kFloat32,
          first,
          count,
          0};
}

inline void linear(const Linear& args, const float* x, size_t x_stride, int num_rows,
                   int panel_start, int panel_stop, const Target& target, float* scratch) {
  const bool widen = widens_first(args.storage, num_rows);
  const int group = group_of(args, widen ? Storage::kFloat32 : args.storage, num_rows);
  for (int row = 0; row < num_rows; row += kRowBlock) {
    const int rows = num_rows - row < kRowBlock ? num_rows - row : kRowBlock;
    for (int panel = panel_start; panel < panel_stop;) {
      const int rest = panel_stop - panel;
      const int most = rest < group && group > kMostPanels ? kMostPanels : group;
      const int count = rest < most ? rest : most;
      const PanelSpan span = widen ? widened_span(args, panel, count, scratch)
                                   : stored_span(args, panel, count, panel_stop);
      linear_block(args, x, x_stride, row, rows, span, target);
      panel += count;
    }
  }
}
