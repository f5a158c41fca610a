// Signals between ranks: release stores on words in shared memory, spin, then futex.
//
// A "line" is 64 bytes: word 0 the value, word 1 the number of sleepers. Values only grow, in
// 32-bit wrap-around order. A reader that saw value v by the acquire load sees everything the
// writer stored before it published v. Knows nothing of buffers or floats.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace anyshard {

constexpr int kReached = 0;
constexpr int kAborted = -1;
constexpr int kLate = 1;

// Stores the value on a line and wakes who sleeps there.
void publish(uint32_t* line, uint32_t value);

// A wait bound once to its lines.
class Gather {
 public:
  // mine: nullptr where there is nothing to publish. spin_ns 0 sleeps at once.
  Gather(uint32_t* mine, std::vector<uint32_t*> peers, const uint32_t* abort_word, int64_t spin_ns)
      : mine_(mine), peers_(std::move(peers)), abort_word_(abort_word), spin_ns_(spin_ns) {}

  // Publishes `value` on my line and waits until all peers have; timeout_us < 0: for ever.
  // kReached, kAborted, or kLate + i: peer i is late.
  int run(uint32_t value, int64_t timeout_us) const {
    if (mine_ != nullptr) publish(mine_, value);
    return wait(value, timeout_us);
  }
  int wait(uint32_t value, int64_t timeout_us) const;

 private:
  uint32_t* mine_;
  std::vector<uint32_t*> peers_;
  const uint32_t* abort_word_;
  int64_t spin_ns_;
};

}  // namespace anyshard
