#include "pack.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "half.h"

namespace anyshard {
namespace {

constexpr int64_t kGroup = 32;  // columns widened at a time; the block of the quantised types

void widen_f32(const uint8_t* row, int64_t start, int64_t count, float* out) {
  std::memcpy(out, row + 4 * start, static_cast<size_t>(4 * count));
}

void widen_f16(const uint8_t* row, int64_t start, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = widen_half(read_half(row + 2 * (start + i)));
}

void widen_bf16(const uint8_t* row, int64_t start, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = widen_bfloat(read_half(row + 2 * (start + i)));
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

}  // namespace

struct PackType {
  const char* name;
  int64_t block_columns;
  int64_t block_bytes;
  // Widens columns [start, start + 32) (fewer at the end) of one raw row.
  void (*widen)(const uint8_t* row, int64_t start, int64_t count, float* out);
  Storage kept;  // what holds its bits as they are
};

namespace {

constexpr PackType kTypes[] = {{"F32", 1, 4, widen_f32, Storage::kFloat32},
                               {"F16", 1, 2, widen_f16, Storage::kFloat16},
                               {"BF16", 1, 2, widen_bf16, Storage::kBfloat16},
                               {"Q8_0", 32, 34, widen_q8_0, Storage::kQ8},
                               {"Q4_1", 32, 20, widen_q4_1, Storage::kFloat32}};

bool all_finite(const float* values, int64_t count) {
  uint32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t pattern;
    std::memcpy(&pattern, values + i, sizeof pattern);
    found |= (pattern & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  }
  return found == 0;
}

// Columns that a row takes in memory.
int64_t stored_columns(PyObject* panels, int64_t num_columns, int64_t group) {
  require(num_columns >= 1 && num_columns <= INT_MAX, "num_columns is " +
                                                          std::to_string(num_columns) + "; 1 to " +
                                                          std::to_string(INT_MAX) + " is possible");
  require(group >= 0 && (group == 0 || num_columns % group == 0),
          "group is " + std::to_string(group) + "; 0 or a divisor of num_columns is possible");
  if (!holds_int8(panels)) return num_columns;
  const int64_t width = group == 0 ? num_columns : group;
  return num_columns / width * ((width + kGroup - 1) / kGroup * kGroup);
}

Packed worse(Packed a, Packed b) { return a != Packed::kFine ? a : b; }

// (value + 1.5 * 2^23) - 1.5 * 2^23 is the nearest whole number, even on ties, below 2^22.
float nearest_whole(float value) { return (value + 0x1.8p23f) - 0x1.8p23f; }

// q of up to 32 weights into groups of four k that lie `stride` bytes apart, and their scale.
Packed quantize_block(const float* values, int64_t count, uint8_t* out, int64_t stride,
                      uint8_t* scale_out) {
  constexpr float kMost = kInt8Most;
  if (!all_finite(values, count)) return Packed::kNotFinite;
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
  const uint32_t half = narrow_half(largest / kMost);
  if (half >= 0x7c00u) return Packed::kScaleTooLarge;
  const float scale = widen_half(half);
  scale_out[0] = static_cast<uint8_t>(half & 0xffu);
  scale_out[1] = static_cast<uint8_t>(half >> 8);
  for (int64_t i = 0; i < count && scale != 0.0f; ++i) {
    const float held = std::max(-kMost, std::min(kMost, values[i] / scale));
    out[i / 4 * stride + i % 4] = static_cast<uint8_t>(static_cast<int>(nearest_whole(held)));
  }
  return Packed::kFine;
}

}  // namespace

Packer::Packer(PyObject* panels, PyObject* source, const std::string& type, int64_t num_rows,
               int64_t num_columns, PyObject* row_map, int64_t group)
    : panels_(panels, "panels", stored_columns(panels, num_columns, group), num_rows, true),
      source_(source, "source", Element::kByte, {kAny}),
      row_map_(optional_array(row_map, "row_map", Element::kInt, {num_rows})),
      num_rows_(num_rows),
      num_columns_(num_columns),
      group_(group == 0 ? num_columns : group) {
  for (const PackType& candidate : kTypes) {
    if (type == candidate.name) type_ = &candidate;
  }
  require(type_ != nullptr,
          "type '" + type + "' cannot be packed; F32, F16, BF16, Q8_0 and Q4_1 can");
  require(panels_.storage() == Storage::kFloat32 || panels_.storage() == Storage::kInt8 ||
              panels_.storage() == type_->kept,
          "panels must be float32, int8, or of the type that keeps the bits of " + type);
  require(num_columns % type_->block_columns == 0, "rows of " + std::to_string(num_columns) +
                                                       " columns are not whole blocks of " +
                                                       std::to_string(type_->block_columns));
  row_bytes_ = num_columns / type_->block_columns * type_->block_bytes;
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
  auto pack = &Packer::pack_halves;
  if (panels_.storage() == Storage::kFloat32) pack = &Packer::pack_widened;
  if (panels_.storage() == Storage::kQ8) pack = &Packer::pack_blocks;
  if (panels_.storage() == Storage::kInt8) pack = &Packer::pack_int8;
  std::atomic<Packed> found{Packed::kFine};
  const int size = static_cast<int>(panels_.size(0));
  pool.run({{size, pool.chunk(size, 1)}}, [&](const Thread&, int, int start, int stop) {
    for (int panel = start; panel < stop; ++panel) {
      const Packed result = (this->*pack)(panel);
      if (result != Packed::kFine) found.store(result, std::memory_order_relaxed);
    }
  });
  if (found.load() == Packed::kScaleTooLarge) {
    throw std::overflow_error("a block's largest weight / 127 is beyond float16");
  }
  return found.load() == Packed::kFine;
}

const uint8_t* Packer::raw_row(int64_t n) const {
  return source_.bytes() + (row_map_.present() ? row_map_.ints()[n] : n) * row_bytes_;
}

uint8_t* Packer::place(int64_t panel) const {
  return panels_.writable_bytes() + static_cast<size_t>(panel) * panels_.stride();
}

Packed Packer::pack_widened(int64_t panel) const {
  bool finite = true;
  float rows[kLanes][kGroup] = {};
  float* out = reinterpret_cast<float*>(place(panel));
  const int64_t first = panel * kLanes;
  const int64_t lanes = std::min<int64_t>(kLanes, num_rows_ - first);
  for (int64_t start = 0; start < num_columns_; start += kGroup) {
    const int64_t count = std::min(kGroup, num_columns_ - start);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      type_->widen(raw_row(first + lane), start, count, rows[lane]);
      finite = all_finite(rows[lane], count) && finite;
    }
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t lane = 0; lane < kLanes; ++lane) *out++ = rows[lane][k];
    }
  }
  return finite ? Packed::kFine : Packed::kNotFinite;
}

Packed Packer::pack_halves(int64_t panel) const {
  const uint32_t exponent = panels_.storage() == Storage::kFloat16 ? 0x7c00u : 0x7f80u;
  bool finite = true;
  const int64_t first = panel * kLanes;
  const int64_t lanes = std::min<int64_t>(kLanes, num_rows_ - first);
  const uint8_t* rows[kLanes] = {};
  for (int64_t lane = 0; lane < lanes; ++lane) rows[lane] = raw_row(first + lane);
  uint16_t* out = reinterpret_cast<uint16_t*>(place(panel));
  for (int64_t k = 0; k < num_columns_; ++k, out += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t half = lane < lanes ? read_half(rows[lane] + 2 * k) : 0;
      finite = (half & exponent) != exponent && finite;
      out[lane] = static_cast<uint16_t>(half);
    }
  }
  return finite ? Packed::kFine : Packed::kNotFinite;
}

Packed Packer::pack_blocks(int64_t pair) const {
  bool finite = true;
  const int64_t first = pair * kQ8Outputs;
  const int64_t lanes = std::min<int64_t>(kQ8Outputs, num_rows_ - first);
  uint8_t* out = place(pair);
  std::memset(out, 0, panel_bytes(Storage::kQ8, num_columns_));
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const uint8_t* block = raw_row(first + lane);
    uint8_t* to = out + 4 * lane;
    for (int64_t k = 0; k < num_columns_; k += kQ8Inputs, block += 34, to += kQ8Bytes) {
      const uint32_t scale = read_half(block);
      finite = (scale & 0x7c00u) != 0x7c00u && finite;
      std::memcpy(to + kQ8Values - 2 * lane, block, 2);
      for (int g = 0; g < kQ8Inputs / 4; ++g) {
        std::memcpy(to + g * 4 * kQ8Outputs, block + 2 + 4 * g, 4);
      }
    }
  }
  return finite ? Packed::kFine : Packed::kNotFinite;
}

// Columns of the raw row in blocks of ours; `out` is the pair's first block.
Packed Packer::quantize_row(const uint8_t* row, uint8_t* out, int64_t lane) const {
  constexpr int64_t kStride = 4 * kQ8Outputs;
  const bool aligned = type_->kept == Storage::kQ8 && group_ % kGroup == 0;
  Packed found = Packed::kFine;
  for (int64_t head = 0; head < num_columns_; head += group_) {
    for (int64_t at = head; at < head + group_; at += kGroup, out += kQ8Bytes) {
      const int64_t count = std::min(kGroup, head + group_ - at);
      uint8_t* values = out + 4 * lane;
      uint8_t* scale = out + kQ8Values + 2 * lane;
      const uint8_t* block = row + at / kGroup * type_->block_bytes;
      if (aligned && std::memchr(block + 2, 0x80, kQ8Inputs) == nullptr) {
        if ((read_half(block) & 0x7c00u) == 0x7c00u) found = Packed::kNotFinite;
        std::memcpy(scale, block, 2);
        for (int g = 0; g < kQ8Inputs / 4; ++g) {
          std::memcpy(values + g * kStride, block + 2 + 4 * g, 4);
        }
        continue;
      }
      float wide[2 * kGroup];
      const int64_t first = type_->block_columns > 1 ? at / kGroup * kGroup : at;
      const int64_t wanted = std::min(num_columns_, at + count) - first;
      for (int64_t done = 0; done < wanted; done += kGroup) {
        type_->widen(row, first + done, std::min(kGroup, wanted - done), wide + done);
      }
      found = worse(found, quantize_block(wide + (at - first), count, values, kStride, scale));
    }
  }
  return found;
}

Packed Packer::pack_int8(int64_t pair) const {
  const int64_t first = pair * kQ8Outputs;
  const int64_t lanes = std::min<int64_t>(kQ8Outputs, num_rows_ - first);
  uint8_t* out = place(pair);
  std::memset(out, 0, static_cast<size_t>(panels_.size(1)) * kQ8Bytes);
  Packed found = Packed::kFine;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    found = worse(found, quantize_row(raw_row(first + lane), out, lane));
  }
  return found;
}

}  // namespace anyshard
