// The smallest test frame that does: TEST registers a function, CHECK fails it, main runs all.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace check {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::vector<std::pair<std::string, std::function<void()>>>& tests() {
  static std::vector<std::pair<std::string, std::function<void()>>> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { tests().emplace_back(name, run); }
};

template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream message;
  message << file << ":" << line << ": " << text << ": got " << a << " and " << b;
  throw Failure(message.str());
}

inline void holds(bool value, const char* text, const char* file, int line) {
  if (!value) throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + text);
}

template <class Exception, class F>
void throws(F f, const char* text, const char* file, int line) {
  try {
    f();
  } catch (const Exception&) {
    return;
  }
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": did not throw: " + text);
}

}  // namespace check

#define TEST(name)                                          \
  static void name();                                       \
  static const check::Registration name##_registration(#name, name); \
  static void name()
#define CHECK(condition) check::holds(static_cast<bool>(condition), #condition, __FILE__, __LINE__)
#define CHECK_EQ(a, b) check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_THROWS(exception, expression) \
  check::throws<exception>([&] { (void)(expression); }, #expression, __FILE__, __LINE__)
