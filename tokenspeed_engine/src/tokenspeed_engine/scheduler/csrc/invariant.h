// Checks of our own invariants: always on, and never a user's mistake.
#pragma once

#include <stdexcept>
#include <string>

namespace tokenspeed {

// A bug in the control plane itself. It reaches Python as RuntimeError and ends the engine core: going on could corrupt a request.
class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// The caller used the interface wrongly (a step that is not in flight, a plan too many). State is unchanged.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void invariant_failed(const char* condition, const char* file, int line) {
  throw InvariantError(std::string("scheduler invariant broken: ") + condition + " at " + file + ":" + std::to_string(line));
}

}  // namespace tokenspeed

#define TOKENSPEED_INVARIANT(condition)                                       \
  do {                                                                        \
    if (!(condition)) [[unlikely]]                                            \
      ::tokenspeed::invariant_failed(#condition, __FILE__, __LINE__);         \
  } while (false)
