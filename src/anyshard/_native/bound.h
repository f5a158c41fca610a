// A call of a step, bound once to its arrays: all that a walk (walk.h) knows of what it runs.
#pragma once

namespace anyshard {

constexpr int kGoOn = -2;  // beside what a wait ends with (shm.h)
constexpr int kVoid = -3;  // nobody waits for the rows any more

class Bound {
 public:
  Bound() = default;
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;
  virtual ~Bound() = default;
  // kGoOn, or what a wait ended with that the caller has to deal with before the next call.
  virtual int go(int rows) = 0;
};

// One that computes.
class Op : public Bound {
 public:
  virtual void run(int rows) = 0;
  int go(int rows) final {
    run(rows);
    return kGoOn;
  }
};

}  // namespace anyshard
