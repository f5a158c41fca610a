// Reads memory as fast as a pool of threads can: what the speed of kernels is measured against
// (`anyshard bench`). A thread reads one panel after the other, or several side by side, as kernels
// read weights: which is faster depends on the machine, and on the minute.
#include <nanobind/nanobind.h>

#include <atomic>
#include <climits>

#include "array.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace anyshard {
namespace {

constexpr int64_t kPanelWords = 4096;  // 32 KiB, about a panel of 8 outputs by 1024 inputs
constexpr int kLineWords = 8;
constexpr int kMaxStreams = 16;

uint64_t exclusive_or(const uint64_t* lanes) {
  uint64_t all = 0;
  for (int i = 0; i < kLineWords; ++i) all ^= lanes[i];
  return all;
}

// The exclusive or of `streams` panels, read line by line in turn. Two sums take turns, so that
// none waits for the line before.
template <int Fixed>
uint64_t read_group(const uint64_t* words, int streams) {
  if (Fixed > 0) streams = Fixed;  // known, so that the sums are in registers
  uint64_t even[kLineWords] = {};
  uint64_t odd[kLineWords] = {};
  for (int64_t k = 0; k < kPanelWords; k += 2 * kLineWords) {
    for (int stream = 0; stream < streams; ++stream) {
      const uint64_t* line = words + stream * kPanelWords + k;
      for (int i = 0; i < kLineWords; ++i) even[i] ^= line[i];
      for (int i = 0; i < kLineWords; ++i) odd[i] ^= line[i + kLineWords];
    }
  }
  return exclusive_or(even) ^ exclusive_or(odd);
}

uint64_t read_streams(Pool& pool, nb::object words, int streams) {
  const Array array(words.ptr(), "words", Element::kWord64, {kAny});
  require(streams >= 1 && streams <= kMaxStreams, "streams can be 1 to 16");
  const int64_t group_words = streams * kPanelWords;
  const int64_t num_groups = array.size(0) / group_words;
  require(num_groups < INT_MAX, "words is too large");
  const auto read = streams == 1 ? read_group<1> : streams == 8 ? read_group<8> : read_group<0>;
  const auto* first = reinterpret_cast<const uint64_t*>(array.bytes());
  std::atomic<uint64_t> all{0};
  const nb::gil_scoped_release release;
  if (num_groups > 0) {
    const int size = static_cast<int>(num_groups);
    pool.run({{size, pool.chunk(size, 1)}}, [&](const Thread&, int, int start, int stop) {
      uint64_t mine = 0;
      for (int group = start; group < stop; ++group) {
        mine ^= read(first + group * group_words, streams);
      }
      all.fetch_xor(mine, std::memory_order_relaxed);
    });
  }
  uint64_t rest = 0;
  for (int64_t i = num_groups * group_words; i < array.size(0); ++i) rest ^= first[i];
  return all.load() ^ rest;
}

}  // namespace
}  // namespace anyshard

void bind_probe(nb::module_& m) {
  m.def("read_streams", &anyshard::read_streams, "pool"_a, "words"_a, "streams"_a);
}
