#include "array.h"

#include <cstring>
#include <stdexcept>

#include "half.h"

namespace anyshard {
namespace {

const char* name_of(Element element) {
  switch (element) {
    case Element::kFloat:
      return "float32";
    case Element::kInt:
      return "int32";
    case Element::kWord64:
      return "uint64";
    default:
      return "uint8";
  }
}

bool matches(Element element, char format, Py_ssize_t item_bytes) {
  switch (element) {
    case Element::kFloat:
      return format == 'f' && item_bytes == 4;
    case Element::kInt:
      return (format == 'i' || format == 'l') && item_bytes == 4;
    case Element::kWord64:
      return (format == 'L' || format == 'Q') && item_bytes == 8;
    default:
      return (format == 'B' || format == '?') && item_bytes == 1;
  }
}

std::string text_of(std::initializer_list<int64_t> shape) {
  std::string text = "[";
  for (const int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += size == kAny ? "any" : std::to_string(size);
  }
  return text + "]";
}

// The last may be short; `count` may be any.
int64_t groups_of(int64_t count, int64_t size) { return count / size + (count % size != 0); }

}  // namespace

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

void require_at_least(const std::string& have, int64_t size,
                      std::initializer_list<int64_t> counts) {
  int64_t needed = 1;
  bool fits = true;
  for (const int64_t count : counts) {
    if (count == 0) return;
    fits = !__builtin_mul_overflow(needed, count, &needed) && fits;
  }
  require(fits && size >= needed,
          have + "; " + (fits ? std::to_string(needed) : "2^63 or more") + " are needed");
}

int checked_head_dim(int64_t head_dim) {
  require(head_dim >= 8 && head_dim <= kMaxHeadDim && head_dim % 8 == 0,
          "head_dim is " + std::to_string(head_dim) + "; a multiple of 8 up to 256 is needed");
  return static_cast<int>(head_dim);
}

void Array::acquire(PyObject* object, const char* name, const char* wanted, bool writable) {
  const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object, &view_, flags) != 0) {
    PyErr_Clear();
    throw std::invalid_argument(std::string(name) + " must be " +
                                (writable ? "a writable " : "an ") + "array of " + wanted);
  }
  held_ = true;
  require(reinterpret_cast<uintptr_t>(view_.buf) % static_cast<uintptr_t>(view_.itemsize) == 0,
          std::string(name) + " is not aligned to its element size");
}

char Array::format() const {
  const char* format = view_.format != nullptr ? view_.format : "B";
  if (*format == '=' || *format == '@') ++format;
  return std::strlen(format) == 1 ? *format : ' ';
}

std::string Array::shape_text() const {
  std::string text = "[";
  for (int dim = 0; dim < view_.ndim; ++dim) {
    if (dim > 0) text += ", ";
    text += std::to_string(view_.shape[dim]);
  }
  return text + "]";
}

void Array::check_shape(const char* name, std::initializer_list<int64_t> shape) const {
  bool equal = view_.ndim == static_cast<int>(shape.size());
  int dim = 0;
  for (const int64_t wanted : shape) {
    equal = equal && (wanted == kAny || wanted == view_.shape[dim]);
    ++dim;
  }
  require(equal,
          std::string(name) + " has shape " + shape_text() + "; " + text_of(shape) + " is needed");
}

// Delegating: once Array() is done the destructor runs even if a check throws.
Array::Array(PyObject* object, const char* name, Element element,
             std::initializer_list<int64_t> shape, bool writable)
    : Array() {
  acquire(object, name, name_of(element), writable);
  require(matches(element, format(), view_.itemsize),
          std::string(name) + " must be of " + name_of(element) + ", its format is '" +
              (view_.format != nullptr ? view_.format : "B") + "'");
  check_shape(name, shape);
  require(PyBuffer_IsContiguous(&view_, 'C') != 0, std::string(name) + " must be C-contiguous");
}

Array::~Array() {
  if (held_) PyBuffer_Release(&view_);
}

Panels::Panels(PyObject* object, const char* name, int64_t num_inputs, int64_t num_outputs,
               bool writable) {
  require(num_outputs >= 0, std::string(name) + ": the number of outputs is below 0");
  require(num_inputs >= 0, std::string(name) + ": the number of inputs is below 0");
  if (object == Py_None) {
    require(num_outputs == 0, std::string(name) + " is None, but " + std::to_string(num_outputs) +
                                  " outputs are asked for");
    return;
  }
  constexpr const char* kTypes =
      "float32, float16, uint16 (bfloat16), uint8 (Q8_0 blocks) or int8 (blocks of int8 "
      "arithmetic)";
  acquire(object, name, kTypes, writable);
  const std::string formats = "fHeBb";
  const size_t type = formats.find(format());
  constexpr Py_ssize_t kItemBytes[] = {4, 2, 2, 1, 1};
  require(type != std::string::npos && view_.itemsize == kItemBytes[type],
          std::string(name) + " must be of " + kTypes + ", its format is '" +
              (view_.format != nullptr ? view_.format : "B") + "'");
  storage_ = static_cast<Storage>(type);
  if (in_blocks(storage_)) {
    require(num_inputs % kQ8Inputs == 0, std::string(name) + " are blocks of 32 inputs; " +
                                             std::to_string(num_inputs) +
                                             " inputs are not whole blocks");
    check_shape(name,
                {groups_of(num_outputs, kQ8Outputs), num_inputs / kQ8Inputs, int64_t{kQ8Bytes}});
  } else {
    check_shape(name, {groups_of(num_outputs, kLanes), num_inputs, int64_t{kLanes}});
  }
  const Py_ssize_t inner = view_.shape[2] * view_.itemsize;
  const bool empty = view_.shape[0] == 0 || view_.shape[1] == 0;
  const bool fits = empty || (view_.strides[2] == view_.itemsize &&
                              (view_.shape[1] == 1 || view_.strides[1] == inner));
  const int64_t stride = empty || view_.shape[0] == 1 ? 0 : view_.strides[0];
  require(fits && stride >= 0 && stride % view_.itemsize == 0,
          std::string(name) + " must be panels with strides (any, " + std::to_string(inner) + ", " +
              std::to_string(view_.itemsize) + ") bytes");
  stride_ = static_cast<size_t>(stride);
}

namespace {

int64_t scale_rows(int64_t head_dim) { return 2 * ((head_dim + kKvGroup - 1) / kKvGroup); }

// The head_dim whose int8 page has that many rows, or 0.
int64_t head_dim_of(int64_t rows) {
  for (int64_t dims = 8; dims <= kMaxHeadDim; dims += 8) {
    if (dims + scale_rows(dims) == rows) return dims;
  }
  return 0;
}

}  // namespace

KvPages::KvPages(PyObject* object, const char* name, bool keys, int64_t head_dim, bool writable)
    : keys_(keys) {
  acquire(object, name, "float32 or int8", writable);
  const bool is_int8 = format() == 'b' && view_.itemsize == 1;
  require(is_int8 || (format() == 'f' && view_.itemsize == 4),
          std::string(name) + " must be of float32 or int8, its format is '" +
              (view_.format != nullptr ? view_.format : "B") + "'");
  storage_ = is_int8 ? KvStorage::kInt8 : KvStorage::kFloat32;
  if (head_dim == kAny) {
    require(view_.ndim == 4,
            std::string(name) + " has shape " + shape_text() + "; four dimensions are needed");
    head_dim = is_int8 ? head_dim_of(size(2)) : size(keys ? 2 : 3);
  }
  require(head_dim > 0, std::string(name) + " has shape " + shape_text() +
                            ", which no head_dim gives to pages of int8");
  head_dim_ = head_dim;
  if (is_int8) {
    check_shape(name, {kAny, kAny, head_dim + scale_rows(head_dim), kBlock});
  } else if (keys) {
    check_shape(name, {kAny, kAny, head_dim, kBlock});
  } else {
    check_shape(name, {kAny, kAny, kBlock, head_dim});
  }
  checked_head_dim(head_dim);
  require(PyBuffer_IsContiguous(&view_, 'C') != 0, std::string(name) + " must be C-contiguous");
}

void KvPages::read_row(int64_t page, int64_t kv_head, int64_t lane, float* out) const {
  const uint8_t* place = head(page, kv_head);
  for (int64_t d = 0; d < head_dim_; ++d) {
    if (storage_ == KvStorage::kFloat32) {
      const int64_t at = keys_ ? d * kBlock + lane : lane * head_dim_ + d;
      std::memcpy(out + d, place + 4 * at, sizeof(float));
    } else {
      const size_t at = keys_ ? kv_key_at(d, lane) : kv_value_at(head_dim_, d, lane);
      const uint8_t* scale = place + head_dim_ * kBlock + 2 * (d / kKvGroup * kBlock + lane);
      out[d] = static_cast<float>(static_cast<int8_t>(place[at])) * widen_half(read_half(scale));
    }
  }
}

void require_alike(const KvPages& keys, const KvPages& values) {
  require(keys.storage() == values.storage() && keys.num_pages() == values.num_pages() &&
              keys.num_heads() == values.num_heads() && keys.head_dim() == values.head_dim(),
          "k_cache and v_cache differ in type, pages, heads or head_dim");
}

bool holds_int8(PyObject* panels) {
  Py_buffer view;
  if (panels == Py_None) return false;
  if (PyObject_GetBuffer(panels, &view, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
    PyErr_Clear();  // Panels says what is wrong
    return false;
  }
  const bool result = view.format != nullptr && std::strcmp(view.format, "b") == 0;
  PyBuffer_Release(&view);
  return result;
}

Array optional_array(PyObject* object, const char* name, Element element,
                     std::initializer_list<int64_t> shape, bool writable) {
  if (object == Py_None) return Array();
  return Array(object, name, element, shape, writable);
}

}  // namespace anyshard
