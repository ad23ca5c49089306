// When cached pages are wanted again, learnt from what happened: what an eviction order closer to Belady's is made from.
#pragma once

#include <array>
#include <cstdint>

namespace tokenspeed {

// Idle times in classes of growing width, and what each is worth: the best rate at which a page that has been idle that long may yet be
// wanted again, over any time that one might go on holding it (the Gittins index of the page, with the survival curve of Kaplan and
// Meier, for which an eviction is an end that was not seen). Where short absences are the rule, this is least recently used first;
// where sessions return after about the same time, those that have just left go first. Until enough is known, it is the former.
//
// Determinism: a function of the calls alone; sums, products and quotients of doubles, in one order.
// Sources: J. C. Gittins, "Bandit processes and dynamic allocation indices" (1979); E. L. Kaplan, P. Meier (1958).
class ReturnTimes {
 public:
  static constexpr int kNumClasses = 104;  // four to each doubling, from about 1 ms to about 19 hours

  ReturnTimes();

  // Pages were wanted again, or given up, after this long.
  void returned(std::int64_t idle_us) { note(returned_, idle_us); }
  void given_up(std::int64_t idle_us) { note(given_up_, idle_us); }

  static int class_of(std::int64_t idle_us) noexcept;
  // The shortest idle time of a class; of one past the last: the longest there is.
  static std::int64_t shortest_us(int idle_class) noexcept;

  bool is_known() const noexcept { return is_known_; }
  // Classes in the order in which they go, and the place of a class in it.
  const std::array<int, kNumClasses>& order() const noexcept { return order_; }
  int rank(int idle_class) const noexcept { return rank_[static_cast<std::size_t>(idle_class)]; }

 private:
  using Counts = std::array<double, kNumClasses>;
  void note(Counts& counts, std::int64_t idle_us);
  void fit();

  Counts returned_{}, given_up_{};
  std::array<int, kNumClasses> order_, rank_;
  std::int64_t num_noted_ = 0;
  bool is_known_ = false;
};

}  // namespace tokenspeed
