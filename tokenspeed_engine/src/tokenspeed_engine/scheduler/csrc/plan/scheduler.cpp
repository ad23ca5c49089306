// Construction, submission, abort, the way back of pages, and what can be asked from outside.
#include "scheduler.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "../fsm/dispatch.h"
#include "../invariant.h"
#include "must_dispatch.h"

namespace tokenspeed {

namespace {
std::string at_least(const char* name, std::int64_t least, std::int64_t got) {
  return std::string(name) + ": expected at least " + std::to_string(least) + ", got " + std::to_string(got);
}
}  // namespace

std::string SchedulerConfig::problem() const {
  if (num_pages < 1) return at_least("num_pages", 1, num_pages) + ". Fix: give the pool more memory";
  if (page_size < 1) return at_least("page_size", 1, page_size);
  if (max_num_seqs < 1) return at_least("max_num_seqs", 1, max_num_seqs);
  if (max_model_len < 1) return at_least("max_model_len", 1, max_model_len);
  if (max_num_batched_tokens < max_num_seqs) {
    return at_least("max_num_batched_tokens", max_num_seqs, max_num_batched_tokens) +
           ": each running request needs one token in a step. Fix: raise max_num_batched_tokens or lower max_num_seqs (" +
           std::to_string(max_num_seqs) + ")";
  }
  if (chunk_size < 0) return at_least("chunk_size", 0, chunk_size) + ". 0 means as many tokens as the budget allows";
  if (max_in_flight_steps < 1) return at_least("max_in_flight_steps", 1, max_in_flight_steps);
  if (max_in_flight_steps > 64) return "max_in_flight_steps: expected at most 64, got " + std::to_string(max_in_flight_steps);
  if (max_step_cost < 0) return at_least("max_step_cost", 0, max_step_cost) + ". 0 means no bound";
  if (session_ttl_us < 0) return at_least("session_ttl_us", 0, session_ttl_us) + ". 0 means that sessions keep nothing";
  if (inter_token_latency_us < 0) return at_least("inter_token_latency_us", 0, inter_token_latency_us) + ". 0 means no target";
  if (starvation_limit < 1) return at_least("starvation_limit", 1, starvation_limit);
  if (num_host_pages < 0) return at_least("num_host_pages", 0, num_host_pages) + ". 0 means that there is no host tier";
  if (num_host_pages > 0 && !enable_prefix_cache) {
    return "num_host_pages: expected 0 without a prefix cache, got " + std::to_string(num_host_pages) +
           ". Fix: enable the prefix cache, or leave the host tier out";
  }
  if (host_write_through && num_host_pages == 0) return "host_write_through: expected a host tier. Fix: set num_host_pages";
  if (external_store && num_host_pages == 0) return "external_store: expected a host tier. Fix: set num_host_pages";
  if (kv_event_pages < 0) return at_least("kv_event_pages", 0, kv_event_pages) + ". 0 means no events";
  constexpr std::int64_t most_ns = 1'000'000'000'000;
  if (load_page_ns < 0 || prefill_token_ns < 0 || load_page_ns > most_ns || prefill_token_ns > most_ns) {
    return "load_page_ns and prefill_token_ns: expected 0 to " + std::to_string(most_ns);
  }
  if (context_cost_scale < 0) return at_least("context_cost_scale", 0, context_cost_scale) + ". 0 means that context is free";
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max() / 4;
  if (max_model_len > most || page_size > most || max_num_batched_tokens > most || max_step_cost > most || context_cost_scale > most) {
    return "max_model_len, page_size, max_num_batched_tokens, max_step_cost and context_cost_scale: expected at most " +
           std::to_string(most);
  }
  return {};
}

namespace {
const SchedulerConfig& checked(const SchedulerConfig& config) {
  if (const std::string problem = config.problem(); !problem.empty()) {
    throw std::invalid_argument("SchedulerConfig." + problem);
  }
  return config;
}
}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(checked(config)),
      max_pages_per_request_(config.max_pages_per_request()),
      allocator_(config.num_pages),
      rows_(config.max_num_seqs),
      queue_(config.starvation_limit),
      budget_(config),
      commits_{CommitBuffers(config), CommitBuffers(config)} {
  if (config_.num_host_pages > 0) host_allocator_.emplace(config_.num_host_pages);
  if (config_.kv_event_pages > 0) kv_events_.emplace(static_cast<std::size_t>(config_.kv_event_pages));
  if (config_.enable_prefix_cache) {
    tree_.emplace(allocator_, config_.page_size,
                  RadixTreeOptions{host_allocator_ ? &*host_allocator_ : nullptr, kv_events_ ? &*kv_events_ : nullptr,
                                   config_.external_store, config_.adaptive_eviction});
  }
  running_.reserve(static_cast<std::size_t>(config_.max_num_seqs));
  page_table_.assign(static_cast<std::size_t>(config_.max_num_seqs) * static_cast<std::size_t>(max_pages_per_request_), -1);
  // At least two, so that the views of a plan stay valid until the plan after the next.
  for (std::int32_t i = 0; i < std::max(2, config_.max_in_flight_steps); ++i) {
    ring_.push_back(std::make_shared<StepBuffers>(config_));
  }
  counters_.num_pages = config_.num_pages;
}

SubmitStatus Scheduler::submit(std::int64_t request_id, std::span<const TokenId> prompt, std::int64_t max_new_tokens,
                               std::span<const TokenId> stop_token_ids, std::int64_t min_new_tokens, bool use_prefix_cache,
                               const RequestOptions& options) {
  if (prompt.empty()) return SubmitStatus::kEmpty;
  if (max_new_tokens < 1 || min_new_tokens < 0) return SubmitStatus::kInvalidLength;
  if (std::any_of(prompt.begin(), prompt.end(), [](TokenId token) { return token < 0; })) return SubmitStatus::kInvalidToken;
  const auto num_prompt = static_cast<std::int64_t>(prompt.size());
  // Compared without adding, so that huge numbers cannot wrap around.
  if (num_prompt > config_.max_model_len || max_new_tokens > config_.max_model_len - num_prompt) return SubmitStatus::kTooLong;
  // The last token is sampled but never computed.
  if (pages_for(static_cast<std::int32_t>(num_prompt + max_new_tokens - 1)) > config_.num_pages) return SubmitStatus::kNeverFits;
  const auto [entry, added] = requests_.try_emplace(request_id);
  if (!added) return SubmitStatus::kDuplicate;

  entry->second = std::make_unique<Request>();
  Request& request = *entry->second;
  request.id = request_id;
  request.arrival = next_arrival_++;
  request.num_prompt = static_cast<std::int32_t>(num_prompt);
  request.max_new_tokens = static_cast<std::int32_t>(max_new_tokens);
  request.min_new_tokens = static_cast<std::int32_t>(std::min(min_new_tokens, max_new_tokens));
  request.use_prefix_cache = use_prefix_cache;
  request.options = options;
  request.stop_token_ids.assign(stop_token_ids.begin(), stop_token_ids.end());
  request.tokens = SequenceTokens(prompt, prompt.size() + static_cast<std::size_t>(max_new_tokens), request.arrival);
  request.has_live_deadline = options.deadline_us >= 0;
  queue_.join(request);
  if (options.role == Role::kLocal) {
    move_to(request, Place::kWaiting);
  } else {
    request.awaits_remote = true;
    request.state = Bootstrapping{};
    move_to(request, Place::kOutside);
  }
  ++counters_.num_submitted;
  return SubmitStatus::kOk;
}

void Scheduler::advance_clock(std::int64_t now_us) {
  if (now_us < now_us_) {
    throw std::invalid_argument("scheduler.advance_clock: expected at least " + std::to_string(now_us_) + " us, the time before, got " +
                                std::to_string(now_us) + ". Fix: use one monotonic clock, that of rank 0");
  }
  now_us_ = now_us;
  if (tree_) tree_->advance_clock(now_us);
  if (sessions_.size() > 0) {
    if (tree_) tree_->tick();
    sessions_.expire(now_us);
  }
}

AbortStatus Scheduler::abort(std::int64_t request_id) {
  const auto entry = requests_.find(request_id);
  if (entry == requests_.end()) return AbortStatus::kNotFound;
  Request& request = *entry->second;
  if (dispatch(request.state, Abort{})) return AbortStatus::kAlreadyEnded;  // draining or aborting: an error value, no more
  ++counters_.num_aborted;
  if (tree_) tree_->tick();
  end(request);
  return AbortStatus::kOk;
}

// Takes a request from one place to another, and with it what is counted there. The only function that does.
void Scheduler::move_to(Request& request, Place place) {
  const auto runs = [](Place p) { return p == Place::kPrefilling || p == Place::kDecoding; };
  const auto waits = [](Place p) { return p == Place::kWaiting || p == Place::kRetracting; };
  const auto drains = [](Place p) { return p == Place::kRetracting || p == Place::kDraining; };
  const Place from = std::exchange(request.place, place);
  if (place != Place::kPrefilling && !std::holds_alternative<LoadingBack>(request.state)) forget_promise(request);
  if (from == Place::kPrefilling) --num_prefilling_;
  if (place == Place::kPrefilling) ++num_prefilling_;
  if (runs(from) && !runs(place)) {
    WaitingQueue::charge(request);
    leave_running(request);
  }
  if (waits(from) && !waits(place)) {
    // From the queue to a row is service, whoever computes its prompt; what else leaves the queue has ended.
    from == Place::kWaiting && (runs(place) || place == Place::kOutside) ? queue_.admit(request) : queue_.remove(request);
  }
  if (!waits(from) && waits(place)) queue_.push(request);
  if (!runs(from) && runs(place)) enter_running(request);
  num_draining_ += (drains(place) ? 1 : 0) - (drains(from) ? 1 : 0);
  num_outside_ += (place == Place::kOutside ? 1 : 0) - (from == Place::kOutside ? 1 : 0);
}

void Scheduler::enter_running(Request& request) {
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &request, ranks_before), &request);
}

void Scheduler::leave_running(Request& request) {
  const auto place = std::lower_bound(running_.begin(), running_.end(), &request, ranks_before);
  TOKENSPEED_INVARIANT(place != running_.end() && *place == &request);
  running_.erase(place);
}

void Scheduler::forget(Request& request) {
  queue_.leave(request);
  requests_.erase(request.id);
}

void Scheduler::forget_promise(Request& request) {
  promised_pages_ -= request.promised_pages;
  request.promised_pages = 0;
}

// The state says that the request is over: it is forgotten now, or once nothing in flight touches its pages.
void Scheduler::end(Request& request) {
  if (std::holds_alternative<Finished>(request.state)) {
    move_to(request, Place::kNowhere);
    forget(request);
    return;
  }
  move_to(request, request.in_flight_transfers > 0 ? Place::kOutside : Place::kDraining);
  drain_when_idle(request);
}

void Scheduler::drain_when_idle(Request& request) {
  if (request.in_flight_steps == 0 && request.in_flight_transfers == 0) drain(request);
}

// Nothing in flight touches the request's pages any more: they go back, and with them its row.
void Scheduler::drain(Request& request) {
  TOKENSPEED_INVARIANT(request.in_flight_steps == 0 && request.in_flight_transfers == 0);
  if (write_back_retracted(request)) return;
  std::fill_n(table_row(request.row), request.num_table_pages, -1);
  // Its row may get another request before the next plan, and one plan must not set an entry twice: devices apply updates in any order.
  std::erase_if(pending_updates_, [&](const PageUpdate& update) { return update.row == request.row; });
  const bool stays = request.is_kept && tree_ && request.options.session != 0 && config_.session_ttl_us > 0;
  const std::int32_t num_kept_pages = request.num_shared_pages;
  if (stays) {
    if (host_allocator_) note_write_back(tree_->begin_offload(held_kv(request.state)->prefix, pairs_));
    must_dispatch(request, Park{});
  } else {
    must_dispatch(request, Drained{});
  }
  request.row = -1;
  request.num_table_pages = 0;
  request.num_shared_pages = 0;
  request.num_planned = 0;
  request.num_committed = 0;
  ++num_releases_;
  if (std::holds_alternative<Retracted>(request.state)) {
    move_to(request, Place::kWaiting);
    return;
  }
  move_to(request, Place::kNowhere);
  queue_.leave(request);
  const auto entry = requests_.find(request.id);
  if (stays) {
    // At most half of the pool: the rest is for what runs, and one request alone gets the whole of it.
    sessions_.park(std::move(entry->second), num_kept_pages, now_us_ + config_.session_ttl_us, config_.num_pages / 2);
  }
  requests_.erase(entry);
}

bool Scheduler::end_session(std::int64_t session) {
  if (!tree_) return sessions_.resume(session);
  tree_->tick();
  return sessions_.end(session, *tree_);
}

std::int32_t Scheduler::available_pages() const noexcept {
  return allocator_.num_free() + (tree_ ? tree_->num_evictable_pages() : 0);
}

void Scheduler::set_table(Request& request, std::int32_t index, PageId page) {
  table_row(request.row)[index] = page;
  pending_updates_.push_back({request.row, index, page});
}

std::vector<KvEvent> Scheduler::take_kv_events() { return kv_events_ ? kv_events_->drain() : std::vector<KvEvent>(); }

std::int32_t Scheduler::flush_cache() {
  if (!tree_) return 0;
  tree_->tick();
  sessions_.give_up_all();
  const std::int32_t flushed = tree_->flush();
  counters_.num_evicted_pages += flushed;
  flushes_again_ = tree_->num_transfers() > 0;
  return flushed;
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = counters_;
  stats.free_pages = allocator_.num_free();
  stats.cached_pages = tree_ ? tree_->num_pages() : 0;
  stats.evictable_pages = tree_ ? tree_->num_evictable_pages() : 0;
  stats.owned_pages = stats.num_pages - stats.free_pages - stats.cached_pages;
  stats.num_waiting = static_cast<std::int32_t>(queue_.size());
  stats.num_running = static_cast<std::int32_t>(running_.size());
  stats.num_draining = num_draining_;
  stats.num_outside = num_outside_;
  stats.num_sessions = sessions_.size();
  stats.num_host_pages = config_.num_host_pages;
  stats.host_cached_pages = tree_ ? tree_->num_host_pages() : 0;
  stats.num_transfers = tree_ ? tree_->num_transfers() : 0;
  stats.num_in_flight_steps = static_cast<std::int32_t>(next_step_ - oldest_open_step_);
  stats.num_steps = next_step_;
  return stats;
}

OwnerSnapshot Scheduler::owners() const {
  const auto num_pages = static_cast<std::size_t>(config_.num_pages);
  OwnerSnapshot snapshot{std::vector<std::int8_t>(num_pages, OwnerSnapshot::kNobody), std::vector<std::int64_t>(num_pages, -1),
                         std::vector<std::int32_t>(num_pages, 0)};
  const auto note = [&](std::span<const PageId> pages, OwnerSnapshot::Kind kind, std::int64_t request_id) {
    for (const PageId page : pages) {
      const auto index = static_cast<std::size_t>(page);
      snapshot.kind[index] = kind;
      snapshot.request_id[index] = request_id;
      ++snapshot.num_owners[index];
    }
  };
  note(allocator_.free_pages(), OwnerSnapshot::kFree, -1);
  if (tree_) tree_->for_each_node([&](const auto& node) { note(node.pages.ids(), OwnerSnapshot::kCache, -1); });
  for (const auto& [id, request] : requests_) {
    if (const KvHold* kv = held_kv(request->state)) note(kv->pages.ids(), OwnerSnapshot::kRequest, id);
  }
  return snapshot;
}

}  // namespace tokenspeed
