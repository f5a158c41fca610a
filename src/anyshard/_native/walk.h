// Calls that follow each other, made by one call: between two ops no Python runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bound.h"
#include "shm.h"

namespace anyshard {

// An exchange of nodes, as comm/shm.py makes it, for ops that write `mine` floats a row and put
// `wire` a row on the wire. Its step and what it has sent are kept in words that it shares with
// comm/shm.py, which deals with a peer that is late or has another size.
class Exchange : public Bound {
 public:
  struct Words {
    uint32_t* step;               // of the last exchange
    uint32_t* sizes[2];           // of a parity: floats that a rank publishes, by their places
    std::vector<int64_t> places;  // of tp ranks, in words from those above
    int64_t* sent;                // bytes
    int64_t* messages;
  };
  struct Sizes {
    int64_t mine, wire;  // floats a row
    int64_t capacity;    // floats of a buffer
    int64_t messages;    // that an exchange counts for
    int tp_rank;
  };

  Exchange(const Gather& gather, Words words, const Sizes& sizes, int64_t slice_us)
      : gather_(gather), words_(std::move(words)), sizes_(sizes), slice_us_(slice_us) {}

  int go(int rows) override {
    const bool fits = rows == 0 || (rows > 0 && sizes_.wire <= sizes_.capacity / rows);
    if (!fits || sizes_.mine > sizes_.wire) refuse(rows);
    const int64_t wire = rows * sizes_.wire;
    const uint32_t step = ++*words_.step;
    uint32_t* sizes = words_.sizes[step & 1];
    const auto size = static_cast<uint32_t>(wire);
    sizes[words_.places[static_cast<size_t>(sizes_.tp_rank)]] = size;
    const int status = gather_.run(step, slice_us_);
    if (status != kReached) return status;
    const bool agrees = std::all_of(words_.places.begin(), words_.places.end(),
                                    [&](int64_t place) { return sizes[place] == size; });
    if (!agrees) return kReached;  // comm/shm.py says whose differs
    *words_.sent += wire * static_cast<int64_t>(sizeof(float)) * sizes_.messages;
    *words_.messages += sizes_.messages;
    return kGoOn;
  }

 private:
  [[noreturn]] void refuse(int rows) const {
    throw std::invalid_argument(std::to_string(rows) + " rows of " + std::to_string(sizes_.mine) +
                                " of " + std::to_string(sizes_.wire) +
                                " floats do not fit an exchange of " +
                                std::to_string(sizes_.capacity));
  }

  const Gather& gather_;
  Words words_;
  Sizes sizes_;
  int64_t slice_us_;
};

// Which frames nobody waits for any more (comm/voids.py): in the slot of one its number.
struct Voids {
  const uint32_t* words = nullptr;
  size_t size = 0;
  const uint32_t* now = nullptr;  // the number of the frame that runs, and its slot

  bool hold() const {
    return size != 0 && now[1] < size &&
           __atomic_load_n(words + now[1], __ATOMIC_RELAXED) == now[0];
  }
};

// Every call adds one to `operations`, a rank's sign of life (comm/liveness.py), also one that the
// caller has ended.
class Walk {
 public:
  Walk(std::vector<Bound*> calls, uint64_t* operations)
      : calls_(std::move(calls)), operations_(operations) {}

  // Makes the calls from number `first` on; those before it have been made, the last one to its
  // end by the caller. Returns early with the number of one that does not go on, whose `status`
  // says how its wait ended: also kReached, where sizes differ; or kVoid, and it was not begun.
  // Else the number of calls.
  int run(int rows, int first) {
    const int count = static_cast<int>(calls_.size());
    if (first < 0 || first > count) throw std::invalid_argument("there is no such call");
    if (first > 0) count_one();
    for (int number = first; number < count; ++number) {
      status_ = voids_.hold() ? kVoid : calls_[static_cast<size_t>(number)]->go(rows);
      if (status_ != kGoOn) return number;
      count_one();
    }
    return count;
  }
  int status() const { return status_; }
  void heed(Voids voids) { voids_ = voids; }

 private:
  void count_one() { __atomic_store_n(operations_, *operations_ + 1, __ATOMIC_RELAXED); }

  std::vector<Bound*> calls_;
  uint64_t* operations_;
  Voids voids_;
  int status_ = kGoOn;
};

}  // namespace anyshard
