#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <new>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace anyshard {
namespace {

constexpr int kSpins = 4000;  // about 60-100 us: longer than the gap between two ops of a step
constexpr int kMaxThreads = 256;
constexpr int kSharesPerThread = 6;  // a slowed thread delays the end by a sixth of its share
constexpr size_t kScratchAlignment = 64;
constexpr uint64_t kItemMask = 0xffffffff;
constexpr uint64_t kClosed = 0x7fffffff;  // above every size

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
// clang 14's __builtin_cpu_supports does not know the name.
bool has_f16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

constexpr uint64_t kDefaultEnvironment = 0x1f80;  // all exceptions masked, nearest, no FTZ, no DAZ
#else
constexpr uint64_t kDefaultEnvironment = 0;
#endif

}  // namespace

FloatEnvironment::FloatEnvironment() : saved_(read_environment()) {
  write_environment(kDefaultEnvironment);
}

FloatEnvironment::~FloatEnvironment() { write_environment(saved_); }

float nearest_float(double value) {
  const FloatEnvironment environment;
  volatile double held = value;  // the compiler may not round before the setting is made
  volatile float result = static_cast<float>(held);
  return result;
}

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

Pool::Pool(int threads, const std::string& body, bool spin)
    : num_threads_(threads),
      body_(body),
      kernels_(&kernels_of(body)),
      spin_(spin),
      owner_(getpid()),
      threads_(std::make_unique<std::vector<std::thread>>()) {
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
      threads_->emplace_back([this, index] { serve(index); });
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
  // Joining or destroying handles of threads that are not here ends the process, and somebody may
  // have held the lock when it was forked.
  if (getpid() != owner_) {
    closed_ = true;
    static_cast<void>(threads_.release());
    return;
  }
  const std::lock_guard<std::mutex> turn(busy_);
  closed_ = true;
  stopping_.store(true);
  started_.advance();
  for (std::thread& thread : *threads_) thread.join();
  threads_->clear();
}

void Pool::Free::operator()(float* floats) const {
  ::operator delete(floats, std::align_val_t(kScratchAlignment));
}

// The memory is not touched here: what no run needs is never there.
void Pool::reserve(size_t common, size_t own) {
  const std::lock_guard<std::mutex> turn(busy_);
  if (common <= common_floats_ && own <= own_floats_) return;
  common = whole_lines(std::max(common, common_floats_));
  own = whole_lines(std::max(own, own_floats_));
  const size_t floats = common + own * static_cast<size_t>(num_threads_);
  scratch_.reset(static_cast<float*>(
      ::operator new(floats * sizeof(float), std::align_val_t(kScratchAlignment))));
  common_floats_ = common;
  own_floats_ = own;
}

Thread Pool::thread(int index) const {
  float* own = scratch_.get() + common_floats_ + static_cast<size_t>(index) * own_floats_;
  return {*kernels_, scratch_.get(), own};
}

int Pool::chunk(int64_t size, int unit) const {
  const int64_t units = (size + unit - 1) / unit;
  const int64_t share = num_threads_ == 1 ? units : units / (kSharesPerThread * num_threads_);
  return static_cast<int>(std::max<int64_t>(1, share)) * unit;
}

void Pool::run_task(std::initializer_list<Phase> phases, Call call, const void* context,
                    bool alone) {
  const std::lock_guard<std::mutex> turn(busy_);
  if (closed_) throw std::runtime_error("the pool is closed");
  const FloatEnvironment environment;
  if (alone || num_threads_ == 1) {
    int number = 0;
    for (const Phase& phase : phases) {
      if (phase.size > 0) call(context, thread(0), number, 0, phase.size);
      ++number;
    }
    return;
  }
  publish(phases, call, context);
  take_part(started_.read(), 0);
}

// All tickets are closed under the new number before a field changes: whoever read the old fields
// finds no ticket of the old number any more.
void Pool::publish(std::initializer_list<Phase> phases, Call call, const void* context) {
  const uint64_t number = static_cast<uint64_t>(started_.read() + 1) << 32;
  for (Counters& counters : phases_) counters.ticket.store(number | kClosed);
  call_.store(call);
  context_.store(context);
  num_phases_.store(static_cast<int>(phases.size()));
  Counters* counters = phases_;
  for (const Phase* phase = phases.begin(); phase != phases.end(); ++phase, ++counters) {
    // what no phase reads is done once, for what it says of faults
    const bool is_read = phase + 1 != phases.end() && (phase + 1)->size > 0;
    counters->done.store(0);
    counters->size.store(phase->size);
    counters->chunk.store(phase->chunk);
    counters->by_each.store(phase->by_each && is_read);
    counters->ticket.store(number);
  }
  started_.advance();
}

void Pool::serve(int index) {
  const FloatEnvironment environment;
  uint32_t seen = 0;
  while (true) {
    started_.wait_while(seen, spin_);
    seen = started_.read();
    if (stopping_.load()) return;
    take_part(seen, index);
  }
}

bool Pool::take(Counters& counters, uint32_t number, int size, int* start, int* stop) {
  const int chunk = counters.chunk.load(std::memory_order_relaxed);
  uint64_t ticket = counters.ticket.load(std::memory_order_acquire);
  while (ticket >> 32 == number && static_cast<int64_t>(ticket & kItemMask) < size) {
    *start = static_cast<int>(ticket & kItemMask);
    *stop = std::min(size, *start + chunk);
    const uint64_t next = (ticket & ~kItemMask) | static_cast<uint64_t>(*stop);
    if (counters.ticket.compare_exchange_weak(ticket, next, std::memory_order_acq_rel)) return true;
  }
  return false;
}

// What is read here may belong to a later task, if this thread was late; then no ticket has this
// task's number and nothing is taken. With a chunk in hand the task cannot end.
void Pool::take_part(uint32_t number, int index) {
  const Call call = call_.load();
  const void* context = context_.load();
  const int num_phases = num_phases_.load();
  bool is_ready = true;  // what each thread does by itself is done
  for (int phase = 0; phase < num_phases; ++phase) {
    Counters& counters = phases_[phase];
    const int size = counters.size.load();
    if (counters.by_each.load()) {
      is_ready = false;
      continue;
    }
    int start = 0;
    int stop = 0;
    while (take(counters, number, size, &start, &stop)) {
      if (!is_ready) {
        is_ready = true;
        call(context, thread(index), phase - 1, 0, phases_[phase - 1].size.load());
      }
      call(context, thread(index), phase, start, stop);
      const int count = stop - start;
      if (counters.done.fetch_add(count, std::memory_order_acq_rel) + count == size) {
        passed_.advance();
      }
    }
    is_ready = true;  // the phases after this one do not read it
    while (true) {
      const uint32_t passed = passed_.read();
      if (counters.done.load(std::memory_order_acquire) >= size) break;
      if (started_.read() != number) return;
      passed_.wait_while(passed, spin_);
    }
  }
}

namespace {

// Those that run here, best first; looked at once, since a token asks.
const std::vector<NamedBody>& bodies() {
  static const std::vector<NamedBody> found = [] {
    std::vector<NamedBody> here;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
      if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
        here.push_back({"vnni", &kVnniKernels});
      }
      here.push_back({"avx2", &kAvx2Kernels});
    }
#endif
    here.push_back({"scalar", &kScalarKernels});
#if defined(ANYSHARD_FREE_ORDER)
    add_free_order_bodies(here);
#endif
    return here;
  }();
  return found;
}

}  // namespace

std::vector<std::string> available_bodies() {
  std::vector<std::string> names;
  for (const NamedBody& body : bodies()) names.emplace_back(body.name);
  return names;
}

const Kernels& kernels_of(const std::string& body) {
  if (body.empty()) return *bodies().front().kernels;
  for (const NamedBody& each : bodies()) {
    if (body == each.name) return *each.kernels;
  }
  std::string message = "body '" + body + "' is not available here; these are:";
  for (const NamedBody& each : bodies()) message += std::string(" ") + each.name;
  throw std::invalid_argument(message);
}

}  // namespace anyshard
