// Who gets a row and pages, and who gives them back: admission, pre-emption for a better priority, retraction for want of pages.
//
// All of it happens before the rows of a step are written, so that nobody who has a row in it loses its pages. The exception is a
// prompt that makes room for one before it: those behind have no row yet.
//
// Nothing here can go round in circles. The first of running_ (who was passed over too often, then the best priority, then the first
// to arrive) is never retracted for pages, one request alone always fits (submit refuses what does not), and only a better priority
// pre-empts; so the first gets on until it ends, and then the next is the first. Pre-emption of one request ends, too: each one passes
// it over, and after starvation_limit of them it is due, and stays.
#include <algorithm>
#include <limits>
#include <utility>

#include "../invariant.h"
#include "must_dispatch.h"
#include "scheduler.h"

namespace tokenspeed {

namespace {
constexpr std::int32_t kForecastsInStep = 4;  // each sorts the running requests
constexpr std::int32_t kAnyPriority = std::numeric_limits<std::int32_t>::min();
}  // namespace

// Pages that are missing now to hold all of the request's known tokens and the next one, beside what admitted prompts still need and
// one page for each running decode. 0 or less: it fits.
std::int32_t Scheduler::missing_pages(const Request& request) const {
  const std::int32_t num_known = request.num_known();
  const std::int32_t needed = pages_for(std::min(num_known + 1, request.most_cached_tokens()));
  // Running decodes may each want a page soon; with nobody running, the rule must not keep the last request out.
  const std::int32_t reserve =
      running_.empty() ? 0 : promised_pages_ + static_cast<std::int32_t>(running_.size()) - num_prefilling_;
  const std::int32_t missing = needed + reserve - available_pages();
  // A cheap bound first: at best all pages that are locked now are shared.
  if (!tree_ || missing <= 0 || missing > tree_->num_locked_pages()) return missing;
  const PrefixProbe hit = tree_->probe(request.tokens.span(), max_hit_pages(request), request.options.salt);
  return missing - hit.num_locked_pages - (is_worth_loading(request, hit) ? hit.num_loading_pages : 0);
}

// The last known token is always computed: its logits are what the request waits for.
std::int32_t Scheduler::max_hit_pages(const Request& request) const {
  return request.use_prefix_cache ? (request.num_known() - 1) / config_.page_size : 0;
}

// Whether the pool is expected to hold what runs and this request until some of them end. `spare_pages` are left beside its prompt.
bool Scheduler::pool_outlasts(const Request& request, std::int32_t spare_pages) {
  if (running_.empty() || !output_length_.is_known()) return true;
  // Those of a worse priority give way when pages run out.
  if (!running_.back()->is_due && running_.back()->options.priority > request.options.priority) return true;
  const auto growth = static_cast<std::int64_t>(pages_for(longest_expected_) + 1);
  if (spare_pages >= growth * static_cast<std::int64_t>(running_.size() + 1)) return true;
  if (refused_request_ == request.id && refused_at_ == num_releases_) return false;
  if (num_forecasts_++ >= kForecastsInStep) return false;
  forecast_.clear();
  for (const Request* running : running_) {
    const std::int32_t room = running->num_table_pages * config_.page_size - running->num_planned;
    forecast_.add({expected_tokens(*running), std::clamp(room, 0, config_.page_size - 1), pages_back_from(*running)});
  }
  forecast_.add({expected_tokens(request), config_.page_size - 1, 0});
  if (forecast_.peak_pages(config_.page_size) <= spare_pages) return true;
  refused_request_ = request.id;
  refused_at_ = num_releases_;
  return false;
}

std::int32_t Scheduler::expected_tokens(const Request& request) const {
  const LengthEstimate& own = request.account->output_length;
  const std::int32_t most = std::max(request.max_new_tokens - request.num_sampled(), 1);
  return (own.is_known() ? own : output_length_).remaining(request.num_sampled(), most);
}

// Gives the request a row, its cached prefix and the promise of pages for the rest, or leaves it in the queue.
bool Scheduler::admit(Request& request) {
  if (request.is_retracting()) return false;  // a step in flight still writes its old pages
  std::int32_t missing = missing_pages(request);
  while (missing > 0) {
    if (!release_sessions(true)) return false;
    missing = missing_pages(request);
  }
  if (!pool_outlasts(request, -missing + static_cast<std::int32_t>(running_.size()) - num_prefilling_)) return false;

  NodeRef prefix;
  bool loads = false;
  std::int32_t num_device_pages = 0;
  if (tree_) prefix = take_prefix(request, max_hit_pages(request), loads, num_device_pages);
  if (request.options.session != 0) sessions_.resume(request.options.session);
  path_pages_.clear();
  prefix.append_path_pages(path_pages_);
  const auto hit_pages = static_cast<std::int32_t>(path_pages_.size());
  const std::int32_t hit_tokens = hit_pages * config_.page_size;
  RowLease row = rows_.lease();
  request.row = row.row();
  KvHold kv{std::move(row), std::move(prefix), OwnedPages(allocator_)};
  const bool is_remote = request.options.role == Role::kDecode && request.awaits_remote;
  if (is_remote || loads) {
    must_dispatch(request, Load{std::move(kv)});
  } else {
    must_dispatch(request, Admit{std::move(kv)});
  }
  for (std::int32_t index = 0; index < hit_pages; ++index) set_table(request, index, path_pages_[static_cast<std::size_t>(index)]);
  request.num_table_pages = hit_pages;
  request.num_shared_pages = hit_pages;
  request.num_hit_pages = hit_pages;
  request.num_charged = std::max(request.num_charged, hit_tokens);
  request.num_planned = hit_tokens;
  request.num_committed = hit_tokens;
  if (!request.admitted_before) {
    request.admitted_before = true;
    request.num_cached_tokens = hit_tokens;
    request.num_host_cached_tokens = (hit_pages - num_device_pages) * config_.page_size;
    if (tree_ && request.use_prefix_cache) {
      counters_.prefix_query_tokens += request.num_prompt;
      counters_.prefix_hit_tokens += hit_tokens;
      counters_.prefix_host_hit_tokens += request.num_host_cached_tokens;
    }
  }
  if (is_remote) {
    move_to(request, Place::kOutside);
    const std::int32_t wanted = pages_for(request.num_known()) - hit_pages;
    const std::int32_t taken = take_pages(request, wanted);
    TOKENSPEED_INVARIANT(taken == wanted);
    ++request.in_flight_transfers;
    remote_prefills_.push_back({request.id, hit_tokens});
    return true;
  }
  move_to(request, loads ? Place::kOutside : Place::kPrefilling);
  if (loads) loading_.push_back(request.id);
  request.promised_pages = pages_for(std::min(request.num_known() + 1, request.most_cached_tokens())) - hit_pages;
  promised_pages_ += request.promised_pages;
  return true;
}

// The next to serve may take the place of one of a worse priority, when it lacks a row, or pages that such requests hold. One row in a
// plan: those that wait behind it may find no room for their prompts in this step, and an empty row serves nobody.
void Scheduler::preempt_for_priority() {
  const Request* next = queue_.empty() ? nullptr : queue_.front(now_us_);
  if (next == nullptr || next->is_retracting()) return;
  // What comes back from ended requests is theirs without that.
  while (num_draining_ == 0 && !running_.empty() && !running_.back()->is_due &&
         running_.back()->options.priority > next->options.priority) {
    const bool lacks_row = rows_.num_free() == 0;
    if (!lacks_row) {
      std::int32_t missing = missing_pages(*next);
      if (missing <= 0) return;
      for (const Request* running : running_) {
        if (!running->is_due && running->options.priority > next->options.priority) missing -= pages_back_from(*running);
      }
      if (missing > 0) return;  // it would not fit even so: let them run
    }
    Request* victim = cheapest_victim(next->options.priority, !lacks_row);
    if (victim == nullptr) return;
    ++counters_.num_preemptions;
    retract(*victim);
  }
}

// Pages for the decodes of this step: what is free, then cached pages that nobody uses, then those kept for sessions, then those of a
// victim. Where pages are on their way back, the last rows wait a step instead: better late than computed twice.
void Scheduler::make_room_for_decodes() {
  if (available_pages() >= static_cast<std::int32_t>(running_.size())) return;
  for (;;) {
    const auto needed = std::count_if(running_.begin(), running_.end(), [&](const Request* request) { return wants_page(*request); });
    if (needed <= available_pages() || num_draining_ > 0) return;
    if (num_writing_pages_ > 0) return;  // locked until they have a copy on the host
    if (release_sessions(false)) continue;
    Request* victim = cheapest_victim(kAnyPriority, true);
    if (victim == nullptr) {  // one alone always fits, but for pages that a transfer in flight holds and will give back
      TOKENSPEED_INVARIANT(waits_for_transfer());
      return;
    }
    ++counters_.num_retractions;
    retract(*victim);
  }
}

// Of the running requests with a priority worse than `worse_than`, the first of all excepted, the one to retract: of the worst
// priority, and there the one that gives back most for what it costs. What it gives are its pages for as long as it would have held
// them; what it costs are the tokens to compute again. Without want of pages only the cost counts. Null when there is none.
Request* Scheduler::cheapest_victim(std::int32_t worse_than, bool for_pages) const {
  __extension__ using Wide = __int128;
  Request* best = nullptr;
  Wide best_gain = 0;
  Wide best_cost = 1;
  const std::size_t least = for_pages && worse_than == kAnyPriority ? 1 : 0;
  for (std::size_t i = running_.size(); i > least; --i) {
    Request& request = *running_[i - 1];
    if (worse_than != kAnyPriority && (request.is_due || request.options.priority <= worse_than)) break;
    if (best != nullptr && best_gain > 0 &&
        (best->options.priority != request.options.priority || best->is_due != request.is_due)) {
      break;
    }
    const Wide gain = for_pages ? static_cast<Wide>(pages_back_from(request)) * expected_tokens(request) : 1;
    const Wide cost = std::max(request.num_planned - request.num_hit_pages * config_.page_size, 0) + 1;
    if (best == nullptr || gain * best_cost > best_gain * cost) {  // of equals, the one that arrived last
      best = &request;
      best_gain = gain;
      best_cost = cost;
    }
  }
  return best;
}

// Pages that come back when the request gives way: those that it did not find in the cache. Cached since, they can be evicted.
std::int32_t Scheduler::pages_back_from(const Request& request) const { return request.num_table_pages - request.num_hit_pages; }

void Scheduler::retract(Request& victim) {
  must_dispatch(victim, Retract{});
  if (victim.num_sampled() + victim.in_flight_samples > 0) victim.has_live_deadline = false;  // its first token has met or missed it
  move_to(victim, Place::kRetracting);
  drain_when_idle(victim);
}

}  // namespace tokenspeed
