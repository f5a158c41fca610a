// Runs the ops without Python: reads a file of calls, writes a file of answers.
//
//   driver CALLS ANSWERS BODY THREADS [flush]
//
// Both files are written and read by tests/golden/playback.py, which has the format. The ops, their
// pool and their kernels are those of the module, compiled for whatever CPU this is; Python.h is
// the one beside this file. `flush`: the calling thread flushes subnormals to zero, and must still
// do so when the ops have returned.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <list>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_states.h"
#include "digest_op.h"
#include "ops.h"
#include "pack.h"
#include "wire_op.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

using namespace anyshard;

constexpr char kMagic[] = "anyshard calls 1";
constexpr size_t kAlignment = 64;

class Input {
 public:
  explicit Input(const char* path) : file_(path, std::ios::binary) {
    std::string magic(sizeof kMagic - 1, ' ');
    file_.read(magic.data(), static_cast<std::streamsize>(magic.size()));
    if (!file_ || magic != kMagic) {
      throw std::runtime_error(std::string(path) + " is no file of calls");
    }
  }
  template <typename Number>
  Number number() {
    Number value{};
    read(&value, sizeof value);
    return value;
  }
  size_t count() { return static_cast<size_t>(number<uint64_t>()); }
  std::string text() {
    std::string result(count(), ' ');
    read(result.data(), result.size());
    return result;
  }
  void read(void* out, size_t num_bytes) {
    file_.read(static_cast<char*>(out), static_cast<std::streamsize>(num_bytes));
    if (!file_) throw std::runtime_error("the file of calls ends early");
  }

 private:
  std::ifstream file_;
};

class Output {
 public:
  explicit Output(const char* path) : file_(path, std::ios::binary) {}
  template <typename Number>
  void number(Number value) {
    write(&value, sizeof value);
  }
  void write(const void* bytes, size_t num_bytes) {
    file_.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(num_bytes));
  }
  void close() {
    file_.close();
    if (!file_) throw std::runtime_error("the answers could not be written");
  }

 private:
  std::ofstream file_;
};

// The arguments of one call, taken in order.
class Call {
 public:
  explicit Call(Input& input) : name(input.text()) {
    const size_t num_arguments = input.count();
    for (size_t i = 0; i < num_arguments; ++i) arguments_.push_back(argument(input));
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    for (PyObject& array : arrays) std::free(array.memory);
  }

  PyObject* object() { return next('a', 'n').object; }
  int64_t integer() { return next('i').integer; }
  int small() { return static_cast<int>(integer()); }
  double real() { return next('d').real; }
  std::string text() { return next('s').text; }
  std::vector<PyObject*> objects() {
    std::vector<PyObject*> result;
    for (const Argument& each : next('l').list) result.push_back(each.object);
    return result;
  }
  std::vector<int64_t> integers() {
    std::vector<int64_t> result;
    for (const Argument& each : next('l').list) result.push_back(each.integer);
    return result;
  }

  bool is_done() const { return taken_ == arguments_.size(); }

  const std::string name;
  std::list<PyObject> arrays;  // in the order of the file

 private:
  struct Argument {
    char kind = 'n';
    PyObject* object = Py_None;
    int64_t integer = 0;
    double real = 0;
    std::string text;
    std::vector<Argument> list;
  };

  Argument argument(Input& input) {
    Argument result;
    result.kind = input.number<char>();
    switch (result.kind) {
      case 'n':
        break;
      case 'i':
        result.integer = input.number<int64_t>();
        break;
      case 'd':
        result.real = input.number<double>();
        break;
      case 's':
        result.text = input.text();
        break;
      case 'a':
        result.object = array(input);
        break;
      case 'l':
        for (size_t rest = input.count(); rest > 0; --rest) {
          result.list.push_back(argument(input));
        }
        break;
      default:
        throw std::runtime_error(std::string("no argument is of kind '") + result.kind + "'");
    }
    return result;
  }

  PyObject* array(Input& input) {
    PyObject& result = arrays.emplace_back();
    result.format[0] = input.number<char>();
    result.item_bytes = static_cast<Py_ssize_t>(input.count());
    const size_t num_dims = input.count();
    for (size_t i = 0; i < num_dims; ++i) result.shape.push_back(input.number<int64_t>());
    for (size_t i = 0; i < num_dims; ++i) result.strides.push_back(input.number<int64_t>());
    const size_t num_bytes = input.count();
    const size_t whole = (num_bytes / kAlignment + 1) * kAlignment;
    result.num_bytes = static_cast<Py_ssize_t>(num_bytes);
    result.memory = std::aligned_alloc(kAlignment, whole);
    if (result.memory == nullptr) throw std::bad_alloc();
    input.read(result.memory, num_bytes);
    return &result;
  }

  const Argument& next(char kind, char or_kind = ' ') {
    if (taken_ == arguments_.size()) throw std::runtime_error(name + ": too few arguments");
    const Argument& result = arguments_[taken_++];
    if (result.kind != kind && result.kind != or_kind) {
      throw std::runtime_error(name + ": argument " + std::to_string(taken_) + " is of kind '" +
                               result.kind + "'");
    }
    return result;
  }

  std::vector<Argument> arguments_;
  size_t taken_ = 0;
};

Best best_logit(Call& call, const Kernels& kernels) {
  const Array logits(call.object(), "logits", Element::kFloat, {kAny});
  const FloatEnvironment environment;
  return kernels.argmax(logits.floats(), logits.size(0));
}

Best draw(Call& call, const Kernels& kernels) {
  const Array logits(call.object(), "logits", Element::kFloat, {kAny});
  Sampler sampler{};
  sampler.temperature = nearest_float(call.real());
  const uint64_t key = static_cast<uint64_t>(call.integer());
  sampler.key[0] = static_cast<uint32_t>(key);
  sampler.key[1] = static_cast<uint32_t>(key >> 32);
  sampler.position = static_cast<uint32_t>(call.integer());
  sampler.choice = static_cast<uint32_t>(call.integer());
  sampler.stream = static_cast<uint32_t>(call.integer());
  const Array mask = optional_array(call.object(), "mask", Element::kByte, {logits.size(0)});
  sampler.mask = mask.bytes();
  const FloatEnvironment environment;
  return kernels.gumbel_argmax(sampler, logits.floats(), logits.size(0));
}

void exponentials(Call& call, const Kernels& kernels) {
  const Array x(call.object(), "x", Element::kFloat, {kAny});
  const Array out(call.object(), "out", Element::kFloat, {x.size(0)}, true);
  const FloatEnvironment environment;
  kernels.exp_into(x.floats(), out.writable_floats(), x.size(0));
}

bool pack(Call& call, Pool& pool) {
  PyObject* panels = call.object();
  PyObject* source = call.object();
  const std::string type = call.text();
  const int64_t num_rows = call.integer();
  const int64_t num_columns = call.integer();
  PyObject* row_map = call.object();
  const int64_t group = call.is_done() ? 0 : call.integer();
  return Packer(panels, source, type, num_rows, num_columns, row_map, group).run(pool);
}

// What a function returns: an index and a value, or zeros; ops return nothing. Braces take the
// arguments in their order.
Best run(Call& call, Pool& pool) {
  Call& c = call;
  const std::string& name = call.name;
  if (name == "argmax") return best_logit(call, pool.kernels());
  if (name == "gumbel_argmax") return draw(call, pool.kernels());
  if (name == "pack_panels") return {pack(call, pool) ? 1 : 0, 0.0f};
  if (name == "exp_into") {
    exponentials(call, pool.kernels());
  } else if (name == "Embed") {
    Embed op{pool, c.object(), c.integer(), c.object(), c.object()};
    op.run(c.small());
  } else if (name == "RoundWire") {
    RoundWire op{pool, c.object(), c.object()};
    op.run(c.small());
  } else if (name == "DecodeWire") {
    DecodeWire op{pool, c.object(), c.object()};
    op.run(c.small());
  } else if (name == "Qkv") {
    const Qkv::Arguments arguments{c.object(), c.object(), c.real(),   c.object(), c.object(),
                                   c.object(), c.object(), c.object(), c.object(), c.object(),
                                   c.object(), c.object(), c.object(), c.small(),  c.real(),
                                   c.object(), c.object(), c.object(), c.object(), c.object(),
                                   c.object(), c.object(), c.object(), c.object(), c.small()};
    Qkv(pool, arguments).run(c.small());
  } else if (name == "Attention") {
    const Attention::Arguments arguments{c.object(), c.object(), c.object(), c.object(),
                                         c.object(), c.object(), c.small(),  c.object(),
                                         c.object(), c.object(), c.small()};
    Attention(pool, arguments).run(c.small());
  } else if (name == "AttentionStates") {
    const std::vector<PyObject*> queries = c.objects();
    const AttentionStates::Arguments arguments{c.object(),  c.object(),  c.object(), c.object(),
                                               c.object(),  c.small(),   c.object(), c.integer(),
                                               c.integer(), c.integer(), c.object()};
    AttentionStates(pool, queries, arguments).run(c.small());
  } else if (name == "MergeStates") {
    const std::vector<PyObject*> sources = c.objects();
    const std::vector<int64_t> nodes = c.integers();
    const MergeStates::Arguments arguments{c.object(), c.integer(), c.integer(), c.small(),
                                           c.object(), c.object(),  c.small()};
    MergeStates(pool, sources, nodes, arguments).run(c.small());
  } else if (name == "RowLinear") {
    RowLinear op{pool, c.object(), c.object(), c.integer(), c.object(), c.object(), c.object()};
    op.run(c.small());
  } else if (name == "Reduce") {
    Reduce op{pool, c.objects(), c.integers(), c.object(), c.object(), c.object(), c.integer()};
    op.run(c.small());
  } else if (name == "GateUp") {
    const GateUp::Arguments arguments{c.object(),  c.object(), c.real(),   c.object(), c.object(),
                                      c.integer(), c.object(), c.object(), c.object(), c.object(),
                                      c.object(),  c.object(), c.small()};
    GateUp(pool, arguments).run(c.small());
  } else if (name == "Head") {
    const Head::Arguments arguments{c.object(), c.object(),  c.object(), c.real(),
                                    c.object(), c.integer(), c.object(), c.object(),
                                    c.object(), c.object(),  c.object(), c.small()};
    Head(pool, arguments).run(c.small());
  } else if (name == "Digest") {
    Digest op{pool, c.objects(), c.integers(), c.integers(), c.object(), c.object()};
    op.run(c.small());
  } else if (name == "DigestKv") {
    const DigestKv::Arguments arguments{c.object(),  c.object(),  c.object(),  c.object(),
                                        c.object(),  c.integer(), c.integer(), c.integer(),
                                        c.integer(), c.object(),  c.object()};
    DigestKv(pool, arguments).run(c.small());
  } else if (name == "digest_panels") {
    DigestPanels op{pool, c.object(), c.object(), c.integer(), c.object()};
    op.run();
  } else {
    throw std::runtime_error("there is no op '" + name + "'");
  }
  return {0, 0.0f};
}

void answer(Output& output, const Call& call, const Best& best) {
  output.number(static_cast<int64_t>(best.index));
  output.number(best.value);
  uint64_t num_written = 0;
  for (const PyObject& array : call.arrays) num_written += array.written ? 1 : 0;
  output.number(num_written);
  uint64_t index = 0;
  for (const PyObject& array : call.arrays) {
    if (array.written) {
      output.number(index);
      output.number(static_cast<uint64_t>(array.num_bytes));
      output.write(array.memory, static_cast<size_t>(array.num_bytes));
    }
    ++index;
  }
}

void flush_subnormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" : : "r"(control | 1u << 24));
#endif
}

bool flushes() {
  volatile float tiny = 0x1p-140f;
  volatile float half = 0.5f;
  volatile float result = tiny * half;
  return result == 0.0f;
}

int play(const char* calls, const char* answers, const std::string& body, int threads, bool flush) {
  Input input(calls);
  Output output(answers);
  Pool pool(threads, body, false);
  if (flush) flush_subnormals();
  if (flushes() != flush) throw std::runtime_error("this CPU cannot be made to flush subnormals");
  for (size_t rest = input.count(); rest > 0; --rest) {
    Call call(input);
    const Best best = run(call, pool);
    if (flushes() != flush) {
      throw std::runtime_error(call.name + " did not restore the caller's float environment");
    }
    answer(output, call, best);
  }
  output.close();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool flush = argc == 6 && std::strcmp(argv[5], "flush") == 0;
  if (argc != 5 && !flush) {
    std::cerr << "usage: driver CALLS ANSWERS BODY THREADS [flush]\n";
    return 2;
  }
  try {
    return play(argv[1], argv[2], argv[3], std::atoi(argv[4]), flush);
  } catch (const std::exception& error) {
    std::cerr << "driver: " << error.what() << "\n";
    return 1;
  }
}
