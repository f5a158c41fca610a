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
  static ANYSHARD_INLINE void run(const Int8Work& work, Sequence<R...> rows,
                                  Sequence<V...> vectors) {
    constexpr typename T::AllIndices all{};
    const int num_leaves = work.program.num_leaves;
    const QuantizedRow row[Rows] = {quantized_row(work.x + R * work.x_stride, num_leaves)...};
    const uint8_t* x[Rows] = {row[R].values...};
    const float* scale[Rows] = {row[R].scales...};
    const float* offsets[Rows] = {row[R].offsets...};
    const uint8_t* w = work.weights;
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

  static __attribute__((noinline)) void whole(const Int8Work& work) {
    run(work, typename Base::RowIndices{}, typename Base::VectorIndices{});
  }
};

constexpr Int8Function kFreeInt8Tiles[4] = {FreeInt8Tile<1>::whole, FreeInt8Tile<2>::whole,
                                            FreeInt8Tile<3>::whole, FreeInt8Tile<4>::whole};

// As linear_int8, which it is where several nodes are left.
inline void free_linear_int8(const Linear& args, const float* x, size_t x_stride, int num_rows,
                             int panel_start, int panel_stop, const Target& target) {
  const bool is_free = args.program.num_nodes == 1;
  in_int8_tiles(is_free ? kFreeInt8Tiles : kInt8Tiles, args, x, x_stride, num_rows, panel_start,
                panel_stop, target);
}
