#include "lifetime.h"

#include <algorithm>
#include <cstdlib>
#include <tuple>

namespace tokenspeed {

namespace {
constexpr std::int64_t kWindow = 16;  // the latest 16 outputs carry most of the weight
}

void LengthEstimate::observe(std::int32_t length) {
  const std::int64_t value = static_cast<std::int64_t>(length) << kFractionBits;
  // The first ones count alike, so that the mean of few outputs is their mean.
  const std::int64_t weight = std::min(++num_observed_, kWindow);
  if (num_observed_ > 1) deviation_ += (std::abs(value - mean_) - deviation_) / weight;
  mean_ += (value - mean_) / weight;
}

std::int32_t LengthEstimate::expected() const noexcept {
  return static_cast<std::int32_t>(std::min<std::int64_t>((mean_ + deviation_) >> kFractionBits, INT32_MAX));
}

std::int32_t LengthEstimate::remaining(std::int32_t num_sampled, std::int32_t most) const noexcept {
  const std::int64_t left = std::max((mean_ + deviation_) - (static_cast<std::int64_t>(num_sampled) << kFractionBits), deviation_);
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(left >> kFractionBits, 1, most));
}

// Just before the k-th of the lives ends, those before it have given back what they hold, and it and those after it have grown.
std::int64_t PoolForecast::peak_pages(std::int32_t page_size) {
  std::sort(lives_.begin(), lives_.end(), [](const Life& a, const Life& b) {
    return std::tie(a.remaining_tokens, a.room_tokens, a.held_pages) < std::tie(b.remaining_tokens, b.room_tokens, b.held_pages);
  });
  std::int64_t room = 0;
  for (const Life& life : lives_) room += life.room_tokens;
  std::int64_t peak = 0;
  std::int64_t given_back = 0;
  auto num_alive = static_cast<std::int64_t>(lives_.size());
  for (const Life& life : lives_) {
    // A sum of roundings up, at most one page each above the exact sum; a life whose room is not used up yet counts as 0 or less.
    const std::int64_t tokens = num_alive * (static_cast<std::int64_t>(life.remaining_tokens) + page_size - 1) - room;
    peak = std::max(peak, std::max<std::int64_t>(tokens, 0) / page_size - given_back);
    given_back += life.held_pages;
    room -= life.room_tokens;
    --num_alive;
  }
  return peak;
}

}  // namespace tokenspeed
