// Stands in for Python's own header where there is no Python: an object is an array of a file of
// calls (driver.cpp), and only what array.cpp asks of it is here. The ops compile unchanged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

using Py_ssize_t = std::ptrdiff_t;

struct PyObject {
  char format[2] = {0, 0};  // as the struct module writes an element
  Py_ssize_t item_bytes = 0;
  std::vector<Py_ssize_t> shape;
  std::vector<Py_ssize_t> strides;
  void* memory = nullptr;
  Py_ssize_t num_bytes = 0;
  bool written = false;  // an op took it to write in it
};

struct Py_buffer {
  void* buf;
  Py_ssize_t len;
  Py_ssize_t itemsize;
  int ndim;
  char* format;
  Py_ssize_t* shape;
  Py_ssize_t* strides;
};

constexpr int PyBUF_STRIDES = 1;
constexpr int PyBUF_FORMAT = 2;
constexpr int PyBUF_WRITABLE = 4;

inline PyObject none_object;
#define Py_None (&none_object)

inline int PyObject_GetBuffer(PyObject* object, Py_buffer* view, int flags) {
  if (object == Py_None) return -1;
  if ((flags & PyBUF_WRITABLE) != 0) object->written = true;
  *view = {object->memory,        object->num_bytes,
           object->item_bytes,    static_cast<int>(object->shape.size()),
           object->format,        object->shape.data(),
           object->strides.data()};
  return 0;
}

inline void PyErr_Clear() {}

inline void PyBuffer_Release(Py_buffer*) {}

inline int PyBuffer_IsContiguous(const Py_buffer* view, char) {
  Py_ssize_t expected = view->itemsize;
  for (int dim = view->ndim - 1; dim >= 0; --dim) {
    if (view->shape[dim] == 0) return 1;
    if (view->shape[dim] > 1 && view->strides[dim] != expected) return 0;
    expected *= view->shape[dim];
  }
  return 1;
}
