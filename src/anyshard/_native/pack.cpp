#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace anyshard {
namespace {

constexpr int64_t kGroup = 32;  // columns widened at a time; the block of the quantised types

float from_pattern(uint32_t pattern) {
  float value;
  std::memcpy(&value, &pattern, sizeof value);
  return value;
}

uint32_t read_half(const uint8_t* p) {
  return static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8;
}

// Exact: every binary16 value is a binary32 value. Subnormals go through an exact subtraction.
float widen_half(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t exponent = half & 0x7c00u;
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  if (exponent == 0x7c00u) return from_pattern(sign | magnitude | 0x7f800000u);
  if (exponent != 0) return from_pattern(sign | (magnitude + (112u << 23)));
  const float value = from_pattern(magnitude + (113u << 23)) - from_pattern(113u << 23);
  uint32_t pattern;
  std::memcpy(&pattern, &value, sizeof pattern);
  return from_pattern(sign | pattern);
}

void widen_f32(const uint8_t* row, int64_t start, int64_t count, float* out) {
  std::memcpy(out, row + 4 * start, static_cast<size_t>(4 * count));
}

void widen_f16(const uint8_t* row, int64_t start, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = widen_half(read_half(row + 2 * (start + i)));
}

void widen_bf16(const uint8_t* row, int64_t start, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = from_pattern(read_half(row + 2 * (start + i)) << 16);
  }
}

// 34 bytes: fp16 scale, 32 int8. value = q * scale.
void widen_q8_0(const uint8_t* row, int64_t start, int64_t count, float* out) {
  const uint8_t* block = row + start / kGroup * 34;
  const float scale = widen_half(read_half(block));
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
  }
}

// 20 bytes: fp16 scale, fp16 minimum, 16 bytes with columns i (low half) and i + 16 (high half).
// value = (scale * q) + minimum, two roundings.
void widen_q4_1(const uint8_t* row, int64_t start, int64_t count, float* out) {
  const uint8_t* block = row + start / kGroup * 20;
  const float scale = widen_half(read_half(block));
  const float minimum = widen_half(read_half(block + 2));
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t pair = block[4 + i % 16];
    const int q = i < 16 ? pair & 15 : pair >> 4;
    const float scaled = scale * static_cast<float>(q);
    out[i] = scaled + minimum;
  }
}

struct Type {
  const char* name;
  int64_t block_columns;
  int64_t block_bytes;
  void (*widen)(const uint8_t*, int64_t, int64_t, float*);
};

constexpr Type kTypes[] = {{"F32", 1, 4, widen_f32},
                           {"F16", 1, 2, widen_f16},
                           {"BF16", 1, 2, widen_bf16},
                           {"Q8_0", 32, 34, widen_q8_0},
                           {"Q4_1", 32, 20, widen_q4_1}};

bool all_finite(const float* values, int64_t count) {
  uint32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t pattern;
    std::memcpy(&pattern, values + i, sizeof pattern);
    found |= (pattern & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  }
  return found == 0;
}

}  // namespace

Packer::Packer(PyObject* panels, PyObject* source, const std::string& type, int64_t num_rows,
               int64_t num_columns, PyObject* row_map)
    : panels_(panels, "panels", num_columns, num_rows, true),
      source_(source, "source", Element::kByte, {kAny}),
      row_map_(optional_array(row_map, "row_map", Element::kInt, {num_rows})),
      num_rows_(num_rows),
      num_columns_(num_columns) {
  for (const Type& candidate : kTypes) {
    if (type != candidate.name) continue;
    require(num_columns % candidate.block_columns == 0,
            "rows of " + std::to_string(num_columns) + " columns are not whole blocks of " +
                std::to_string(candidate.block_columns));
    widen_ = candidate.widen;
    row_bytes_ = num_columns / candidate.block_columns * candidate.block_bytes;
  }
  require(widen_ != nullptr,
          "type '" + type + "' cannot be packed; F32, F16, BF16, Q8_0 and Q4_1 can");
  require(num_columns >= 1, "num_columns is below 1");
  const int64_t source_rows = source_.num_bytes() / row_bytes_;
  require(source_.num_bytes() % row_bytes_ == 0 && (row_map_.present() || source_rows == num_rows),
          "source has " + std::to_string(source_.num_bytes()) + " bytes; rows are of " +
              std::to_string(row_bytes_));
  for (int64_t n = 0; row_map_.present() && n < num_rows; ++n) {
    require(row_map_.ints()[n] >= 0 && row_map_.ints()[n] < source_rows,
            "row_map[" + std::to_string(n) + "] is " + std::to_string(row_map_.ints()[n]) +
                "; the source has " + std::to_string(source_rows) + " rows");
  }
}

bool Packer::run(Pool& pool) const {
  std::atomic<bool> finite{true};
  const int64_t num_panels = (num_rows_ + kLanes - 1) / kLanes;
  const int size = static_cast<int>(num_panels);
  pool.run({{size, pool.chunk(size, 1)}}, [&](const Thread&, int, int start, int stop) {
    for (int panel = start; panel < stop; ++panel) {
      if (!pack_panel(panel)) finite.store(false, std::memory_order_relaxed);
    }
  });
  return finite.load();
}

bool Packer::pack_panel(int64_t panel) const {
  bool finite = true;
  float rows[kLanes][kGroup] = {};
  float* out = const_cast<float*>(panels_.floats()) + panel * panels_.panel_stride();
  const int64_t first = panel * kLanes;
  const int64_t lanes = std::min<int64_t>(kLanes, num_rows_ - first);
  for (int64_t start = 0; start < num_columns_; start += kGroup) {
    const int64_t count = std::min(kGroup, num_columns_ - start);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t n = first + lane;
      const int64_t row = row_map_.present() ? row_map_.ints()[n] : n;
      widen_(source_.bytes() + row * row_bytes_, start, count, rows[lane]);
      finite = all_finite(rows[lane], count) && finite;
    }
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t lane = 0; lane < kLanes; ++lane) *out++ = rows[lane][k];
    }
  }
  return finite;
}

}  // namespace anyshard
