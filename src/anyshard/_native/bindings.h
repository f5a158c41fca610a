// What the files that bind ops for Python share.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

inline std::vector<PyObject*> pointers_of(const std::vector<nanobind::object>& objects) {
  std::vector<PyObject*> pointers;
  for (const nanobind::object& each : objects) pointers.push_back(each.ptr());
  return pointers;
}
