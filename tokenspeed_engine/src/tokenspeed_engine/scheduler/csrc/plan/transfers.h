// Copies of pages between the device and the host that a plan asks for, and how they are named.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "../cache/transfer.h"

namespace tokenspeed {

// A request whose pages another engine may write from now on, but for those of its first `num_cached_tokens`.
struct RemotePrefill {
  std::int64_t request_id;
  std::int64_t num_cached_tokens;
};
static_assert(sizeof(RemotePrefill) == 2 * sizeof(std::int64_t));

// Pages of one direction. Pairs with the same id are one transfer: they stand together, and end together.
struct PageCopies {
  std::vector<PagePair> pairs;
  std::vector<std::int64_t> ids;  // [pairs.size()] ascending

  void push(std::int64_t id, std::int32_t from, std::int32_t to) {
    pairs.push_back({from, to});
    ids.push_back(id);
  }
  bool empty() const noexcept { return pairs.empty(); }
};

// What is to be started before the step that was planned with it. Never changed once it is here; null pointers stand for nothing.
struct Transfers {
  std::shared_ptr<const PageCopies> write_backs;  // device page to host page
  std::shared_ptr<const PageCopies> load_backs;   // host page to device page
  std::shared_ptr<const std::vector<RemotePrefill>> remote_prefills;
};

}  // namespace tokenspeed
