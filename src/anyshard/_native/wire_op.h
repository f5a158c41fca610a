// The ops of int8 wires (kernels: wire.h), bound once to their arrays.
//
// `wire` [R, D + 2 * (D / 32, rounded up)] of uint8 holds rows as a hop carries them.
#pragma once

#include <cstdint>

#include "bound.h"
#include "parts.h"

namespace anyshard {

// Bytes of a row on the wire.
inline int64_t wire_row_bytes(int64_t width) {
  return width + 2 * ((width + kKvGroup - 1) / kKvGroup);
}

// Rows of x become what a hop would make of them; where there is a wire, it is written as well.
class RoundWire : public Op {
 public:
  RoundWire(Pool& pool, PyObject* x, PyObject* wire);
  void run(int rows) override;

 private:
  Pool& pool_;
  Array x_;
  Array wire_;
};

// Rows of x from what a hop has brought.
class DecodeWire : public Op {
 public:
  DecodeWire(Pool& pool, PyObject* wire, PyObject* x);
  void run(int rows) override;

 private:
  Pool& pool_;
  Array x_;
  Array wire_;
};

}  // namespace anyshard
