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

template <int Rows, int Pairs>
struct FreeInt8Tile : Int8Tile<Rows, Pairs> {
  using Base = Int8Tile<Rows, Pairs>;
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

  template <int... R, int... P, int... V>
  static ANYSHARD_INLINE void run(const TileWork& work, Sequence<R...> rows, Sequence<P...> pairs,
                                  Sequence<V...> vectors) {
    constexpr typename T::AllIndices all{};
    const int num_leaves = work.program.num_leaves;
    const ptrdiff_t ahead = work.ahead.bytes;
    const QuantizedRow row[Rows] = {quantized_row(work.x + R * work.x_stride, num_leaves)...};
    const uint8_t* x[Rows] = {row[R].values...};
    const float* scale[Rows] = {row[R].scales...};
    const float* offsets[Rows] = {row[R].offsets...};
    const uint8_t* w[Pairs] = {(work.span.weights + P * work.span.stride)...};
    Vec total[T::kSize];
    T::clear(total, all);
    if (!kHoldsTotals) T::push(total, work.stack, all);
    for (int leaf = 0; leaf < num_leaves; ++leaf) {
      IntVec acc[T::kSize];
      Base::start(acc, offsets, leaf, rows, vectors);
      Base::all_groups(acc, w, x, ahead, typename Base::GroupIndices{});
      const Vec scales[kVectors] = {load_float16(w[V / 2] + kQ8Values + V % 2 * 2 * kLanes)...};
      if (kHoldsTotals) {
        (add_row<R>(total, acc, scales, broadcast(scale[R][leaf]), vectors), ...);
      } else {
        (add_row_at<R>(work.stack, acc, scales, broadcast(scale[R][leaf]), vectors), ...);
      }
      T::advance(x, static_cast<ptrdiff_t>(kRowLeafBytes), rows);
      Tile<Rows, Pairs>::advance(w, kQ8Bytes, pairs);
    }
    if (kHoldsTotals) T::push(total, work.stack, all);
  }

  static __attribute__((noinline)) void whole(const TileWork& work) {
    run(work, typename Base::RowIndices{}, typename Base::PairIndices{},
        typename Base::VectorIndices{});
  }
};

constexpr TileFunction kFreeInt8Tiles[4][kMostPairs] = {
    {FreeInt8Tile<1, 1>::whole, FreeInt8Tile<1, 2>::whole, FreeInt8Tile<1, 3>::whole,
     FreeInt8Tile<1, 4>::whole},
    {FreeInt8Tile<2, 1>::whole, FreeInt8Tile<2, 2>::whole, nullptr, nullptr},
    {FreeInt8Tile<3, 1>::whole, nullptr, nullptr, nullptr},
    {FreeInt8Tile<4, 1>::whole, nullptr, nullptr, nullptr},
};

// As linear_int8, which it is where several nodes are left.
inline void free_linear_int8(const Linear& args, const float* x, size_t x_stride, int num_rows,
                             int panel_start, int panel_stop, const Target& target) {
  if (args.program.num_nodes != 1) {
    linear_int8(args, x, x_stride, num_rows, panel_start, panel_stop, target);
    return;
  }
  alignas(32) float sums[kMaxTile * kLanes];
  const int group = panel_group(Storage::kInt8, num_rows) / 2;
  const ptrdiff_t stride = static_cast<ptrdiff_t>(args.panel_stride);
  const int pair_stop = (panel_stop + 1) / 2;
  for (int first_row = 0; first_row < num_rows; first_row += kRowBlock) {
    const int rows = num_rows - first_row < kRowBlock ? num_rows - first_row : kRowBlock;
    const int num_tiles = (rows + 3) / 4;
    for (int pair = panel_start / 2; pair < pair_stop;) {
      const int rest = pair_stop - pair;
      const int count = rest < group ? rest : group;
      const uint8_t* weights = args.panels + pair * stride;
      const PanelSpan span{weights, stride, 0, Storage::kInt8, 2 * pair, 2 * count, 0};
      for (int tile = 0; tile < num_tiles; ++tile) {
        const int row = first_row + rows_before(tile, num_tiles, rows);
        const int tile_rows = first_row + rows_before(tile + 1, num_tiles, rows) - row;
        kFreeInt8Tiles[tile_rows - 1][count - 1]({args.program,
                                                  x + static_cast<size_t>(row) * x_stride,
                                                  static_cast<ptrdiff_t>(x_stride),
                                                  span,
                                                  {kBlocksAhead * kQ8Bytes, 0},
                                                  sums});
        emit(args, target, sums, row, tile_rows, 2 * pair, 2 * count, panel_start, panel_stop);
      }
      pair += count;
    }
  }
}
