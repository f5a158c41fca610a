#include "wire_op.h"

namespace anyshard {
namespace {

// Below this many floats rows are done before another thread has woken up.
constexpr int64_t kAloneFloats = 8192;

}  // namespace

RoundWire::RoundWire(Pool& pool, PyObject* x, PyObject* wire)
    : pool_(pool),
      x_(x, "x", Element::kFloat, {kAny, kAny}, true),
      wire_(optional_array(wire, "wire", Element::kByte, {x_.size(0), wire_row_bytes(x_.size(1))},
                           true)) {}

void RoundWire::run(int rows) {
  check_rows(rows, static_cast<int>(x_.size(0)));
  const int64_t width = x_.size(1);
  const auto work = [&](const Thread& thread, int, int start, int stop) {
    for (int64_t row = start; row < stop; ++row) {
      uint8_t* wire =
          wire_.present() ? wire_.writable_bytes() + row * wire_row_bytes(width) : nullptr;
      thread.kernels.wire_round(x_.writable_floats() + row * width, static_cast<int>(width), wire);
    }
  };
  pool_.run({{rows, pool_.chunk(rows, 1)}}, work, rows * width < kAloneFloats);
}

DecodeWire::DecodeWire(Pool& pool, PyObject* wire, PyObject* x)
    : pool_(pool),
      x_(x, "x", Element::kFloat, {kAny, kAny}, true),
      wire_(wire, "wire", Element::kByte, {x_.size(0), wire_row_bytes(x_.size(1))}) {}

void DecodeWire::run(int rows) {
  check_rows(rows, static_cast<int>(x_.size(0)));
  const int64_t width = x_.size(1);
  const auto work = [&](const Thread& thread, int, int start, int stop) {
    for (int64_t row = start; row < stop; ++row) {
      thread.kernels.wire_decode(wire_.bytes() + row * wire_row_bytes(width),
                                 static_cast<int>(width), x_.writable_floats() + row * width);
    }
  };
  pool_.run({{rows, pool_.chunk(rows, 1)}}, work, rows * width < kAloneFloats);
}

}  // namespace anyshard
