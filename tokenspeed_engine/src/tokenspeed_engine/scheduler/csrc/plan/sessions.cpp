#include "sessions.h"

#include "../fsm/dispatch.h"
#include "../invariant.h"

namespace tokenspeed {

void SessionTable::park(std::unique_ptr<Request> request, std::int32_t num_pages, std::int64_t expires_us, std::int32_t most_pages) {
  TOKENSPEED_INVARIANT(std::holds_alternative<Paused>(request->state));
  const std::int64_t session = request->options.session;
  resume(session);
  request->tokens = SequenceTokens();  // the prefix cache knows them
  const std::uint64_t number = next_number_++;
  by_number_.emplace(number, session);
  by_expiry_.emplace(expires_us, number);
  by_session_.emplace(session, Entry{std::move(request), num_pages, expires_us, number});
  num_pages_ += num_pages;
  while (num_pages_ > most_pages) give_up_oldest();
}

bool SessionTable::resume(std::int64_t session) {
  const auto entry = by_session_.find(session);
  if (entry == by_session_.end()) return false;
  TOKENSPEED_INVARIANT(!dispatch(entry->second.request->state, Resume{}));
  forget(entry);
  return true;
}

std::int32_t SessionTable::expire(std::int64_t now_us) {
  std::int32_t count = 0;
  while (!by_expiry_.empty() && by_expiry_.begin()->first <= now_us) {
    const auto entry = by_session_.find(by_number_.at(by_expiry_.begin()->second));
    TOKENSPEED_INVARIANT(!dispatch(entry->second.request->state, Expire{}));
    forget(entry);
    ++count;
  }
  return count;
}

bool SessionTable::give_up_oldest() {
  if (by_number_.empty()) return false;
  const auto entry = by_session_.find(by_number_.begin()->second);
  TOKENSPEED_INVARIANT(!dispatch(entry->second.request->state, Expire{}));
  forget(entry);
  return true;
}

void SessionTable::forget(Entries::iterator entry) {
  num_pages_ -= entry->second.num_pages;
  by_number_.erase(entry->second.number);
  by_expiry_.erase({entry->second.expires_us, entry->second.number});
  by_session_.erase(entry);
}

}  // namespace tokenspeed
