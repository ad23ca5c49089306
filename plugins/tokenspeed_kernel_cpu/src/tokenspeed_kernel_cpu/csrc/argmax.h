// The place of a row's largest number; see `tokenspeed_kernel.ops.sampling.argmax` for the contract.
#pragma once

#include "round.h"

namespace {

using namespace tokenspeed_cpu;

// The first of equal ones; -1 where the row holds a NaN or its maximum is infinite.
int32_t argmax(const float* row, int64_t count) {
  constexpr int64_t kAtOnce = 512;  // whose maximum decides whether they are looked at a second time
  float top = -__builtin_inff();
  int64_t start = 0;
  Ints largest = bits_of(splat(0.0f));
  for (int64_t i = 0; i < count; i += kAtOnce) {
    const int64_t some = count - i < kAtOnce ? count - i : kAtOnce, whole = some & ~(kWidth - 1);
    Vec most = splat(top);
    for (int64_t j = 0; j < whole; j += kWidth) {
      const Vec x = load(row + i + j);
      most = maximum(most, x);
      largest = largest_bits(largest, bits_of(magnitude(x)));  // as integers, in which NaN is the largest
    }
    float here = maximum_of(most);
    for (int64_t j = whole; j < some; ++j) {
      if (row[i + j] != row[i + j]) return -1;
      if (row[i + j] > here) here = row[i + j];
    }
    if (here > top) {
      top = here;
      start = i;
    }
  }
  // Where there is a NaN, `top` is anything.
  if (largest_of(largest) > 0x7F800000u || __builtin_isinf(top)) return -1;
  while (row[start] != top) ++start;
  return static_cast<int32_t>(start);
}

}  // namespace
