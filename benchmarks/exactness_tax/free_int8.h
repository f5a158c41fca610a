// Linears in int8 without a tree: the dot of a block is scaled and added to the sums so far by one
// fma, in the tiles of int8.h. Blocks stay: each has a scale of its own.
#pragma once

#include "int8.h"

// Sums of the blocks so far are held in registers where there are 32 of them.
#if defined(__AVX512VL__)
constexpr bool kHoldsTotals = true;
#else
constexpr bool kHoldsTotals = false;
#endif

template <int Rows>
struct FreeInt8Tile : Int8Tile<Rows> {
  using Base = Int8Tile<Rows>;
  using T = typename Base::T;
  static constexpr int kVectors = Base::kVectors;

  template <int Row, int... V>
  static ANYSHARD_INLINE void add_row(Vec (&total)[T::kSize], const IntVec (&acc)[T::kSize],
                                      const Vec (&scales)[kVectors], Vec row_scale,
                                      Sequence<V...>) {
    ((total[Row * kVectors + V] = fma(to_float(acc[Row * kVectors + V]), mul(scales[V], row_scale),
                                      total[Row * kVectors + V])),
     ...);
  }
  template <int Row, int... V>
  static ANYSHARD_INLINE void add_row_at(float* total, const IntVec (&acc)[T::kSize],
                                         const Vec (&scales)[kVectors], Vec row_scale,
                                         Sequence<V...>) {
    (store(total + (Row * kVectors + V) * kLanes,
           fma(to_float(acc[Row * kVectors + V]), mul(scales[V], row_scale),
               load(total + (Row * kVectors + V) * kLanes))),
     ...);
  }

  template <int... R, int... V>
  static ANYSHARD_INLINE void run(const TileWork& work, Sequence<R...> rows,
                                  Sequence<V...> vectors) {
    constexpr typename T::AllIndices all{};
    const int num_leaves = work.program.num_leaves;
    const QuantizedRow row[Rows] = {quantized_row(work.x + R * work.x_stride, num_leaves)...};
    const uint8_t* x[Rows] = {row[R].values...};
    const float* scale[Rows] = {row[R].scales...};
    const float* offsets[Rows] = {row[R].offsets...};
    const uint8_t* w = work.span.weights;
    Vec total[T::kSize];
    T::clear(total, all);
    if (!kHoldsTotals) T::push(total, work.stack, all);
    for (int leaf = 0; leaf < num_leaves; ++leaf) {
      IntVec acc[T::kSize];
      Base::start(acc, offsets, leaf, rows, vectors);
      Base::all_groups(acc, w, x, row[0].plane, typename Base::GroupIndices{});
      const Vec scales[kVectors] = {load_float16(w + kQ8Values + V * 2 * kLanes)...};
      if (kHoldsTotals) {
        (add_row<R>(total, acc, scales, broadcast(scale[R][leaf]), vectors), ...);
      } else {
        (add_row_at<R>(work.stack, acc, scales, broadcast(scale[R][leaf]), vectors), ...);
      }
      T::advance(x, kQ8Inputs, rows);
      w += kQ8Bytes;
    }
    if (kHoldsTotals) T::push(total, work.stack, all);
  }

  static __attribute__((noinline)) void whole(const TileWork& work) {
    run(work, typename Base::RowIndices{}, typename Base::VectorIndices{});
  }
};

constexpr TileFunction kFreeInt8Tiles[4] = {FreeInt8Tile<1>::whole, FreeInt8Tile<2>::whole,
                                            FreeInt8Tile<3>::whole, FreeInt8Tile<4>::whole};

// As linear_int8, which it is where several nodes are left.
inline void free_linear_int8(const Linear& args, const float* x, size_t x_stride, int num_rows,
                             int panel_start, int panel_stop, const Target& target) {
  if (args.program.num_nodes != 1) {
    linear_int8(args, x, x_stride, num_rows, panel_start, panel_stop, target);
    return;
  }
  alignas(32) float sums[kMaxTile * kLanes];
  const ptrdiff_t stride = static_cast<ptrdiff_t>(args.panel_stride);
  const int pair_stop = (panel_stop + 1) / 2;
  for (int first_row = 0; first_row < num_rows; first_row += kRowBlock) {
    const int rows = num_rows - first_row < kRowBlock ? num_rows - first_row : kRowBlock;
    const int num_tiles = (rows + 3) / 4;
    for (int pair = panel_start / 2; pair < pair_stop; ++pair) {
      const PanelSpan span{args.panels + pair * stride, stride, Storage::kInt8, 2 * pair, 2, 0};
      for (int tile = 0; tile < num_tiles; ++tile) {
        const int row = first_row + rows_before(tile, num_tiles, rows);
        const int tile_rows = first_row + rows_before(tile + 1, num_tiles, rows) - row;
        kFreeInt8Tiles[tile_rows - 1]({args.program,
                                       x + static_cast<size_t>(row) * x_stride,
                                       static_cast<ptrdiff_t>(x_stride),
                                       span,
                                       {0, 0},
                                       sums});
        emit(args, target, sums, row, tile_rows, 2 * pair, 2, panel_start, panel_stop);
      }
    }
  }
}
