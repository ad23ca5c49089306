#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "plan/lifetime.h"

using namespace tokenspeed;

TEST(the_expected_length_follows_what_was_seen) {
  LengthEstimate estimate;
  CHECK(!estimate.is_known());
  estimate.observe(100);
  CHECK_EQ(estimate.expected(), 100);
  for (int i = 0; i < 50; ++i) estimate.observe(i % 2 == 0 ? 80 : 120);
  CHECK(estimate.expected() >= 115 && estimate.expected() <= 130);  // mean 100, mean distance 20
  for (int i = 0; i < 100; ++i) estimate.observe(1000);
  CHECK(estimate.expected() >= 990 && estimate.expected() <= 1010);
}

TEST(what_remains_is_between_one_and_what_may_come) {
  LengthEstimate estimate;
  for (int i = 0; i < 40; ++i) estimate.observe(i % 2 == 0 ? 80 : 120);
  CHECK(estimate.remaining(0, 1000) > 100);
  CHECK_EQ(estimate.remaining(0, 7), 7);
  CHECK(estimate.remaining(110, 1000) >= 8 && estimate.remaining(110, 1000) <= 24);
  CHECK(estimate.remaining(5000, 1000) >= 15);  // longer than expected: it may go on for as long as lengths differ
  LengthEstimate exact;
  exact.observe(10);
  CHECK_EQ(exact.remaining(10, 50), 1);
}

// Against a simulation, token by token.
TEST(the_peak_is_never_below_the_truth_and_at_most_a_page_each_above) {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    const std::int32_t page_size = 1 + static_cast<std::int32_t>(random() % 16);
    std::vector<PoolForecast::Life> lives;
    for (std::uint32_t i = 0; i < 1 + random() % 12; ++i) {
      lives.push_back({1 + static_cast<std::int32_t>(random() % 100), static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(page_size)),
                       static_cast<std::int32_t>(random() % 20)});
    }
    std::int64_t truth = 0;
    for (std::int32_t now = 1; now <= 100; ++now) {
      std::int64_t needed = 0;
      for (const auto& life : lives) {
        if (life.remaining_tokens < now) {
          needed -= life.held_pages;
        } else {
          needed += (std::max(now - life.room_tokens, 0) + page_size - 1) / page_size;
        }
      }
      truth = std::max(truth, needed);
    }
    PoolForecast forecast;
    for (const auto& life : lives) forecast.add(life);
    const std::int64_t peak = forecast.peak_pages(page_size);
    CHECK(peak >= truth);
    CHECK(peak <= truth + static_cast<std::int64_t>(lives.size()));
  }
}
