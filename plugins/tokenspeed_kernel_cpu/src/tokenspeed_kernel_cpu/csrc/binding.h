// What the files of the binding share: the instruction set in use, and addresses that come as integers.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace tokenspeed_cpu {

// The kernels in use; raises where the processor has none of the instruction sets.
const KernelTable& table();
// Its name; empty where there is none.
std::string instruction_set();
// Those that the processor has, best first.
std::vector<std::string> instruction_sets();
// Whether two of them give the same bits for products of every panel format, on made-up numbers.
bool give_same_products(const std::string& one, const std::string& other);
// Use another one, for tests.
void use_instruction_set(const std::string& name);

// A tensor on the meta device has a shape and no memory.
inline void need_memory(uintptr_t address, int64_t elements) {
  if (address == 0 && elements > 0) {
    throw std::invalid_argument("tokenspeed_kernel_cpu: a tensor has no memory (device meta): pass solution=\"cpu\"");
  }
}

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_attention(nanobind::module_& m);
void bind_linear(nanobind::module_& m);

}  // namespace tokenspeed_cpu
