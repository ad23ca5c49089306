#include "sessions.h"

#include <variant>

#include "../fsm/dispatch.h"
#include "../invariant.h"

namespace tokenspeed {

void SessionTable::park(std::unique_ptr<Request> request, std::int32_t num_pages, std::int64_t expires_us, std::int32_t most_pages) {
  TOKENSPEED_INVARIANT(std::holds_alternative<Paused>(request->state));
  const std::int64_t session = request->options.session;
  resume(session);
  request->tokens = SequenceTokens();  // the prefix cache knows them
  const std::uint64_t number = next_number_++;
  on_device_.by_number.emplace(number, session);
  on_device_.num_pages += num_pages;
  by_expiry_.emplace(expires_us, session);
  by_session_.emplace(session, Entry{std::move(request), &on_device_, num_pages, expires_us, number});
  while (on_device_.num_pages > most_pages) give_up_oldest(on_device_);
}

bool SessionTable::resume(std::int64_t session) {
  const auto entry = by_session_.find(session);
  if (entry == by_session_.end()) return false;
  const auto error = dispatch(entry->second.request->state, Resume{});
  TOKENSPEED_INVARIANT(!error);
  forget(entry);
  return true;
}

bool SessionTable::end(std::int64_t session, RadixTree& tree) {
  const auto entry = by_session_.find(session);
  if (entry == by_session_.end()) return false;
  Paused& held = std::get<Paused>(entry->second.request->state);
  if (held.prefix.empty()) {
    tree.retire(std::move(held.kept));
  } else {
    tree.retire(std::move(held.prefix));
  }
  return resume(session);
}

std::int32_t SessionTable::expire(std::int64_t now_us) {
  std::int32_t count = 0;
  while (!by_expiry_.empty() && by_expiry_.begin()->first <= now_us) {
    const auto entry = by_session_.find(by_expiry_.begin()->second);
    const auto error = dispatch(entry->second.request->state, Expire{});
    TOKENSPEED_INVARIANT(!error);
    forget(entry);
    ++count;
  }
  return count;
}

bool SessionTable::move_oldest_to_host(RadixTree& tree, std::int32_t most_pages) {
  for (const auto& [number, session] : on_device_.by_number) {
    Entry& entry = by_session_.at(session);
    KeepRef kept = tree.keep(std::get<Paused>(entry.request->state).prefix);
    if (kept.empty()) continue;  // still on its way there, or without room
    const auto error = dispatch(entry.request->state, Offload{std::move(kept)});
    TOKENSPEED_INVARIANT(!error);
    on_device_.num_pages -= entry.num_pages;
    on_host_.num_pages += entry.num_pages;
    on_host_.by_number.emplace(number, session);
    entry.pinned = &on_host_;
    on_device_.by_number.erase(number);  // the end of the references above
    while (on_host_.num_pages > most_pages) give_up_oldest(on_host_);
    return true;
  }
  return false;
}

bool SessionTable::give_up_oldest_on_device() { return give_up_oldest(on_device_); }

void SessionTable::give_up_all() {
  while (give_up_oldest(on_device_) || give_up_oldest(on_host_)) {
  }
}

bool SessionTable::give_up_oldest(Pinned& pinned) {
  if (pinned.by_number.empty()) return false;
  const auto entry = by_session_.find(pinned.by_number.begin()->second);
  const auto error = dispatch(entry->second.request->state, Expire{});
  TOKENSPEED_INVARIANT(!error);
  forget(entry);
  return true;
}

void SessionTable::forget(Entries::iterator entry) {
  Pinned& pinned = *entry->second.pinned;
  pinned.num_pages -= entry->second.num_pages;
  pinned.by_number.erase(entry->second.number);
  by_expiry_.erase({entry->second.expires_us, entry->first});
  by_session_.erase(entry);
}

}  // namespace tokenspeed
