// Which of the compiled tables the processor can run, asked of cpuid.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "binding.h"
#include "same_products.h"

namespace tokenspeed_cpu {
namespace {

// Tiles need the processor's word, the system's (it saves their state: bits 17 and 18 of XCR0), and its permission for this process.
bool may_use_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c >> 27 & 1) == 0) return false;  // OSXSAVE
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return false;  // AMX-TILE and AMX-INT8
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low >> 17 & 3) != 3) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

std::vector<const KernelTable*> find_tables() {
  __builtin_cpu_init();
  std::vector<const KernelTable*> found;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return found;
  found.insert(found.begin(), &kAvx2);
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq")) {
    return found;
  }
  found.insert(found.begin(), &kAvx512);
  if (!__builtin_cpu_supports("avx512vnni")) return found;
  found.insert(found.begin(), &kAvx512Vnni);
  // Few machines have tiles, and each kind of them may differ: they are taken only where they show here that they compute the same.
  if (may_use_tiles() && same_products(kAmx.quantized, kAvx512Vnni.quantized)) found.insert(found.begin(), &kAmx);
  return found;
}

const std::vector<const KernelTable*>& tables() {
  static const std::vector<const KernelTable*> found = find_tables();
  return found;
}

const KernelTable* active = tables().empty() ? nullptr : tables().front();

const KernelTable& named(const std::string& name) {
  std::string known;
  for (const KernelTable* one : tables()) {
    if (name == one->name) return *one;
    known += (known.empty() ? "" : ", ") + std::string(one->name);
  }
  throw std::invalid_argument("expected one of " + (known.empty() ? "none" : known) + ", got " + name);
}

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

bool give_same_products(const std::string& one, const std::string& other) {
  return same_products(named(one).quantized, named(other).quantized);
}

void use_instruction_set(const std::string& name) { active = &named(name); }

}  // namespace tokenspeed_cpu
