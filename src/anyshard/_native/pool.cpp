#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <stdexcept>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace anyshard {
namespace {

constexpr int kSpins = 4000;  // about 60-100 us: longer than the gap between two ops of a step
constexpr int kMaxThreads = 256;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint64_t read_environment() {
#if defined(__x86_64__)
  return _mm_getcsr();
#elif defined(__aarch64__)
  uint64_t value;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
#else
  return 0;
#endif
}

void write_environment(uint64_t value) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(value));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(value));
#else
  static_cast<void>(value);
#endif
}

#if defined(__x86_64__)
constexpr uint64_t kDefaultEnvironment = 0x1f80;  // all exceptions masked, nearest, no FTZ, no DAZ
#else
constexpr uint64_t kDefaultEnvironment = 0;
#endif

}  // namespace

FloatEnvironment::FloatEnvironment() : saved_(read_environment()) {
  write_environment(kDefaultEnvironment);
}

FloatEnvironment::~FloatEnvironment() { write_environment(saved_); }

void Gate::advance() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  // A waiter adds itself before it looks at the value again, so one of the two sees the other.
  if (sleepers_.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
}

void Gate::wait_while(uint32_t value, bool spin) {
  for (int i = 0; spin && i < kSpins; ++i) {
    if (read() != value) return;
    pause();
  }
  if (read() != value) return;
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == value) {
    syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Thread::barrier() const {
  if (count > 1) pool.barrier();
}

Pool::Pool(int threads, const std::string& body, bool spin)
    : num_threads_(threads), body_(body), kernels_(&kernels_of(body)), spin_(spin) {
  if (threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument("threads is " + std::to_string(threads) + "; a pool has 1 to " +
                                std::to_string(kMaxThreads));
  }
  // Signals go to the threads that Python knows.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int index = 1; index < threads; ++index) {
      threads_.emplace_back([this, index] { serve(index); });
    }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    close();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pool::~Pool() { close(); }

void Pool::close() {
  const std::lock_guard<std::mutex> turn(busy_);
  closed_ = true;
  stopping_.store(true);
  started_.advance();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Pool::run_task(Task task, const void* context, bool alone) {
  const std::lock_guard<std::mutex> turn(busy_);
  if (closed_) throw std::runtime_error("the pool is closed");
  const FloatEnvironment environment;
  if (alone || num_threads_ == 1) {
    task(context, Thread{*this, 0, 1});
    return;
  }
  task_ = task;
  context_ = context;
  started_.advance();
  task(context, Thread{*this, 0, num_threads_});
  barrier();
}

void Pool::serve(int index) {
  uint32_t seen = 0;
  while (true) {
    started_.wait_while(seen, spin_);
    ++seen;
    if (stopping_.load()) return;
    {
      const FloatEnvironment environment;
      task_(context_, Thread{*this, index, num_threads_});
    }
    barrier();
  }
}

void Pool::barrier() {
  const uint32_t passed = passed_.read();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    passed_.advance();
  } else {
    passed_.wait_while(passed, spin_);
  }
}

std::vector<std::string> available_bodies() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) names.push_back("avx2");
#endif
  names.push_back("scalar");
  return names;
}

const Kernels& kernels_of(const std::string& body) {
  const std::vector<std::string> names = available_bodies();
  const std::string& wanted = body.empty() ? names.front() : body;
  for (const std::string& name : names) {
    if (name != wanted) continue;
#if defined(__x86_64__)
    if (name == "avx2") return kAvx2Kernels;
#endif
    return kScalarKernels;
  }
  std::string message = "body '" + wanted + "' is not available here; these are:";
  for (const std::string& name : names) message += " " + name;
  throw std::invalid_argument(message);
}

}  // namespace anyshard
