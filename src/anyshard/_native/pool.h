// A fixed set of threads that run one task together, and the float environment they run it in.
//
// The calling thread is thread 0; a pool of one calls the task inline. Waits spin for a while (if
// asked to) and then sleep in the kernel, so an idle pool costs nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"

namespace anyshard {

// Round to nearest, no flush to zero, no traps; the caller's setting comes back at the end.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  uint64_t saved_;
};

// A number that threads wait on.
class alignas(64) Gate {
 public:
  uint32_t read() const { return value_.load(std::memory_order_acquire); }
  void advance();
  void wait_while(uint32_t value, bool spin);

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

class Pool;

// What a task sees of the thread that runs it.
struct Thread {
  Pool& pool;
  int index;
  int count;

  // All threads of the task have arrived when it returns.
  void barrier() const;
};

using Task = void (*)(const void* context, const Thread& thread);

class Pool {
 public:
  Pool(int threads, const std::string& body, bool spin);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs function(thread) on every thread, or only on the caller's (`alone`: work too small to
  // wake anybody for). One task at a time; others wait their turn.
  template <typename Function>
  void run(const Function& function, bool alone = false) {
    const auto call = [](const void* context, const Thread& thread) {
      (*static_cast<const Function*>(context))(thread);
    };
    run_task(call, &function, alone);
  }
  // Ends the threads; a later run is refused.
  void close();

  int threads() const { return num_threads_; }
  const std::string& body() const { return body_; }
  const Kernels& kernels() const { return *kernels_; }

 private:
  friend struct Thread;
  void run_task(Task task, const void* context, bool alone);
  void serve(int index);
  void barrier();

  const int num_threads_;
  const std::string body_;
  const Kernels* kernels_;
  const bool spin_;
  bool closed_ = false;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  std::mutex busy_;
  Gate started_;
  Gate passed_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

// Hands out [0, size) in chunks to whichever thread comes first; outputs do not depend on who.
class alignas(64) Shares {
 public:
  // Not while a task runs.
  void reset() { next_.store(0, std::memory_order_relaxed); }
  // Start of the next chunk; done when it is not below the size.
  int take(int chunk) { return next_.fetch_add(chunk, std::memory_order_relaxed); }

 private:
  std::atomic<int> next_{0};
};

std::vector<std::string> available_bodies();
// The body of that name, or the best one here if the name is empty.
const Kernels& kernels_of(const std::string& body);

}  // namespace anyshard
