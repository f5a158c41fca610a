// Raw tensors of a checkpoint, in panels: as they are stored, or widened to float32 exactly as the
// `gguf` package does.
#pragma once

#include <string>

#include "parts.h"

namespace anyshard {

struct PackType;  // a type of raw rows

enum class Packed { kFine, kNotFinite, kScaleTooLarge };

// Row n of `panels` is row `row_map[n]` (or n) of the raw rows in `source`; lanes past num_rows
// become +0. Panels are float32, or what keeps the type's bits: float16 for F16, bfloat16 for BF16,
// Q8_0 blocks for Q8_0; or int8, quantised in blocks of 32 columns that begin anew after every
// `group` columns (0: none but the first). Blocks of Q8_0 are taken as they are, except those that
// hold -128 or do not begin where ours do. Throws std::invalid_argument.
class Packer {
 public:
  Packer(PyObject* panels, PyObject* source, const std::string& type, int64_t num_rows,
         int64_t num_columns, PyObject* row_map, int64_t group);
  // Whether every value is finite. Throws std::overflow_error if an int8 scale leaves float16.
  bool run(Pool& pool) const;

 private:
  // Each packs one panel (a pair of them, blocks).
  Packed pack_widened(int64_t panel) const;
  Packed pack_halves(int64_t panel) const;
  Packed pack_blocks(int64_t pair) const;
  Packed pack_int8(int64_t pair) const;
  Packed quantize_row(const uint8_t* row, uint8_t* out, int64_t lane) const;
  const uint8_t* raw_row(int64_t n) const;
  uint8_t* place(int64_t panel) const;

  Panels panels_;
  Array source_;
  Array row_map_;
  const PackType* type_ = nullptr;
  int64_t num_rows_;
  int64_t num_columns_;
  int64_t group_;
  int64_t row_bytes_ = 0;
};

}  // namespace anyshard
