// Prefill and decode on two engines: what the transport between them tells.
//
// The transport of a decode engine may write a request's pages from the plan that names it in remote_prefills until it says
// RemotePrefillDone or Failed; that of a prefill engine may read them from the commit of the prompt's last chunk until it says Succeeded
// or Failed. Between the two no page goes back, whatever else happens to the request: an abort only marks it.
#include "must_dispatch.h"
#include "scheduler.h"

namespace tokenspeed {

EventStatus Scheduler::bootstrapped(std::int64_t request_id) {
  const auto entry = requests_.find(request_id);
  if (entry == requests_.end()) return EventStatus::kNotFound;
  if (dispatch(entry->second->state, Bootstrapped{})) return EventStatus::kUnexpected;
  move_to(*entry->second, Place::kWaiting);
  return EventStatus::kOk;
}

EventStatus Scheduler::remote_prefill_done(std::int64_t request_id, TokenId first_token) {
  const auto entry = requests_.find(request_id);
  if (entry == requests_.end()) return EventStatus::kNotFound;
  Request& request = *entry->second;
  if (request.options.role != Role::kDecode || request.in_flight_transfers == 0 || first_token < 0) return EventStatus::kUnexpected;
  if (tree_) tree_->tick();
  request.awaits_remote = false;
  if (std::holds_alternative<Aborting>(request.state)) {  // the pages waited for this; the token is nobody's
    end_transfer(request);
    return EventStatus::kOk;
  }
  must_dispatch(request, RemotePrefillDone{});
  --request.in_flight_transfers;
  move_to(request, Place::kDecoding);
  request.num_planned = request.num_prompt;
  request.num_committed = request.num_prompt;
  request.num_computed_high_water = request.num_prompt;
  const std::int32_t index = request.num_sampled();
  request.tokens.append(first_token);
  publish_full_pages(request);
  if (finish_reason(request, first_token, index) == FinishReason::kRunning) return EventStatus::kOk;
  ++counters_.num_finished;
  request.is_kept = true;
  must_dispatch(request, Finish{});
  end(request);
  return EventStatus::kFinished;
}

EventStatus Scheduler::transfer_succeeded(std::int64_t request_id) {
  const auto entry = requests_.find(request_id);
  if (entry == requests_.end()) return EventStatus::kNotFound;
  Request& request = *entry->second;
  if (request.options.role != Role::kPrefill || request.in_flight_transfers == 0) return EventStatus::kUnexpected;
  if (tree_) tree_->tick();
  request.awaits_remote = false;
  if (std::holds_alternative<PrefillDone>(request.state)) {
    must_dispatch(request, Succeeded{});
    ++counters_.num_finished;
    request.is_kept = true;
  }
  end_transfer(request);
  return EventStatus::kFinished;
}

EventStatus Scheduler::transfer_failed(std::int64_t request_id) {
  const auto entry = requests_.find(request_id);
  if (entry == requests_.end()) return EventStatus::kNotFound;
  Request& request = *entry->second;
  if (!request.awaits_remote) return EventStatus::kUnexpected;
  if (std::holds_alternative<Aborting>(request.state) && request.in_flight_transfers == 0) return EventStatus::kUnexpected;
  if (tree_) tree_->tick();
  request.awaits_remote = false;
  if (!std::holds_alternative<Aborting>(request.state)) {
    must_dispatch(request, Failed{});
    ++counters_.num_failed;
  }
  if (request.in_flight_transfers > 0) {
    end_transfer(request);
  } else {
    end(request);
  }
  return EventStatus::kFinished;
}

// The transport will not touch the request's pages any more; the request is over.
void Scheduler::end_transfer(Request& request) {
  --request.in_flight_transfers;
  end(request);
}

std::span<const PageId> Scheduler::pages_of(std::int64_t request_id) const {
  const auto entry = requests_.find(request_id);
  if (entry == requests_.end() || entry->second->row < 0) return {};
  const std::size_t first = static_cast<std::size_t>(entry->second->row) * static_cast<std::size_t>(max_pages_per_request_);
  return std::span(page_table_).subspan(first, static_cast<std::size_t>(entry->second->num_table_pages));
}

}  // namespace tokenspeed
