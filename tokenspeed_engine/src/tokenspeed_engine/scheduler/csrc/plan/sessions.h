// Conversations between two turns: what their last request computed, kept for the next one while a tool runs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "request.h"

namespace tokenspeed {

// Owns the last request of each session, in state Paused. Time is that of Scheduler::advance_clock; ties go by the order of parking.
class SessionTable {
 public:
  // Keeps `request`, whose prefix has `num_pages`, until `expires_us`. What was kept for the session before is released, and the
  // oldest others as long as all together keep more than `most_pages`.
  void park(std::unique_ptr<Request> request, std::int32_t num_pages, std::int64_t expires_us, std::int32_t most_pages);
  // The next turn is here: releases what was kept. False when nothing was.
  bool resume(std::int64_t session);
  // There will be no next turn: releases what was kept, and lets its pages go before all others. False when nothing was kept.
  bool end(std::int64_t session, RadixTree& tree);
  // Releases all that is due at `now_us`. Returns how many.
  std::int32_t expire(std::int64_t now_us);
  // Of the sessions whose pages have copies on the host, lets the one that was parked first keep those alone. False when there is none.
  // All together keep at most `most_pages` there; the oldest go beyond that.
  bool move_oldest_to_host(RadixTree& tree, std::int32_t most_pages);
  // Releases the one that was parked first, of those that hold device pages. False when there is none.
  bool give_up_oldest_on_device();
  void give_up_all();

  std::int32_t size() const noexcept { return static_cast<std::int32_t>(by_session_.size()); }

 private:
  // Pages that sessions keep in one tier, and the order in which they were parked.
  struct Pinned {
    std::map<std::uint64_t, std::int64_t> by_number;  // number to session
    std::int64_t num_pages = 0;                       // a page that two of them share counts twice
  };
  struct Entry {
    std::unique_ptr<Request> request;
    Pinned* pinned;
    std::int32_t num_pages;
    std::int64_t expires_us;
    std::uint64_t number;  // order of parking
  };
  using Entries = std::map<std::int64_t, Entry>;
  bool give_up_oldest(Pinned& pinned);
  void forget(Entries::iterator entry);

  Entries by_session_;
  Pinned on_device_;
  Pinned on_host_;
  std::set<std::pair<std::int64_t, std::int64_t>> by_expiry_;  // (expires_us, session)
  std::uint64_t next_number_ = 0;
};

}  // namespace tokenspeed
