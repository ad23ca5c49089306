// What must hold between any two calls, found by walking everything: for tests and fuzzing.
#include <algorithm>
#include <vector>

#include "../invariant.h"
#include "scheduler.h"

namespace tokenspeed {

void Scheduler::check() const {
  if (tree_) tree_->check();
  const OwnerSnapshot pages = owners();
  for (const std::int32_t count : pages.num_owners) TOKENSPEED_INVARIANT(count == 1);

  std::int32_t num_running = 0, num_prefilling = 0, num_waiting = 0, num_draining = 0, num_outside = 0, promised = 0, num_rows = 0;
  std::vector<PageId> held;
  for (const auto& [id, request] : requests_) {
    TOKENSPEED_INVARIANT(request->id == id);
    const Place place = request->place;
    num_running += place == Place::kPrefilling || place == Place::kDecoding;
    num_prefilling += place == Place::kPrefilling;
    num_waiting += place == Place::kWaiting || place == Place::kRetracting;
    num_draining += place == Place::kDraining || place == Place::kRetracting;
    num_outside += place == Place::kOutside;
    promised += request->promised_pages;
    TOKENSPEED_INVARIANT(request->promised_pages >= 0 && request->in_flight_steps >= 0 && request->in_flight_transfers >= 0);
    TOKENSPEED_INVARIANT(request->is_prefilling() == (place == Place::kPrefilling));
    TOKENSPEED_INVARIANT(request->is_decoding() == (place == Place::kDecoding));
    TOKENSPEED_INVARIANT(request->is_retracting() == (place == Place::kRetracting));
    const KvHold* kv = held_kv(request->state);
    TOKENSPEED_INVARIANT((kv != nullptr) == (request->row >= 0));
    if (kv == nullptr) {
      TOKENSPEED_INVARIANT(request->in_flight_steps == 0 && request->in_flight_transfers == 0);
      continue;
    }
    // Its entries of the page table are the pages of its prefix, then its own.
    ++num_rows;
    held.clear();
    if (tree_) kv->prefix.append_path_pages(held);
    TOKENSPEED_INVARIANT(static_cast<std::int32_t>(held.size()) == request->num_shared_pages);
    const std::span<const PageId> own = kv->pages.ids();
    held.insert(held.end(), own.begin(), own.end());
    const std::span<const PageId> entries = pages_of(id);
    TOKENSPEED_INVARIANT(std::equal(held.begin(), held.end(), entries.begin(), entries.end()));
    TOKENSPEED_INVARIANT(request->num_committed <= request->num_planned);
    TOKENSPEED_INVARIANT(request->num_planned <= request->num_table_pages * config_.page_size);
  }
  TOKENSPEED_INVARIANT(num_running == static_cast<std::int32_t>(running_.size()));
  TOKENSPEED_INVARIANT(num_waiting == stats().num_waiting);
  TOKENSPEED_INVARIANT(num_prefilling == num_prefilling_ && num_draining == num_draining_ && num_outside == num_outside_);
  TOKENSPEED_INVARIANT(promised == promised_pages_);
  TOKENSPEED_INVARIANT(num_rows == config_.max_num_seqs - rows_.num_free());
}

}  // namespace tokenspeed
