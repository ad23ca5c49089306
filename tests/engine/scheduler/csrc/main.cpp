#include "check.h"

int main() {
  int failures = 0;
  for (const auto& [name, run] : check::tests()) {
    try {
      run();
      std::printf("ok   %s\n", name.c_str());
    } catch (const std::exception& error) {
      ++failures;
      std::printf("FAIL %s: %s\n", name.c_str(), error.what());
    }
  }
  std::printf("%zu tests, %d failed\n", check::tests().size(), failures);
  return failures == 0 && !check::tests().empty() ? 0 : 1;
}
