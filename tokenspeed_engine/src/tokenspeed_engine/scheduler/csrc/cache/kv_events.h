// What the prefix cache tells the outside: which pages each tier gained and lost, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "block_hash.h"
#include "token.h"

namespace tokenspeed {

enum class Tier : std::int8_t { kDevice = 0, kHost = 1 };

enum class KvEventKind : std::int8_t {
  kStored = 0,   // the tier has these pages now
  kRemoved = 1,  // the tier has them no more
  kCleared = 2,  // no tier has anything
};

struct KvEvent {
  KvEventKind kind = KvEventKind::kCleared;
  Tier tier = Tier::kDevice;
  std::string salt;
  std::vector<BlockHash> hashes;  // one for each page, in the order of the sequence
  BlockHash parent{};             // stored: the hash before the first of them; that of the root for the start of a sequence
  std::vector<TokenId> tokens;    // stored: of these pages
};

// Events wait here until they are drained. Bounded: when nobody drains, all that waited is replaced by "cleared", after which a consumer
// believes too little is cached and never too much.
class KvEventBuffer {
 public:
  explicit KvEventBuffer(std::size_t max_pages) : max_pages_(max_pages) {}

  void push(KvEvent&& event) {
    num_pages_ += event.hashes.size();
    events_.push_back(std::move(event));
    if (num_pages_ <= max_pages_ && events_.size() <= max_pages_) return;
    num_lost_ += events_.size();
    events_.clear();
    events_.emplace_back();
    num_pages_ = 0;
  }

  std::vector<KvEvent> drain() noexcept {
    num_pages_ = 0;
    return std::exchange(events_, {});
  }

  bool empty() const noexcept { return events_.empty(); }
  std::size_t num_lost() const noexcept { return num_lost_; }

 private:
  std::size_t max_pages_;
  std::size_t num_pages_ = 0;
  std::size_t num_lost_ = 0;
  std::vector<KvEvent> events_;
};

}  // namespace tokenspeed
