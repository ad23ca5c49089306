#include "return_times.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>

namespace tokenspeed {

namespace {
constexpr int kFirstBit = 10;            // all below 2^10 us is the first class
constexpr std::int64_t kLeast = 32;      // returns and losses before the order is trusted
constexpr std::int64_t kFitEvery = 8;    // a fit costs about 10 us
constexpr std::int64_t kFadeEvery = 512; // then all counts lose a third: the order follows a load that changes
constexpr double kFade = 2.0 / 3.0;
}  // namespace

ReturnTimes::ReturnTimes() {
  for (int i = 0; i < kNumClasses; ++i) {
    order_[static_cast<std::size_t>(i)] = kNumClasses - 1 - i;  // longest idle first
    rank_[static_cast<std::size_t>(i)] = kNumClasses - 1 - i;
  }
}

int ReturnTimes::class_of(std::int64_t idle_us) noexcept {
  if (idle_us < std::int64_t{1} << kFirstBit) return 0;
  const auto value = static_cast<std::uint64_t>(idle_us);
  const int bit = std::bit_width(value) - 1;
  const auto quarter = static_cast<int>((value >> (bit - 2)) & 3);
  return std::min(4 * (bit - kFirstBit) + quarter + 1, kNumClasses - 1);
}

std::int64_t ReturnTimes::shortest_us(int idle_class) noexcept {
  if (idle_class <= 0) return 0;
  if (idle_class >= kNumClasses) return std::numeric_limits<std::int64_t>::max();
  const int quarters = idle_class - 1;
  return static_cast<std::int64_t>(4 + quarters % 4) << (quarters / 4 + kFirstBit - 2);
}

void ReturnTimes::note(Counts& counts, std::int64_t idle_us) {
  counts[static_cast<std::size_t>(class_of(idle_us))] += 1;
  ++num_noted_;
  if (num_noted_ >= kLeast && num_noted_ % kFitEvery == 0) fit();
  if (num_noted_ % kFadeEvery == 0) {
    for (Counts* all : {&returned_, &given_up_}) {
      for (double& count : *all) count *= kFade;
    }
  }
}

void ReturnTimes::fit() {
  constexpr auto n = static_cast<std::size_t>(kNumClasses);
  std::array<double, n> chance{};  // of a return in the class, for what has been idle until then
  double at_risk = 0;
  for (std::size_t i = n; i-- > 0;) {
    at_risk += returned_[i] + given_up_[i];
    const double seen = at_risk - given_up_[i] / 2;  // those given up were at risk for half of the class
    chance[i] = returned_[i] / (seen + 0.5);         // a little less than what was seen: nothing is certain
  }
  std::array<double, n> worth{};
  for (std::size_t age = 0; age < n; ++age) {
    double left = 1, wanted = 0, held_us = 0;
    for (std::size_t i = age; i + 1 < n; ++i) {
      const double returns = left * chance[i];
      wanted += returns;
      held_us += (left - returns / 2) * static_cast<double>(shortest_us(static_cast<int>(i) + 1) - shortest_us(static_cast<int>(i)));
      left -= returns;
      worth[age] = std::max(worth[age], wanted / held_us);
    }
  }
  // Of what is worth the same, the longest idle goes first.
  for (std::size_t i = 0; i < n; ++i) order_[i] = kNumClasses - 1 - static_cast<int>(i);
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int a, int b) { return worth[static_cast<std::size_t>(a)] < worth[static_cast<std::size_t>(b)]; });
  for (std::size_t i = 0; i < n; ++i) rank_[static_cast<std::size_t>(order_[i])] = static_cast<int>(i);
  is_known_ = true;
}

}  // namespace tokenspeed
