// Linears in float32 without leaves: one chain of fma over all of K, in the tiles of linear.h; at
// one row, whose four sums would wait for each other, two chains a panel.
//
// Sums that leave several nodes (a rank's share) keep their leaves: no unsplit run has them.
#pragma once

#include "linear.h"

template <int Panels>
struct TwoChains {
  using T = Tile<2, Panels>;
  using Indices = typename CountTo<Panels>::type;

  template <int Chain, int... P>
  static ANYSHARD_INLINE void step(Vec (&acc)[T::kSize], const float* x,
                                   const uint8_t* const (&w)[Panels], ptrdiff_t k, Sequence<P...>) {
    const Vec value = broadcast(x[k]);
    ((acc[Chain * Panels + P] =
          fma(value, Float32::get(w[P] + k * Float32::kBytes), acc[Chain * Panels + P])),
     ...);
  }
  template <int... P>
  static ANYSHARD_INLINE void add_chains(const Vec (&acc)[T::kSize], float* out, Sequence<P...>) {
    (store(out + P * kLanes, add(acc[P], acc[Panels + P])), ...);
  }

  template <int Lines, int... P>
  static ANYSHARD_INLINE void run(const TileWork& work, Sequence<P...> panels) {
    const ptrdiff_t ahead = work.ahead.bytes;
    const float* x = work.x;
    const uint8_t* w[Panels] = {(work.span.weights + P * work.span.stride)...};
    const ptrdiff_t length = work.program.lengths[0];
    Vec acc[T::kSize];
    T::clear(acc, typename T::AllIndices{});
    ptrdiff_t k = 0;
    for (; k + 4 <= length; k += 4) {
      LaneTile<Float32, 1, Panels>::template prefetch<Lines>(w, ahead, panels);
      step<0>(acc, x, w, 0, panels);
      step<1>(acc, x, w, 1, panels);
      step<0>(acc, x, w, 2, panels);
      step<1>(acc, x, w, 3, panels);
      x += 4;
      T::advance(w, 4 * Float32::kBytes, panels);
    }
    for (; k < length; ++k, ++x) {
      step<0>(acc, x, w, 0, panels);
      T::advance(w, Float32::kBytes, panels);
    }
    add_chains(acc, work.stack, panels);
  }

  static __attribute__((noinline)) void whole(const TileWork& work) {
    if (work.ahead.lines == 2) {
      run<2>(work, Indices{});
    } else if (work.ahead.lines == 1) {
      run<1>(work, Indices{});
    } else {
      run<0>(work, Indices{});
    }
  }
};

constexpr TileFunction kTwoChains[kMostPanels] = {TwoChains<1>::whole, TwoChains<2>::whole,
                                                  TwoChains<3>::whole, TwoChains<4>::whole};

inline void one_row(const Linear& args, const float* x, int panel_start, int panel_stop,
                    const Target& target) {
  alignas(32) float sums[kMostPanels * kLanes];
  const int group = group_of(args, Storage::kFloat32, 1);
  for (int panel = panel_start; panel < panel_stop;) {
    const int rest = panel_stop - panel;
    const int count = rest < group ? rest : group;
    const PanelSpan span = stored_span(args, panel, count, panel_stop);
    kTwoChains[count - 1]({args.program, x, 0, span, ahead_of(0, 1, 1, span), sums});
    emit(args, target, sums, 0, 1, panel, count, panel, panel + count);
    panel += count;
  }
}

inline void free_linear(const Linear& args, const float* x, size_t x_stride, int num_rows,
                        int panel_start, int panel_stop, const Target& target, float* scratch) {
  const int32_t start = 0;
  const int32_t merges = 0;
  Linear whole = args;
  if (args.program.num_nodes == 1) {
    whole.program = {&start, &args.num_inputs, &merges, 1, 1};
  }
  if (num_rows == 1 && args.storage == Storage::kFloat32 && whole.program.num_leaves == 1) {
    one_row(whole, x, panel_start, panel_stop, target);
  } else {
    linear(whole, x, x_stride, num_rows, panel_start, panel_stop, target, scratch);
  }
}
