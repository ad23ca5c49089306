// 16-bit floats, one at a time, without any instruction that a processor may lack.
#pragma once

#include <cstdint>
#include <cstring>

namespace tokenspeed_cpu {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float float_of_bf16(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

inline float float_of_half(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, rest = bits & 0x7FFFu;
  if (rest >= 0x7C00u) return float_of_bits(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
  if (rest >= 0x400u) return float_of_bits(sign | ((rest << 13) + (112u << 23)));
  const float small = static_cast<float>(rest) * 0x1p-24f;  // subnormal: exact
  return sign ? -small : small;
}

// Nearest, ties to even; NaN stays NaN.
inline uint16_t bf16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

}  // namespace tokenspeed_cpu
