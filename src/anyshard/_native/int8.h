// Linear layers in int8: blocks of 16 outputs x 32 k against rows that were quantised by leaf.
//
// A leaf is float(exact int32 dot) * (weight scale * row scale), then the tree, as in float32. One
// tile serves all row counts: without VNNI a panel of int16 or float weights, made once for many
// rows, wins nothing (research: 32 rows and more, a tie).
//
// A tile is one stream of weights, which go by once, one block after the other, and nothing is
// asked for ahead: so the prefetcher of the hardware does best (1 row, one thread: 20 -> 36 GB/s).
#pragma once

#include "quantize.h"
#include "tile.h"
#include "widen.h"

// All leaves of a tile; the nodes that are left stand at the bottom of `stack`.
struct Int8Work {
  const LeafProgram& program;
  const float* x;  // rows that were quantised
  ptrdiff_t x_stride;
  const uint8_t* weights;
  float* stack;
};
using Int8Function = void (*)(const Int8Work&);

// Rows x a block of 16 outputs.
template <int Rows>
struct Int8Tile {
  static constexpr int kVectors = 2;
  using T = Tile<Rows, kVectors>;
  using RowIndices = typename T::RowIndices;
  using VectorIndices = typename T::PanelIndices;
  using GroupIndices = typename CountTo<kQ8Inputs / kQ8Group>::type;

  // Four k of a block, whose rows' magnitudes lie `plane` bytes after their values. What is used
  // more often is held: the rows' bytes if they are few, else the weights; both do not fit in 16
  // registers.
  template <int... R, int... V>
  static ANYSHARD_INLINE void step(IntVec (&acc)[T::kSize], const uint8_t* w,
                                   const uint8_t* const (&x)[Rows], ptrdiff_t plane, int group,
                                   Sequence<R...> rows, Sequence<V...> vectors) {
    w += group * kQ8GroupBytes;
    if constexpr (Rows <= kFewRows) {
      const RowBytes magnitude[Rows] = {row_bytes(x[R] + plane + 4 * group)...};
      const RowBytes value[Rows] = {row_bytes(x[R] + 4 * group)...};
      (vector_step<V>(acc, dot_weights(w + V * 32), magnitude, value, rows), ...);
    } else {
      const DotWeights weights[kVectors] = {dot_weights(w + V * 32)...};
      (row_step<R>(acc, weights, row_bytes(x[R] + plane + 4 * group), row_bytes(x[R] + 4 * group),
                   vectors),
       ...);
    }
  }
  template <int V, int... R>
  static ANYSHARD_INLINE void vector_step(IntVec (&acc)[T::kSize], DotWeights w,
                                          const RowBytes (&magnitude)[Rows],
                                          const RowBytes (&value)[Rows], Sequence<R...>) {
    ((acc[R * kVectors + V] = add_dot(acc[R * kVectors + V], w, magnitude[R], value[R])), ...);
  }
  template <int Row, int... V>
  static ANYSHARD_INLINE void row_step(IntVec (&acc)[T::kSize], const DotWeights (&w)[kVectors],
                                       RowBytes magnitude, RowBytes value, Sequence<V...>) {
    ((acc[Row * kVectors + V] = add_dot(acc[Row * kVectors + V], w[V], magnitude, value)), ...);
  }
  template <int... R, int... V>
  static ANYSHARD_INLINE void start(IntVec (&acc)[T::kSize], const float* const (&offsets)[Rows],
                                    int leaf, Sequence<R...>, Sequence<V...> vectors) {
    (start_row<R>(acc, start_dot(offsets[R] + leaf), vectors), ...);
  }
  template <int Row, int... V>
  static ANYSHARD_INLINE void start_row(IntVec (&acc)[T::kSize], IntVec value, Sequence<V...>) {
    ((acc[Row * kVectors + V] = value), ...);
  }
  template <int Row, int... V>
  static ANYSHARD_INLINE void scale_row(Vec (&sum)[T::kSize], const IntVec (&acc)[T::kSize],
                                        const Vec (&scales)[kVectors], Vec row_scale,
                                        Sequence<V...>) {
    ((sum[Row * kVectors + V] = mul(to_float(acc[Row * kVectors + V]), mul(scales[V], row_scale))),
     ...);
  }

  // All of a block, unrolled: in a loop gcc 12 stores some sums at every turn.
  template <int... G>
  static ANYSHARD_INLINE void all_groups(IntVec (&acc)[T::kSize], const uint8_t* w,
                                         const uint8_t* const (&x)[Rows], ptrdiff_t plane,
                                         Sequence<G...>) {
    (step(acc, w, x, plane, G, RowIndices{}, VectorIndices{}), ...);
  }

  template <int... R, int... V>
  static ANYSHARD_INLINE void run(const Int8Work& work, Sequence<R...> rows,
                                  Sequence<V...> vectors) {
    const LeafProgram& program = work.program;
    const int num_leaves = program.num_leaves;
    float* stack = work.stack;
    const QuantizedRow row[Rows] = {quantized_row(work.x + R * work.x_stride, num_leaves)...};
    const uint8_t* x[Rows] = {row[R].values...};
    const ptrdiff_t plane = row[0].plane;
    const float* scale[Rows] = {row[R].scales...};
    const float* offsets[Rows] = {row[R].offsets...};
    const uint8_t* w = work.weights;
    constexpr typename T::AllIndices all{};
    Vec top[T::kSize];
    T::clear(top, all);
    for (int leaf = 0; leaf < num_leaves; ++leaf) {
      IntVec acc[T::kSize];
      start(acc, offsets, leaf, rows, vectors);
      all_groups(acc, w, x, plane, GroupIndices{});
      const Vec scales[kVectors] = {load_float16(w + kQ8Values + V * 2 * kLanes)...};
      Vec sum[T::kSize];
      (scale_row<R>(sum, acc, scales, broadcast(scale[R][leaf]), vectors), ...);
      int merges = program.merges[leaf];
      if (merges > 0) {
        add_held(sum, top, all);
        for (; merges > 1; --merges) {
          stack -= T::kSize * kLanes;
          T::add_left(sum, stack, all);
        }
      } else if (leaf > 0) {
        T::push(top, stack, all);
        stack += T::kSize * kLanes;
      }
      hold(top, sum, all);
      T::advance(x, kQ8Inputs, rows);
      w += kQ8Bytes;
    }
    T::push(top, stack, all);
  }
  template <int... I>
  static ANYSHARD_INLINE void add_held(Vec (&sum)[T::kSize], const Vec (&top)[T::kSize],
                                       Sequence<I...>) {
    ((sum[I] = add(top[I], sum[I])), ...);
  }
  template <int... I>
  static ANYSHARD_INLINE void hold(Vec (&top)[T::kSize], const Vec (&sum)[T::kSize],
                                   Sequence<I...>) {
    ((top[I] = sum[I]), ...);
  }

  static __attribute__((noinline)) void leaves(const Int8Work& work) {
    run(work, RowIndices{}, VectorIndices{});
  }
};

// Rows x panels [panel_start, panel_stop), in whole pairs: what is computed beyond is not written.
// tiles[rows - 1].
inline void in_int8_tiles(const Int8Function (&tiles)[4], const Linear& args, const float* x,
                          size_t x_stride, int num_rows, int panel_start, int panel_stop,
                          const Target& target) {
  constexpr size_t kMostVectors = 8;  // 4 rows x 2
  alignas(32) float stack[kMaxDepth * kMostVectors * kLanes];
  const ptrdiff_t stride = static_cast<ptrdiff_t>(args.panel_stride);
  const int pair_stop = (panel_stop + 1) / 2;
  for (int first_row = 0; first_row < num_rows; first_row += kRowBlock) {
    const int rows = num_rows - first_row < kRowBlock ? num_rows - first_row : kRowBlock;
    const int num_tiles = (rows + 3) / 4;
    for (int pair = panel_start / 2; pair < pair_stop; ++pair) {
      for (int tile = 0; tile < num_tiles; ++tile) {
        const int row = first_row + rows_before(tile, num_tiles, rows);
        const int tile_rows = first_row + rows_before(tile + 1, num_tiles, rows) - row;
        tiles[tile_rows - 1]({args.program, x + static_cast<size_t>(row) * x_stride,
                              static_cast<ptrdiff_t>(x_stride), args.panels + pair * stride,
                              stack});
        emit(args, target, stack, row, tile_rows, 2 * pair, 2, panel_start, panel_stop);
      }
    }
  }
}

constexpr Int8Function kInt8Tiles[4] = {Int8Tile<1>::leaves, Int8Tile<2>::leaves,
                                        Int8Tile<3>::leaves, Int8Tile<4>::leaves};

inline void linear_int8(const Linear& args, const float* x, size_t x_stride, int num_rows,
                        int panel_start, int panel_stop, const Target& target) {
  in_int8_tiles(kInt8Tiles, args, x, x_stride, num_rows, panel_start, panel_stop, target);
}
