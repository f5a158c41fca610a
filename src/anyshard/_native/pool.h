// A fixed set of threads that share tasks, and the float environment they run them in.
//
// The calling thread is thread 0; a pool of one calls the task inline. Waits spin for a while (if
// asked to) and then sleep in the kernel, so an idle pool costs nothing.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>
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

// Nearest float, whatever the caller's setting.
float nearest_float(double value);

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

// What work sees of the thread that runs it, and the scratch that it may use.
struct Thread {
  const Kernels& kernels;
  float* common;  // of the task, the same for all its threads and phases
  float* own;     // of this thread
};

// So many floats that what follows them starts on a cache line of its own.
inline size_t whole_lines(size_t floats) {
  return (floats + kLineFloats - 1) / kLineFloats * kLineFloats;
}

// A part of a task: items [0, size), handed out in chunks to whichever thread comes first; the next
// phase starts when all are done. No result may depend on who takes what.
//
// Or, where `by_each`, a part that every thread does by itself, all of it, before its first chunk
// of the phase that follows: nobody waits for it. It may write to a thread's own scratch, and what
// all write alike, atomically (mark_fault). Not two of them in a row.
struct Phase {
  int size;
  int chunk;
  bool by_each = false;
};

constexpr int kMaxPhases = 4;

// Every thread takes chunks; none is waited for unless it holds one. So a thread whose core is
// busy with something else costs its share of the speed, and not a time slice at each task.
//
// A process that was forked has the pool and not its threads: there it may be closed, which leaves
// them alone.
class Pool {
 public:
  Pool(int threads, const std::string& body, bool spin);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Calls work(thread, phase, start, stop) until all phases are done, on all threads or only on
  // the caller's (`alone`: work too small to wake anybody for). One task at a time; others wait
  // their turn.
  template <typename Work>
  void run(std::initializer_list<Phase> phases, const Work& work, bool alone = false) {
    const auto call = [](const void* context, const Thread& thread, int phase, int start,
                         int stop) {
      (*static_cast<const Work*>(context))(thread, phase, start, stop);
    };
    run_task(phases, call, &work, alone);
  }
  // Called when an op is bound: every task may use `common` floats together and `own` floats a
  // thread. One scratch serves all ops, the largest one's: their tasks take turns.
  void reserve(size_t common, size_t own);
  // Ends the threads; a later run is refused.
  void close();

  int threads() const { return num_threads_; }
  const std::string& body() const { return body_; }
  const Kernels& kernels() const { return *kernels_; }
  // Chunk that gives every thread several, in whole `unit`s.
  int chunk(int64_t size, int unit) const;

 private:
  using Call = void (*)(const void*, const Thread&, int, int, int);

  // Handed out: the task's number in the high half, so that a thread that comes late for one task
  // cannot take from another, and the next item in the low half.
  struct alignas(64) Counters {
    std::atomic<uint64_t> ticket{0};
    std::atomic<int> done{0};
    std::atomic<int> size{0};
    std::atomic<int> chunk{0};
    std::atomic<bool> by_each{false};
  };

  struct Free {
    void operator()(float* floats) const;
  };

  Thread thread(int index) const;
  void run_task(std::initializer_list<Phase> phases, Call call, const void* context, bool alone);
  void publish(std::initializer_list<Phase> phases, Call call, const void* context);
  void serve(int index);
  // Takes part in the task of that number until it is done.
  void take_part(uint32_t number, int index);
  bool take(Counters& counters, uint32_t number, int size, int* start, int* stop);

  const int num_threads_;
  const std::string body_;
  const Kernels* kernels_;
  const bool spin_;
  bool closed_ = false;
  std::mutex busy_;
  std::unique_ptr<float, Free> scratch_;
  size_t common_floats_ = 0;
  size_t own_floats_ = 0;
  Gate started_;  // the number of the task
  Gate passed_;   // phases completed, of all tasks
  Counters phases_[kMaxPhases];
  std::atomic<int> num_phases_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<bool> stopping_{false};
  const pid_t owner_;  // the process that has the threads
  std::unique_ptr<std::vector<std::thread>> threads_;
};

struct NamedBody {
  const char* name;
  const Kernels* kernels;
};

std::vector<std::string> available_bodies();
// The body of that name, or the best one here if the name is empty.
const Kernels& kernels_of(const std::string& body);
#if defined(ANYSHARD_FREE_ORDER)  // a build that benchmarks/exactness_tax.py makes for itself
void add_free_order_bodies(std::vector<NamedBody>& bodies);
#endif

}  // namespace anyshard
