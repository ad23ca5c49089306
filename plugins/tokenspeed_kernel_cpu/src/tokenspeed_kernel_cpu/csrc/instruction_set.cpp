// Which of the compiled tables the processor can run, asked of cpuid.
#include "binding.h"

namespace tokenspeed_cpu {
namespace {

std::vector<const KernelTable*> tables() {
  __builtin_cpu_init();
  std::vector<const KernelTable*> found;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return found;
  found.insert(found.begin(), &kAvx2);
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq")) {
    return found;
  }
  found.insert(found.begin(), &kAvx512);
  if (__builtin_cpu_supports("avx512vnni")) found.insert(found.begin(), &kAvx512Vnni);
  return found;
}

const KernelTable* first_of(const std::vector<const KernelTable*>& found) { return found.empty() ? nullptr : found.front(); }

const KernelTable* active = first_of(tables());

}  // namespace

const KernelTable& table() {
  if (active == nullptr) throw std::runtime_error("tokenspeed_kernel_cpu: this processor lacks AVX2, FMA or F16C");
  return *active;
}

std::string instruction_set() { return active == nullptr ? "" : active->name; }

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const KernelTable* one : tables()) names.emplace_back(one->name);
  return names;
}

void use_instruction_set(const std::string& name) {
  std::string known;
  for (const KernelTable* one : tables()) {
    if (name == one->name) {
      active = one;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(one->name);
  }
  throw std::invalid_argument("expected one of " + (known.empty() ? "none" : known) + ", got " + name);
}

}  // namespace tokenspeed_cpu
