// A library to preload (tests/steady.py): counts allocations that code in a watched range asks for,
// and those of a NumPy data handler. Counts only; the memory is the C library's.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

std::atomic<uintptr_t> watched_start{0};
std::atomic<uintptr_t> watched_stop{0};
std::atomic<long> native_calls{0};
std::atomic<long> numpy_calls{0};
std::atomic<bool> counts_numpy{false};

void note(void* caller) {
  const auto address = reinterpret_cast<uintptr_t>(caller);
  if (address >= watched_start.load() && address < watched_stop.load()) ++native_calls;
}

void note_numpy() {
  if (counts_numpy.load()) ++numpy_calls;
}

void* numpy_malloc(void*, size_t size) {
  note_numpy();
  return std::malloc(size);
}
void* numpy_calloc(void*, size_t count, size_t size) {
  note_numpy();
  return std::calloc(count, size);
}
void* numpy_realloc(void*, void* memory, size_t size) {
  note_numpy();
  return std::realloc(memory, size);
}
void numpy_free(void*, void* memory, size_t) { std::free(memory); }

// PyDataMem_Handler of NumPy's C API.
struct Handler {
  char name[127];
  uint8_t version;
  void* context;
  void* (*malloc)(void*, size_t);
  void* (*calloc)(void*, size_t, size_t);
  void* (*realloc)(void*, void*, size_t);
  void (*free)(void*, void*, size_t);
};
Handler handler{"counts", 1, nullptr, numpy_malloc, numpy_calloc, numpy_realloc, numpy_free};

// The next definition of the one that is called first; found once.
template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

void* counts_handler() { return &handler; }
void counts_watch(uintptr_t start, uintptr_t stop) {
  native_calls = 0;
  numpy_calls = 0;
  watched_start = start;
  watched_stop = stop;
  counts_numpy = stop != 0;
}
long counts_native() { return native_calls.load(); }
long counts_numpy_calls() { return numpy_calls.load(); }

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t size) {
  note(__builtin_return_address(0));
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  note(__builtin_return_address(0));
  return __libc_calloc(count, size);
}
void* realloc(void* memory, size_t size) {
  note(__builtin_return_address(0));
  return __libc_realloc(memory, size);
}
void* memalign(size_t alignment, size_t size) {
  note(__builtin_return_address(0));
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  note(__builtin_return_address(0));
  return __libc_memalign(alignment, size);
}
void* mmap64(void* at, size_t size, int protection, int flags, int descriptor, long offset) {
  static auto* const real = next<void*(void*, size_t, int, int, int, long)>("mmap64");
  note(__builtin_return_address(0));
  return real(at, size, protection, flags, descriptor, offset);
}

}  // extern "C"

namespace {
void* new_memory(size_t size, void* caller, size_t alignment = 0) {
  note(caller);
  void* memory = alignment == 0 ? __libc_malloc(size == 0 ? 1 : size)
                                : __libc_memalign(alignment, size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(size_t size) { return new_memory(size, __builtin_return_address(0)); }
void* operator new[](size_t size) { return new_memory(size, __builtin_return_address(0)); }
void* operator new(size_t size, std::align_val_t alignment) {
  return new_memory(size, __builtin_return_address(0), static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
