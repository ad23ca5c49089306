#include "same_products.h"

#include <cstring>
#include <vector>

namespace tokenspeed_cpu {
namespace {

constexpr int64_t kTokens = 35;   // two tiles, and some that fill none
constexpr int64_t kColumns = 512;  // two super-blocks
constexpr int64_t kGroupBlocks = 4;

// Numbers that are the same everywhere, and as good as random (xorshift).
struct Numbers {
  uint32_t state = 2463534242u;
  uint32_t next() {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
  }
};

// Scales of a sane size from `from` on: floats of 16 bits (also as bfloat16), or of 32.
void fill_halves(Numbers& numbers, uint8_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t half = static_cast<uint16_t>(0x2800u | (numbers.next() & 0x83FFu));
    std::memcpy(to + 2 * i, &half, 2);
  }
}

void fill_floats(Numbers& numbers, uint8_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(static_cast<int32_t>(numbers.next() % 2001) - 1000) * 1e-5f;
    std::memcpy(to + 4 * i, &value, 4);
  }
}

std::vector<uint8_t> panel_of(Panel format, Numbers& numbers) {
  const int64_t blocks = kColumns / kBlockColumns;
  const int64_t group = group_bytes(Scale::kHalf, kGroupBlocks);
  const int64_t bytes = format == Panel::kInt4 ? blocks / kGroupBlocks * group : panel_bytes(format, kColumns);
  std::vector<uint8_t> panel(static_cast<size_t>(bytes));
  for (uint8_t& byte : panel) byte = static_cast<uint8_t>(numbers.next() >> 7);
  const auto each = [&](int64_t step, int64_t at, auto fill, int64_t count) {
    for (int64_t start = 0; start < bytes; start += step) fill(numbers, panel.data() + start + at, count);
  };
  switch (format) {
    case Panel::kQ4_0: each(288, 256, fill_halves, 16); break;
    case Panel::kQ4_1: each(320, 256, fill_halves, 32); break;
    case Panel::kQ8_0: each(544, 512, fill_halves, 16); break;
    case Panel::kQ4_K: each(2368, 0, fill_halves, 32); break;
    case Panel::kQ6_K:
      for (uint8_t& byte : panel) byte &= 63;
      each(640, 512, fill_floats, 32);
      break;
    case Panel::kInt4: each(group, 0, fill_halves, 16); break;
  }
  return panel;
}

}  // namespace

bool same_products(const QuantizedTable& one, const QuantizedTable& other) {
  constexpr int64_t kBlocks = kColumns / kBlockColumns;
  Numbers numbers;
  std::vector<float> numbers_in(kTokens * kColumns);
  for (float& x : numbers_in) x = static_cast<float>(static_cast<int32_t>(numbers.next() % 20001) - 10000) * 1e-3f;
  std::vector<int8_t> values(kTokens * kColumns);
  std::vector<float> scale(kTokens * kBlocks), sum(kTokens * kBlocks);
  std::vector<int32_t> half_sum(kTokens * kBlocks * 2);
  const Activations x{values.data(), scale.data(), sum.data(), half_sum.data(), kColumns};
  for (int64_t token = 0; token < kTokens; ++token) other.quantize(numbers_in.data() + token * kColumns, false, x, token);
  for (int format = 0; format < 6; ++format) {
    const std::vector<uint8_t> panel = panel_of(static_cast<Panel>(format), numbers);
    std::vector<float> sums[2];
    for (int side = 0; side < 2; ++side) {
      sums[side].assign(kTokens * kPanelRows, 0.0f);
      const TileArgs args{panel.data(), 0, kBlocks, kGroupBlocks, Scale::kHalf, x, nullptr, 0, 0, kTokens, sums[side].data()};
      (side == 0 ? one : other).multiply[format](args);
    }
    if (std::memcmp(sums[0].data(), sums[1].data(), sums[0].size() * sizeof(float)) != 0) return false;
  }
  return true;
}

}  // namespace tokenspeed_cpu
