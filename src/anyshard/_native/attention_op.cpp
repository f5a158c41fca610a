// The bound attention op: which (rows, heads) go together, and how threads share them.
#include <algorithm>
#include <climits>

#include "ops.h"

namespace anyshard {
namespace {

// Longest histories that one thread still does alone per unit, in blocks.
constexpr int kWholeBlocks = 3;
// After stripe i, that many merges of the two newest states: the tree over eight stripes.
constexpr int kStripeMerges[kStripes] = {0, 1, 0, 2, 0, 1, 0, 3};
constexpr int kOpenStates = 4;

// Each [rows, its heads * head_dim].
std::deque<Array> bound_queries(const std::vector<PyObject*>& queries) {
  require(!queries.empty(), "there are no queries");
  std::deque<Array> bound;
  for (PyObject* each : queries) {
    const int64_t rows = bound.empty() ? kAny : bound.front().size(0);
    bound.emplace_back(each, "q", Element::kFloat, std::initializer_list<int64_t>{rows, kAny});
  }
  return bound;
}

}  // namespace

AttentionUnits::AttentionUnits(Pool& pool, const std::vector<PyObject*>& queries, const Inputs& a)
    : pool_(pool),
      head_dim_(checked_head_dim(a.head_dim)),
      queries_(bound_queries(queries)),
      k_cache_(a.k_cache, "k_cache", true, a.head_dim),
      v_cache_(a.v_cache, "v_cache", false, a.head_dim),
      paged_(a.page_table, a.row_slot, a.positions, queries_.front().size(0), k_cache_.num_pages(),
             INT32_MAX),
      kv_head_of_(a.kv_head_of, "kv_head_of", Element::kInt, {kAny}),
      state_floats_(static_cast<size_t>(a.head_dim) + kStateHeader) {
  constexpr const char* kUnlike = "q and kv_head_of have different numbers of heads";
  require_alike(k_cache_, v_cache_);
  require(queries_.front().size(0) <= INT_MAX, "q has too many rows");
  for (const Array& each : queries_) {
    require(each.size(1) % head_dim_ == 0, "q is not a whole number of heads wide");
    require(each.size(1) / head_dim_ <= num_heads() - static_cast<int64_t>(heads_.size()), kUnlike);
    for (int64_t d = 0; d + head_dim_ <= each.size(1); d += head_dim_) {
      heads_.push_back({each.floats() + d, static_cast<size_t>(each.size(1))});
    }
  }
  require(heads_.size() == static_cast<size_t>(num_heads()), kUnlike);
  for (int head = 0; head < num_heads(); ++head) {
    const int kv_head = kv_head_of_.ints()[head];
    const int before = head > 0 ? kv_head_of_.ints()[head - 1] : 0;
    require(kv_head >= before && kv_head < k_cache_.num_heads(),
            "kv_head_of must not decrease and must name KV heads of the cache");
    const bool same =
        head > 0 && kv_head == before && head - head_groups_.back().head_start < kMaxPairs;
    if (!same) head_groups_.push_back({0, 0, head, head});
    head_groups_.back().head_stop = head + 1;
  }
  units_.resize(static_cast<size_t>(rows_max()) * head_groups_.size());
  if (pool.threads() > 1) stripe_units_ = static_cast<size_t>(3 * pool.threads());
}

Attention::Attention(Pool& pool, const Arguments& a)
    : AttentionUnits(
          pool, {a.q},
          {a.k_cache, a.v_cache, a.page_table, a.row_slot, a.positions, a.head_dim, a.kv_head_of}),
      out_(a.out, "out", Element::kFloat, {rows_max(), num_heads() * a.head_dim}, true),
      row_fault_(a.row_fault, "row_fault", Element::kInt, {rows_max()}, true),
      fault_code_(a.fault_code) {
  require(queries_.front().size(1) == out_.size(1), "q and out have different widths");
  require(fault_code_ != 0, "fault_code is 0, which stands for no fault");
  const size_t states = kMaxPairs * state_floats_;
  reserve(stripe_units_ * kStripes * states,
          std::max(kOpenStates * states, kStripes * sweep_floats()));
}

void AttentionUnits::list_units(int rows) {
  num_units_ = 0;
  for (const Unit& group : head_groups_) {
    const int most_rows = kMaxPairs / group.num_heads();
    for (int row = 0; row < rows;) {
      const int slot = paged_.slot(row);
      const int block = paged_.position(row) / kBlock;
      int stop = row + 1;
      while (stop < rows && stop - row < most_rows && paged_.slot(stop) == slot &&
             paged_.position(stop) / kBlock == block) {
        ++stop;
      }
      units_[num_units_++] = {row, stop, group.head_start, group.head_stop};
      row = stop;
    }
  }
}

namespace {

// Of a query as whole numbers: int16 of whole groups, then the scales of up to eight groups.
size_t whole_floats(int head_dim) {
  const int groups = (head_dim + kKvGroup - 1) / kKvGroup;
  return static_cast<size_t>(groups) * kKvGroup / 2 + kMaxHeadDim / kKvGroup;
}

}  // namespace

void AttentionUnits::reserve(size_t common, size_t own) {
  queries_at_ = whole_lines(own);
  const bool is_int8 = k_cache_.storage() == KvStorage::kInt8;
  pool_.reserve(common,
                queries_at_ + (is_int8 ? kSweepUnits * kMaxPairs * whole_floats(head_dim_) : 0));
}

AttentionUnit AttentionUnits::describe(const Thread& thread, const Unit& unit,
                                       size_t number) const {
  AttentionUnit result;
  const int64_t kv_head = kv_head_of_.ints()[unit.head_start];
  result.k_head = k_cache_.head(0, kv_head);
  result.v_head = v_cache_.head(0, kv_head);
  result.storage = k_cache_.storage();
  result.page_stride = k_cache_.page_bytes();
  result.pages = paged_.pages(unit.row_start);
  result.last_block = paged_.position(unit.row_start) / kBlock;
  result.head_dim = head_dim_;
  result.num_pairs = 0;
  for (int row = unit.row_start; row < unit.row_stop; ++row) {
    for (int head = unit.head_start; head < unit.head_stop; ++head) {
      const HeadQueries& of_head = heads_[static_cast<size_t>(head)];
      const float* query = of_head.row_0 + static_cast<size_t>(row) * of_head.stride;
      Pair& pair = result.pairs[result.num_pairs];
      pair = {query, paged_.position(row) % kBlock + 1, nullptr, nullptr};
      if (result.storage == KvStorage::kInt8) {
        const size_t place = number * kMaxPairs + static_cast<size_t>(result.num_pairs);
        float* mine = thread.own + queries_at_ + place * whole_floats(head_dim_);
        float* scales = mine + whole_floats(head_dim_) - kMaxHeadDim / kKvGroup;
        int16_t* whole = reinterpret_cast<int16_t*>(mine);
        thread.kernels.quantize_query(query, head_dim_, whole, scales);
        pair.whole = whole;
        pair.scales = scales;
      }
      ++result.num_pairs;
    }
  }
  return result;
}

bool AttentionUnits::splits_stripes() const {
  if (num_units_ > stripe_units_) return false;
  for (size_t i = 0; i < num_units_; ++i) {
    if (paged_.position(units_[i].row_start) / kBlock >= kWholeBlocks) return true;
  }
  return false;
}

size_t AttentionUnits::sweep_floats() const {
  int most_heads = 0;
  for (const Unit& group : head_groups_) most_heads = std::max(most_heads, group.num_heads());
  return kSweepUnits * static_cast<size_t>(most_heads) * state_floats_;
}

int AttentionUnits::num_pairs() const {
  int count = 0;
  for (size_t i = 0; i < num_units_; ++i) count += units_[i].num_pairs();
  return count;
}

size_t AttentionUnits::unit_of(int* pair) const {
  size_t unit = 0;
  for (; *pair >= units_[unit].num_pairs(); ++unit) *pair -= units_[unit].num_pairs();
  return unit;
}

void Attention::run(int rows) {
  check_rows(rows, rows_max());
  if (head_groups_.empty()) return;
  paged_.check(rows, true);
  list_units(rows);
  const int num_units = static_cast<int>(num_units_);
  const bool alone = are_alone(rows);
  if (splits_stripes()) {
    const auto work = [&](const Thread& thread, int phase, int start, int stop) {
      for (int i = start; i < stop; ++i) {
        if (phase == 0) {
          const size_t step = static_cast<size_t>(alone ? rows : num_units);
          run_stripe(thread, static_cast<size_t>(i / kStripes), step, i % kStripes, i % kStripes,
                     kStripes);
        } else {
          finish_pair(thread, i);
        }
      }
    };
    const int num_items = (alone ? rows : num_units) * kStripes;
    pool_.run({{num_items, 1}, {num_pairs(), pool_.chunk(num_pairs(), 1)}}, work);
  } else if (alone) {
    const bool whole = rows >= pool_.threads();  // rows, or else their groups of heads, are dealt
    const auto work = [&](const Thread& thread, int, int start, int stop) {
      for (int i = start; i < stop; ++i) {
        const size_t first = static_cast<size_t>(i);
        run_sweep(thread, first, static_cast<size_t>(rows), whole ? head_groups_.size() : 1);
      }
    };
    pool_.run({{whole ? rows : num_units, 1}}, work);
  } else {
    // the longest histories (last rows) first
    const auto work = [&](const Thread& thread, int, int start, int stop) {
      for (int i = start; i < stop; ++i) {
        run_unit(thread, units_[static_cast<size_t>(num_units - 1 - i)]);
      }
    };
    pool_.run({{num_units, 1}}, work);
  }
}

void Attention::run_unit(const Thread& thread, const Unit& unit) const {
  const Kernels& kernels = thread.kernels;
  float* states = thread.own;
  const AttentionUnit description = describe(thread, unit);
  const size_t set = static_cast<size_t>(description.num_pairs) * state_floats_;
  size_t top = 0;
  for (int stripe = 0; stripe < kStripes; ++stripe) {
    kernels.attention_stripe(description, stripe, states + top * set);
    ++top;
    for (int merge = kStripeMerges[stripe]; merge > 0; --merge) {
      --top;
      kernels.attention_merge(head_dim_, description.num_pairs, states + (top - 1) * set,
                              states + top * set, state_floats_);
    }
  }
  for (int pair = 0; pair < description.num_pairs; ++pair) {
    finish(unit, pair, states + static_cast<size_t>(pair) * state_floats_);
  }
}

bool AttentionUnits::are_alone(int rows) const {
  return pool_.kernels().attention_block != nullptr &&
         num_units_ == static_cast<size_t>(rows) * head_groups_.size();
}

// Units `first`, `first` + `step` and so on, of one row: block by block, so that what is read is a
// long stream.
AttentionUnits::Swept AttentionUnits::sweep(const Thread& thread, size_t first, size_t step,
                                            size_t count, StripeSpan stripes) const {
  const Kernels& kernels = thread.kernels;
  AttentionUnit units[kSweepUnits];
  Swept swept;
  float* free = thread.own;
  for (size_t i = 0; i < count; ++i) {
    units[i] = describe(thread, units_[first + i * step], i);
    swept.sets[i] = static_cast<size_t>(units[i].num_pairs) * state_floats_;
    swept.states[i] = free;
    free += static_cast<size_t>(stripes.size()) * swept.sets[i];
  }
  const auto states = [&](size_t i, int block) {
    return swept.states[i] + static_cast<size_t>(stripe_of(block) - stripes.first) * swept.sets[i];
  };
  const auto held = [&](int block) {  // that one, or the first after it
    while (!stripes.holds(block)) ++block;
    return block;
  };
  for (int block = held(0); block <= units[0].last_block;) {
    const int next = held(block + 1);
    float* here[kSweepUnits];
    for (size_t i = 0; i < count; ++i) here[i] = states(i, block);
    kernels.attention_block(units, static_cast<int>(count), block, next - block, here);
    block = next;
  }
  for (int block = units[0].last_block + 1; block < kStripes; ++block) {
    if (!stripes.holds(block)) continue;  // else its stripe has no block
    for (size_t i = 0; i < count; ++i) {
      kernels.attention_stripe(units[i], stripe_of(block), states(i, block));
    }
  }
  return swept;
}

void Attention::run_sweep(const Thread& thread, size_t first, size_t step, size_t count) const {
  const Kernels& kernels = thread.kernels;
  for (size_t done = 0; done < count; done += kSweepUnits) {
    const size_t num_units = std::min(size_t{kSweepUnits}, count - done);
    const Swept swept = sweep(thread, first + done * step, step, num_units, {});
    for (size_t i = 0; i < num_units; ++i) {
      const Unit& unit = units_[first + (done + i) * step];
      float* states = swept.states[i];
      const size_t set = swept.sets[i];
      for (size_t apart = 1; apart < kStripes; apart *= 2) {
        for (size_t s = 0; s < kStripes; s += 2 * apart) {
          kernels.attention_merge(head_dim_, unit.num_pairs(), states + s * set,
                                  states + (s + apart) * set, state_floats_);
        }
      }
      for (int pair = 0; pair < unit.num_pairs(); ++pair) {
        finish(unit, pair, states + static_cast<size_t>(pair) * state_floats_);
      }
    }
  }
}

// Few units: an item is a stripe of a unit, or of all units of a row that is alone, so that all
// threads have something to do. `first`: the first unit of the item; `step`: the units of a row are
// so far apart. A unit has room for `num_places` sets of states, of which this is number `place`.
void AttentionUnits::run_stripe(const Thread& thread, size_t first, size_t step, int stripe,
                                int place, int num_places) const {
  const Kernels& kernels = thread.kernels;
  const size_t set = kMaxPairs * state_floats_;
  const auto states = [&](size_t unit) {
    return thread.common +
           (unit * static_cast<size_t>(num_places) + static_cast<size_t>(place)) * set;
  };
  const AttentionUnit description = describe(thread, units_[first]);
  if (first + step >= num_units_ || stripe_of(stripe) > description.last_block) {
    for (size_t unit = first; unit < num_units_; unit += step) {
      kernels.attention_stripe(describe(thread, units_[unit]), stripe, states(unit));
    }
    return;
  }
  for (; first < num_units_; first += step * kSweepUnits) {
    AttentionUnit units[kSweepUnits];
    float* here[kSweepUnits];
    int count = 0;
    for (size_t unit = first; unit < num_units_ && count < kSweepUnits; ++count) {
      units[count] = describe(thread, units_[unit], static_cast<size_t>(count));
      here[count] = states(unit);
      unit += step;
    }
    for (int block = stripe_of(stripe); block <= units[0].last_block; block += kStripes) {
      kernels.attention_block(units, count, block, kStripes, here);
    }
  }
}

// Merges the stripes of one pair of all units, counted through.
void Attention::finish_pair(const Thread& thread, int item) const {
  int pair = item;
  const size_t unit = unit_of(&pair);
  const size_t set = kMaxPairs * state_floats_;
  float* state = thread.common + unit * kStripes * set + static_cast<size_t>(pair) * state_floats_;
  for (size_t step = 1; step < kStripes; step *= 2) {
    for (size_t s = 0; s < kStripes; s += 2 * step) {
      thread.kernels.attention_merge(head_dim_, 1, state + s * set, state + (s + step) * set,
                                     state_floats_);
    }
  }
  finish(units_[unit], pair, state);
}

void Attention::finish(const Unit& unit, int pair, const float* state) const {
  const int row = unit.row_start + pair / unit.num_heads();
  const int head = unit.head_start + pair % unit.num_heads();
  float* out = out_.writable_floats() + static_cast<int64_t>(row) * out_.size(1) +
               static_cast<int64_t>(head) * head_dim_;
  if (!pool_.kernels().attention_finish(head_dim_, state, out)) {
    mark_fault(row_fault_.writable_ints(), row, fault_code_);
  }
}

}  // namespace anyshard
