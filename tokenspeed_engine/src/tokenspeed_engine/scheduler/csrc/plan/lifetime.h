// How long requests will live, and what the pool must hold until then.
//
// The length of an output is not known before its end, but a tenant's outputs resemble each other: the mean of the lengths that were
// seen, plus their mean distance from it, is what a new one is expected to reach. From that, and from when each running request is
// expected to give its pages back, follows the most that will be needed at any time to come. A request is admitted when the pool holds
// that: late enough that the pool is used, early enough that requests need not be retracted, which would compute their tokens twice.
//
// An expectation is no promise. Where requests live longer, retraction makes room, and nothing depends on the expectation being right.
#pragma once

#include <cstdint>
#include <vector>

namespace tokenspeed {

class LengthEstimate {
 public:
  void observe(std::int32_t length);
  bool is_known() const noexcept { return num_observed_ > 0; }
  // Tokens that an output of this kind is expected to reach.
  std::int32_t expected() const noexcept;
  // Tokens still to come of an output that has `num_sampled`, at least 1 and at most `most` (at least 1). Past the expected length,
  // what was seen says no more than how far lengths differ.
  std::int32_t remaining(std::int32_t num_sampled, std::int32_t most) const noexcept;

 private:
  static constexpr int kFractionBits = 8;
  std::int64_t num_observed_ = 0;
  std::int64_t mean_ = 0;       // in 1/256 tokens
  std::int64_t deviation_ = 0;  // in 1/256 tokens
};

// The most pages that are needed at once, beyond those held now.
class PoolForecast {
 public:
  struct Life {
    std::int32_t remaining_tokens;  // until it ends
    std::int32_t room_tokens;       // that its pages hold beyond what is in them
    std::int32_t held_pages;        // that come back at its end
  };
  void clear() noexcept { lives_.clear(); }
  void add(const Life& life) { lives_.push_back(life); }
  // Reorders the lives. At most one page for each of them above the exact number.
  std::int64_t peak_pages(std::int32_t page_size);

 private:
  std::vector<Life> lives_;
};

}  // namespace tokenspeed
