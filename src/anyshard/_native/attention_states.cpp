#include "attention_states.h"

#include <algorithm>
#include <cstring>

namespace anyshard {
namespace {

// Below this many floats a merge is done before another thread has woken up.
constexpr int64_t kAloneFloats = 16384;

void send_state(const float* state, int head_dim, float* wire) {
  StateHeader header;
  std::memcpy(&header, state, sizeof header);
  const float total = header.out_of_range != 0 ? __builtin_nanf("") : header.total;
  std::memcpy(wire, &header.high, sizeof header.high);
  std::memcpy(wire + 1, &total, sizeof total);
  if (header.high != kEmptyMax) std::copy_n(state + kStateHeader, head_dim, wire + kWireHeader);
}

void receive_state(const float* wire, int head_dim, float* state) {
  StateHeader header{0, wire[1], wire[1] != wire[1]};
  std::memcpy(&header.high, wire, sizeof header.high);
  std::memcpy(state, &header, sizeof header);
  if (header.high != kEmptyMax) std::copy_n(wire + kWireHeader, head_dim, state + kStateHeader);
}

}  // namespace

StripeNodes::StripeNodes(StripeSpan stripes) : count_(stripes.size()) {
  for (int stripe = stripes.first; stripe < stripes.stop; ++stripe) {
    for (int size = 2; size <= kStripes; size *= 2) {  // of nodes that end with this stripe
      if ((stripe + 1) % size == 0 && stripe + 1 - size >= stripes.first) {
        ++merges_[stripe];
        --count_;
      }
    }
  }
}

AttentionStates::AttentionStates(Pool& pool, const std::vector<PyObject*>& queries,
                                 const Arguments& a)
    : AttentionUnits(
          pool, queries,
          {a.k_cache, a.v_cache, a.page_table, a.row_slot, a.positions, a.head_dim, a.kv_head_of}),
      stripes_(checked_stripes(a.first_stripe, a.stop_stripe)),
      nodes_(stripes_),
      part_floats_(static_cast<size_t>(std::max<int64_t>(a.part_floats, 0))),
      out_(a.out, "out", Element::kFloat, {kAny}, true) {
  for (size_t rank = 0; rank < queries_.size(); ++rank) {
    const size_t count = static_cast<size_t>(queries_[rank].size(1) / head_dim_);
    for (size_t head = 0; head < count; ++head) places_.push_back({rank, head, count});
    require_at_least("part_floats is " + std::to_string(a.part_floats), a.part_floats,
                     {static_cast<int64_t>(count), nodes_.count(), head_dim_ + kWireHeader});
  }
  require_at_least(
      "out holds " + std::to_string(out_.size(0)) + " floats", out_.size(0),
      {static_cast<int64_t>(queries_.size()), rows_max(), static_cast<int64_t>(part_floats_)});
  const size_t stripes = static_cast<size_t>(stripes_.size());
  const size_t states = stripes * kMaxPairs * state_floats_;
  reserve(stripe_units_ * states, std::max(states, stripes * sweep_floats()));
}

void AttentionStates::run(int rows) {
  check_rows(rows, rows_max());
  if (head_groups_.empty()) return;
  paged_.check(rows, true, stripes_);
  list_units(rows);
  const int num_units = static_cast<int>(num_units_);
  const bool alone = are_alone(rows);
  if (splits_stripes()) {
    const int step = alone ? rows : num_units;
    const int count = stripes_.size();
    const auto work = [&](const Thread& thread, int phase, int start, int stop) {
      for (int i = start; i < stop; ++i) {
        if (phase == 0) {
          run_stripe(thread, static_cast<size_t>(i / count), static_cast<size_t>(step),
                     stripes_.first + i % count, i % count, count);
        } else {
          finish_pair(thread, i, rows);
        }
      }
    };
    pool_.run({{step * count, 1}, {num_pairs(), pool_.chunk(num_pairs(), 1)}}, work);
  } else if (alone) {
    const bool whole = rows >= pool_.threads();  // rows, or else their groups of heads, are dealt
    const auto work = [&](const Thread& thread, int, int start, int stop) {
      for (int i = start; i < stop; ++i) {
        run_sweep(thread, static_cast<size_t>(i), static_cast<size_t>(rows),
                  whole ? head_groups_.size() : 1, rows);
      }
    };
    pool_.run({{whole ? rows : num_units, 1}}, work);
  } else {
    // the longest histories (last rows) first
    const auto work = [&](const Thread& thread, int, int start, int stop) {
      for (int i = start; i < stop; ++i) {
        run_unit(thread, units_[static_cast<size_t>(num_units - 1 - i)], rows);
      }
    };
    pool_.run({{num_units, 1}}, work);
  }
}

void AttentionStates::run_unit(const Thread& thread, const Unit& unit, int rows) const {
  const Kernels& kernels = thread.kernels;
  const AttentionUnit description = describe(thread, unit);
  const size_t set = static_cast<size_t>(description.num_pairs) * state_floats_;
  float* top = thread.own;  // after the newest state
  for (int stripe = stripes_.first; stripe < stripes_.stop; ++stripe) {
    kernels.attention_stripe(description, stripe, top);
    top += set;
    for (int merge = nodes_.merges_after(stripe); merge > 0; --merge) {
      top -= set;
      kernels.attention_merge(head_dim_, description.num_pairs, top - set, top, state_floats_);
    }
  }
  for (int node = 0; node < nodes_.count(); ++node) {
    const float* states = thread.own + static_cast<size_t>(node) * set;
    for (int pair = 0; pair < description.num_pairs; ++pair) {
      write(unit, pair, node, states + static_cast<size_t>(pair) * state_floats_, rows);
    }
  }
}

// Units `first`, `first` + `step` and so on, of one row, block by block.
void AttentionStates::run_sweep(const Thread& thread, size_t first, size_t step, size_t count,
                                int rows) const {
  for (size_t done = 0; done < count; done += kSweepUnits) {
    const size_t num_units = std::min(size_t{kSweepUnits}, count - done);
    const Swept swept = sweep(thread, first + done * step, step, num_units, stripes_);
    for (size_t i = 0; i < num_units; ++i) {
      const Unit& unit = units_[first + (done + i) * step];
      const size_t set = swept.sets[i];
      const float* nodes[kStripes];
      const int count_of_nodes =
          merge_stripes(thread.kernels, swept.states[i], set, unit.num_pairs(), nodes);
      for (int node = 0; node < count_of_nodes; ++node) {
        for (int pair = 0; pair < unit.num_pairs(); ++pair) {
          write(unit, pair, node, nodes[node] + static_cast<size_t>(pair) * state_floats_, rows);
        }
      }
    }
  }
}

// Merges states of the stripes, `set` floats apart, as far as they are this rank's; how many are
// left, and where.
int AttentionStates::merge_stripes(const Kernels& kernels, float* states, size_t set, int num_pairs,
                                   const float** nodes) const {
  float* open[kStripes];
  int top = 0;
  for (int stripe = stripes_.first; stripe < stripes_.stop; ++stripe, states += set) {
    open[top++] = states;
    for (int merge = nodes_.merges_after(stripe); merge > 0; --merge) {
      --top;
      kernels.attention_merge(head_dim_, num_pairs, open[top - 1], open[top], state_floats_);
    }
  }
  std::copy_n(open, top, nodes);
  return top;
}

// Merges the stripes of one pair of all units, counted through.
void AttentionStates::finish_pair(const Thread& thread, int item, int rows) const {
  int pair = item;
  const size_t unit = unit_of(&pair);
  const size_t set = kMaxPairs * state_floats_;
  float* state = thread.common + unit * static_cast<size_t>(stripes_.size()) * set +
                 static_cast<size_t>(pair) * state_floats_;
  const float* nodes[kStripes];
  const int count = merge_stripes(thread.kernels, state, set, 1, nodes);
  for (int node = 0; node < count; ++node) write(units_[unit], pair, node, nodes[node], rows);
}

void AttentionStates::write(const Unit& unit, int pair, int node, const float* state,
                            int rows) const {
  const size_t row = static_cast<size_t>(unit.row_start + pair / unit.num_heads());
  const Place& place = places_[static_cast<size_t>(unit.head_start + pair % unit.num_heads())];
  const size_t number = (row * place.num_heads + place.head) * static_cast<size_t>(nodes_.count());
  const size_t floats = static_cast<size_t>(head_dim_) + kWireHeader;
  send_state(state, head_dim_,
             out_.writable_floats() + place.rank * static_cast<size_t>(rows) * part_floats_ +
                 (number + static_cast<size_t>(node)) * floats);
}

MergeStates::MergeStates(Pool& pool, const std::vector<PyObject*>& sources,
                         const std::vector<int64_t>& nodes_per_source, const Arguments& a)
    : pool_(pool),
      head_dim_(checked_head_dim(a.head_dim)),
      state_floats_(static_cast<size_t>(a.head_dim) + kStateHeader),
      mine_(static_cast<size_t>(a.mine)),
      part_floats_(static_cast<size_t>(std::max<int64_t>(a.part_floats, 0))),
      out_(a.out, "out", Element::kFloat, {kAny, kAny}, true),
      row_fault_(a.row_fault, "row_fault", Element::kInt, {out_.size(0)}, true),
      fault_code_(a.fault_code) {
  require(out_.size(1) % head_dim_ == 0, "out is not a whole number of heads wide");
  require(fault_code_ != 0, "fault_code is 0, which stands for no fault");
  require(sources.size() == nodes_per_source.size(),
          "there are " + std::to_string(sources.size()) + " sources, but " +
              std::to_string(nodes_per_source.size()) + " node counts");
  require(a.mine >= 0 && mine_ < sources.size(), "there is no such source as mine");
  num_heads_ = static_cast<size_t>(out_.size(1) / head_dim_);
  int64_t total = 0;
  for (size_t i = 0; i < sources.size(); ++i) {
    sources_.emplace_back(sources[i], "a source", Element::kFloat,
                          std::initializer_list<int64_t>{kAny});
    require(nodes_per_source[i] >= 0 && nodes_per_source[i] <= kStripes,
            "a node count is out of range");
    nodes_per_source_.push_back(static_cast<size_t>(nodes_per_source[i]));
    total += nodes_per_source[i];
    require_at_least(
        "part_floats is " + std::to_string(a.part_floats), a.part_floats,
        {static_cast<int64_t>(num_heads_), nodes_per_source[i], head_dim_ + kWireHeader});
    require_at_least(
        "source " + std::to_string(i) + " holds " + std::to_string(sources_[i].size(0)) + " floats",
        sources_[i].size(0), {a.mine + 1, out_.size(0), static_cast<int64_t>(part_floats_)});
  }
  require(total <= kStripes, std::to_string(total) + " nodes are to be merged; at most " +
                                 std::to_string(kStripes) + " are possible");
  const Array merges(a.merges, "merges", Element::kInt, {total});
  merges_.assign(merges.ints(), merges.ints() + total);
  require(check_merges(merges_.data(), total) == 1,
          "merges does not leave one node; the merge is incomplete");
  pool.reserve(0, kStripes * state_floats_);
}

void MergeStates::run(int rows) {
  check_rows(rows, static_cast<int>(out_.size(0)));
  const int num_heads = static_cast<int>(num_heads_);
  const int size = rows * num_heads;
  const auto work = [&](const Thread& thread, int, int start, int stop) {
    for (int i = start; i < stop; ++i) merge(thread, i / num_heads, i % num_heads, rows);
  };
  const int64_t floats = int64_t{rows} * out_.size(1) * static_cast<int64_t>(merges_.size());
  pool_.run({{size, pool_.chunk(size, 1)}}, work, floats < kAloneFloats);
}

void MergeStates::merge(const Thread& thread, int row, int head, int rows) const {
  const size_t floats = static_cast<size_t>(head_dim_) + kWireHeader;
  const size_t number = static_cast<size_t>(row) * num_heads_ + static_cast<size_t>(head);
  const size_t part = mine_ * static_cast<size_t>(rows) * part_floats_;
  float* top = thread.own;  // after the newest state
  size_t done = 0;
  for (size_t i = 0; i < sources_.size(); ++i) {
    const float* wire = sources_[i].floats() + part + number * nodes_per_source_[i] * floats;
    for (size_t node = 0; node < nodes_per_source_[i]; ++node, wire += floats) {
      receive_state(wire, head_dim_, top);
      top += state_floats_;
      for (int merge = merges_[done++]; merge > 0; --merge) {
        top -= state_floats_;
        thread.kernels.attention_merge(head_dim_, 1, top - state_floats_, top, state_floats_);
      }
    }
  }
  float* out = out_.writable_floats() + number * static_cast<size_t>(head_dim_);
  if (!thread.kernels.attention_finish(head_dim_, thread.own, out)) {
    mark_fault(row_fault_.writable_ints(), row, fault_code_);
  }
}

}  // namespace anyshard
