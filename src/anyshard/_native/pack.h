// Raw tensors of a checkpoint, widened to float32 exactly as the `gguf` package does, in panels.
#pragma once

#include <string>

#include "parts.h"

namespace anyshard {

// Row n of `panels` is row `row_map[n]` (or n) of the raw rows in `source`; lanes past num_rows of
// the last panel become +0. Returns whether every value is finite. Throws std::invalid_argument.
class Packer {
 public:
  Packer(PyObject* panels, PyObject* source, const std::string& type, int64_t num_rows,
         int64_t num_columns, PyObject* row_map);
  bool run(Pool& pool) const;

 private:
  // Widens columns [start, start + 32) (fewer at the end) of one raw row.
  using Widen = void (*)(const uint8_t* row, int64_t start, int64_t count, float* out);
  bool pack_panel(int64_t panel) const;

  Panels panels_;
  Array source_;
  Array row_map_;
  Widen widen_ = nullptr;
  int64_t num_rows_;
  int64_t num_columns_;
  int64_t row_bytes_ = 0;
};

}  // namespace anyshard
