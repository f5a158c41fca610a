// A NumPy array as a checked pointer: what the ops keep of their arguments.
#pragma once

#include <Python.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "kernels.h"

namespace anyshard {

enum class Element { kFloat, kInt, kByte, kWord64 };

constexpr int64_t kAny = -1;  // in a wanted shape: any size

// Holds the buffer of an array (and so the array's memory) for as long as it lives. The array must
// be C-contiguous with the wanted dtype and shape. Throws std::invalid_argument, one sentence.
// Construct and destroy with the GIL held.
class Array {
 public:
  Array() = default;
  Array(PyObject* object, const char* name, Element element, std::initializer_list<int64_t> shape,
        bool writable = false);
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array();

  bool present() const { return held_; }
  int64_t size(int dim) const { return view_.shape[dim]; }
  int64_t num_bytes() const { return view_.len; }
  const float* floats() const { return held_ ? static_cast<const float*>(view_.buf) : nullptr; }
  const int32_t* ints() const { return static_cast<const int32_t*>(view_.buf); }
  const uint8_t* bytes() const { return held_ ? static_cast<const uint8_t*>(view_.buf) : nullptr; }
  float* writable_floats() const { return static_cast<float*>(view_.buf); }
  uint8_t* writable_bytes() const { return static_cast<uint8_t*>(view_.buf); }
  int32_t* writable_ints() const { return static_cast<int32_t*>(view_.buf); }
  uint64_t* writable_words() const { return static_cast<uint64_t*>(view_.buf); }

 protected:
  void acquire(PyObject* object, const char* name, const char* wanted, bool writable);
  char format() const;  // of an element, as the struct module writes it
  void check_shape(const char* name, std::initializer_list<int64_t> shape) const;
  std::string shape_text() const;

  Py_buffer view_{};
  bool held_ = false;
};

// Weight panels: [P, K, 8] of float32, float16 or uint16 (bfloat16), or [P/2, K/32, 544] of uint8
// (Q8_0) or int8 (int8 arithmetic). All but the first dimension contiguous, any stride between
// panels (a cut of k). None stands for zero outputs.
class Panels : public Array {
 public:
  Panels(PyObject* object, const char* name, int64_t num_inputs, int64_t num_outputs,
         bool writable = false);

  Storage storage() const { return storage_; }
  size_t stride() const { return stride_; }  // bytes between panels (pairs of them, blocks)

 private:
  Storage storage_ = Storage::kFloat32;
  size_t stride_ = 0;
};

// The K or V pages of one layer: [pages, KV heads, d, 32] (K) or [.., 32, d] (V) of float32, or
// [.., d + 2 * (d / 32, rounded up), 32] of int8 (kernels.h, KvStorage).
class KvPages : public Array {
 public:
  // head_dim kAny: of the array.
  KvPages(PyObject* object, const char* name, bool keys, int64_t head_dim, bool writable = false);

  KvStorage storage() const { return storage_; }
  int64_t num_pages() const { return size(0); }
  int64_t num_heads() const { return size(1); }
  int64_t head_dim() const { return head_dim_; }
  size_t head_bytes() const { return kv_page_bytes(storage_, head_dim_); }
  size_t page_bytes() const { return static_cast<size_t>(num_heads()) * head_bytes(); }
  const uint8_t* head(int64_t page, int64_t kv_head) const {
    return bytes() + static_cast<size_t>(page) * page_bytes() +
           static_cast<size_t>(kv_head) * head_bytes();
  }
  uint8_t* writable_head(int64_t page, int64_t kv_head) const {
    return const_cast<uint8_t*>(head(page, kv_head));
  }
  // K or V of one key, widened.
  void read_row(int64_t page, int64_t kv_head, int64_t lane, float* out) const;

 private:
  bool keys_;
  KvStorage storage_ = KvStorage::kFloat32;
  int64_t head_dim_ = 0;
};

// Throws std::invalid_argument unless `values` are pages of the same kind and sizes as `keys`.
void require_alike(const KvPages& keys, const KvPages& values);

// Whether they are of int8 arithmetic.
bool holds_int8(PyObject* panels);

// An array, or nothing for None.
Array optional_array(PyObject* object, const char* name, Element element,
                     std::initializer_list<int64_t> shape, bool writable = false);

// Throws std::invalid_argument(message) unless the condition holds.
void require(bool condition, const std::string& message);

// Throws std::invalid_argument("`have`; .. are needed") unless `size` is at least the product of
// the counts, none of them below 0. That may be beyond 64 bits: a count may be an argument of its
// own.
void require_at_least(const std::string& have, int64_t size, std::initializer_list<int64_t> counts);

// Of heads, if kernels take it; else throws std::invalid_argument.
int checked_head_dim(int64_t head_dim);

}  // namespace anyshard
