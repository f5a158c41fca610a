#include "shm.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <cstdint>
#include <ctime>
#include <stdexcept>
#include <vector>

#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#error "anyshard._native needs Linux futexes; the Python fallback in comm/signals.py does not"
#endif

namespace nb = nanobind;

namespace anyshard {
namespace {

constexpr int64_t kSliceNs = 100'000'000;  // a sleeper looks at the abort word this often
constexpr int64_t kImpoliteNs = 2'000;     // spin this long without a system call
constexpr int kLooksPerClockRead = 64;

using Words = nb::ndarray<uint32_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

bool reached(const uint32_t* line, uint32_t value) {
  return static_cast<int32_t>(__atomic_load_n(line, __ATOMIC_ACQUIRE) - value) >= 0;
}

bool aborted(const uint32_t* abort_word) {
  return __atomic_load_n(abort_word, __ATOMIC_RELAXED) != 0;
}

// FUTEX_WAIT without the PRIVATE flag: the word may be mapped at different addresses.
void futex_wait(uint32_t* word, uint32_t seen, int64_t timeout_ns) {
  timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void wake_sleepers(uint32_t* line) {
  if (__atomic_load_n(line + 1, __ATOMIC_RELAXED) != 0) {
    syscall(SYS_futex, line, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

// deadline_ns < 0 waits for ever.
int sleep_until(uint32_t* line, uint32_t value, int64_t deadline_ns, const uint32_t* abort_word) {
  __atomic_fetch_add(line + 1, 1, __ATOMIC_SEQ_CST);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  int status = kReached;
  for (;;) {
    const uint32_t seen = __atomic_load_n(line, __ATOMIC_ACQUIRE);
    if (static_cast<int32_t>(seen - value) >= 0) break;
    if (aborted(abort_word)) {
      status = kAborted;
      break;
    }
    int64_t slice_ns = kSliceNs;
    if (deadline_ns >= 0) {
      const int64_t left_ns = deadline_ns - now_ns();
      if (left_ns <= 0) {
        status = kLate;
        break;
      }
      if (left_ns < slice_ns) slice_ns = left_ns;
    }
    futex_wait(line, seen, slice_ns);
  }
  __atomic_fetch_sub(line + 1, 1, __ATOMIC_SEQ_CST);
  return status;
}

int wait_for(uint32_t* line, uint32_t value, int64_t spin_until_ns, int64_t deadline_ns,
             const uint32_t* abort_word) {
  if (reached(line, value)) return kReached;
  // A peer that does not answer at once may be waiting for this very core: offer it.
  const int64_t polite_from_ns = spin_until_ns == 0 ? 0 : now_ns() + kImpoliteNs;
  for (int64_t time_ns; (time_ns = now_ns()) < spin_until_ns;) {
    if (time_ns > polite_from_ns) sched_yield();
    for (int look = 0; look < kLooksPerClockRead; ++look) {
      if (reached(line, value)) return kReached;
      relax();
    }
    if (aborted(abort_word)) return kAborted;
  }
  return sleep_until(line, value, deadline_ns, abort_word);
}

uint32_t* checked_line(const Words& words, int64_t index) {
  if (index < 0 || index % 16 != 0 || index > static_cast<int64_t>(words.size()) - 16) {
    throw std::invalid_argument("a line starts at a multiple of 16 words inside the array");
  }
  return words.data() + index;
}

}  // namespace

void publish(uint32_t* line, uint32_t value) {
  __atomic_store_n(line, value, __ATOMIC_RELEASE);
  // Orders the store before the look at the sleepers; its twin stands in sleep_until().
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  wake_sleepers(line);
}

int Gather::wait(uint32_t value, int64_t timeout_us) const {
  const int64_t start_ns = now_ns();
  const int64_t deadline_ns = timeout_us < 0 ? -1 : start_ns + timeout_us * 1000;
  const int64_t spin_until_ns = spin_ns_ > 0 ? start_ns + spin_ns_ : 0;
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    const int status = wait_for(peers_[peer], value, spin_until_ns, deadline_ns, abort_word_);
    if (status != kReached) {
      return status == kAborted ? kAborted : kLate + static_cast<int>(peer);
    }
  }
  return kReached;
}

}  // namespace anyshard

void bind_shm(nb::module_& module) {
  using namespace anyshard;
  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Gather>(module, "Gather")
      .def(
          "__init__",
          [](Gather* self, Words words, int64_t mine, const std::vector<int64_t>& peers,
             int64_t abort_index, int64_t spin_us) {
            std::vector<uint32_t*> lines;
            for (const int64_t peer : peers) lines.push_back(checked_line(words, peer));
            new (self) Gather(mine < 0 ? nullptr : checked_line(words, mine), std::move(lines),
                              checked_line(words, abort_index), spin_us * 1000);
          },
          nb::arg("words").noconvert(), nb::arg("mine"), nb::arg("peers"), nb::arg("abort_index"),
          nb::arg("spin_us"), nb::keep_alive<1, 2>())  // the mapping
      .def("run", &Gather::run, nb::arg("value"), nb::arg("timeout_us"), NoGil())
      .def("wait", &Gather::wait, nb::arg("value"), nb::arg("timeout_us"), NoGil());
  module.def(
      "shm_publish",
      [](const Words& words, int64_t index, uint32_t value) {
        publish(checked_line(words, index), value);
      },
      nb::arg("words").noconvert(), nb::arg("index"), nb::arg("value"));
  module.def(
      "shm_abort",
      [](const Words& words, int64_t abort_index) {
        __atomic_store_n(checked_line(words, abort_index), 1U, __ATOMIC_SEQ_CST);
        for (size_t index = 0; index + 16 <= words.size(); index += 16) {
          wake_sleepers(words.data() + index);
        }
      },
      nb::arg("words").noconvert(), nb::arg("abort_index"));
}
