// plan(): which tokens run in the next step, and on which pages.
//
// Decodes first: each running stream gets its token. The rest of the budget goes to prefill chunks, first come, first served, and
// then to admissions in order of arrival. Nobody overtakes the head of the queue, so nobody starves. Where a step's cost is bounded,
// chunks shrink as their context grows, so that a step late in a long prompt takes no longer than one at its start.
//
// Pages for a decode come from the free list, then from cached pages that nobody uses, then from the running request that arrived
// last, which goes back to the head of the queue. The request that arrived first is never the victim while another runs, and one
// request alone always fits (submit refuses what does not): so the oldest always gets on, and there is no livelock.
#include <algorithm>
#include <limits>

#include "../invariant.h"
#include "must_dispatch.h"
#include "scheduler.h"

namespace tokenspeed {

std::shared_ptr<const StepBuffers> Scheduler::plan() {
  if (next_step_ - oldest_open_step_ >= config_.max_in_flight_steps) {
    throw UsageError("scheduler.plan: expected fewer than " + std::to_string(config_.max_in_flight_steps) +
                     " steps in flight, got " + std::to_string(next_step_ - oldest_open_step_) + ". Fix: commit step " +
                     std::to_string(oldest_open_step_) + " first, or raise max_in_flight_steps");
  }
  if (is_paused_) return nullptr;
  if (tree_) tree_->tick();
  const std::shared_ptr<StepBuffers>& out = ring_[static_cast<std::size_t>(next_step_) % ring_.size()];
  out->clear();
  plan_decodes(*out);
  prefill_cost_left_ = prefill_allowance(*out);
  plan_prefills(*out);
  // Whoever was retracted just now is the first of the queue and needs more than it gave: it is not admitted again here.
  plan_admissions(*out);
  if (out->num_requests == 0) {
    // The oldest request can always run unless a step or a transfer in flight holds its token or pages that it waits for.
    TOKENSPEED_INVARIANT(requests_.empty() || next_step_ > oldest_open_step_ || num_outside_ > 0);
    return nullptr;
  }
  out->step = next_step_++;
  out->cu_query_lens[static_cast<std::size_t>(out->num_requests)] = out->num_tokens;
  if (!pending_updates_.empty()) {
    out->page_updates = std::make_shared<const std::vector<PageUpdate>>(pending_updates_);
    pending_updates_.clear();
  } else if (!out->page_updates->empty()) {
    out->page_updates = std::make_shared<const std::vector<PageUpdate>>();
  }
  return out;
}

void Scheduler::plan_decodes(StepBuffers& out) {
  // Retraction shortens running_ from the end, never before the request at hand.
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Request& request = *running_[i];
    if (!request.is_decoding()) continue;
    if (request.num_sampled() + request.in_flight_samples >= request.max_new_tokens) continue;  // its last token is in flight
    if (request.num_planned == request.num_table_pages * config_.page_size && !grow_for_decode(request)) continue;
    plan_row(out, request, 1);
  }
  out.num_decodes = out.num_requests;
}

// One more page for a decode. False when the request must wait for a commit, or was itself retracted.
bool Scheduler::grow_for_decode(Request& request) {
  while (take_pages(request, 1) == 0) {
    if (num_draining_ > 0) return false;  // pages are on their way back: better one step late than to recompute a request
    const bool is_latest = running_.back() == &request;
    if (is_latest && running_.size() == 1) {
      TOKENSPEED_INVARIANT(num_outside_ > 0);  // a transfer in flight holds the pages, and will give them back
      return false;
    }
    retract_latest();
    if (is_latest) return false;
  }
  return true;
}

// What `num_tokens` cost after `first` others, in units of 1 / cost_unit_ so that all is whole numbers.
std::int64_t Scheduler::cost_of(std::int64_t first, std::int64_t num_tokens) const {
  if (config_.context_cost_scale == 0) return num_tokens;
  return num_tokens * (2 * static_cast<std::int64_t>(config_.context_cost_scale) + 2 * first + num_tokens - 1);
}

std::int64_t Scheduler::prefill_allowance(const StepBuffers& decodes) const {
  if (config_.max_step_cost == 0) return std::numeric_limits<std::int64_t>::max();
  const std::int64_t unit = config_.context_cost_scale == 0 ? 1 : 2 * static_cast<std::int64_t>(config_.context_cost_scale);
  const std::int64_t whole = config_.max_step_cost * unit;
  std::int64_t left = whole;
  for (std::int32_t i = 0; i < decodes.num_decodes; ++i) left -= cost_of(decodes.seq_lens[static_cast<std::size_t>(i)] - 1, 1);
  return std::max(left, whole / 4);
}

// The most tokens, up to `num_tokens`, that the step's cost allows after `first` others.
std::int32_t Scheduler::affordable(std::int32_t first, std::int32_t num_tokens) const {
  if (cost_of(first, num_tokens) <= prefill_cost_left_) return num_tokens;
  std::int32_t least = 0;
  while (num_tokens - least > 1) {  // `least` tokens are allowed, `num_tokens` are too many
    const std::int32_t middle = least + (num_tokens - least) / 2;
    (cost_of(first, middle) <= prefill_cost_left_ ? least : num_tokens) = middle;
  }
  return least;
}

void Scheduler::plan_prefills(StepBuffers& out) {
  for (std::size_t i = 0; num_prefilling_ > 0 && i < running_.size() && has_room(out); ++i) {
    Request& request = *running_[i];
    if (!request.is_prefilling()) continue;
    plan_chunk(out, request, request.num_known() - request.num_planned);
    if (request.place == Place::kOutside) --i;  // it left running_
  }
}

void Scheduler::plan_admissions(StepBuffers& out) {
  while (!waiting_.empty() && has_room(out) && rows_.num_free() > 0) {
    Request& request = *waiting_.begin()->second;
    if (!admit(request)) return;
    if (request.is_prefilling()) plan_chunk(out, request, request.num_known() - request.num_planned);
  }
}

// Gives the request a row and its cached prefix when the pool holds enough for all of its known tokens and the next one.
bool Scheduler::admit(Request& request) {
  if (request.is_retracting()) return false;  // a step in flight still writes its old pages
  const std::int32_t num_known = request.num_known();
  const std::int32_t needed = pages_for(std::min(num_known + 1, request.most_cached_tokens()));
  // Running decodes may each want a page soon; with nobody running, the rule must not keep the last request out.
  const std::int32_t reserve =
      running_.empty() ? 0 : promised_pages_ + static_cast<std::int32_t>(running_.size()) - num_prefilling_;
  // The last known token is always computed: its logits are what the request waits for.
  const std::int32_t max_hit = request.use_prefix_cache ? (num_known - 1) / config_.page_size : 0;
  NodeRef prefix;
  std::int32_t hit_pages = 0;
  for (;;) {
    // A cheap bound first: at best all pages that are locked now are shared.
    const std::int32_t locked = tree_ ? tree_->num_locked_pages() : 0;
    if (needed - locked + reserve <= available_pages()) {
      if (!tree_) break;
      const PrefixProbe hit = tree_->probe(request.tokens.span(), max_hit, request.options.salt);
      hit_pages = hit.num_pages;
      if (needed - hit.num_locked_pages + reserve <= available_pages()) break;
    }
    // What runs will end and give pages back: worth waiting for, rather than what the next turn of a session has to compute again.
    if (!running_.empty() || num_draining_ > 0 || !sessions_.give_up_oldest()) return false;
  }
  if (tree_) prefix = tree_->lock_prefix(request.tokens.span(), max_hit, request.options.salt);
  if (request.options.session != 0) sessions_.resume(request.options.session);

  const std::int32_t hit_tokens = hit_pages * config_.page_size;
  path_pages_.clear();
  prefix.append_path_pages(path_pages_);
  TOKENSPEED_INVARIANT(static_cast<std::int32_t>(path_pages_.size()) == hit_pages);
  RowLease row = rows_.lease();
  request.row = row.row();
  KvHold kv{std::move(row), std::move(prefix), OwnedPages(allocator_)};
  const bool is_remote = request.options.role == Role::kDecode && request.awaits_remote;
  if (is_remote) {
    must_dispatch(request, Load{std::move(kv)});
  } else {
    must_dispatch(request, Admit{std::move(kv)});
  }
  for (std::int32_t index = 0; index < hit_pages; ++index) set_table(request, index, path_pages_[static_cast<std::size_t>(index)]);
  request.num_table_pages = hit_pages;
  request.num_shared_pages = hit_pages;
  request.num_planned = hit_tokens;
  request.num_committed = hit_tokens;
  if (!request.admitted_before) {
    request.admitted_before = true;
    request.num_cached_tokens = hit_tokens;
    if (tree_ && request.use_prefix_cache) {
      counters_.prefix_query_tokens += request.num_prompt;
      counters_.prefix_hit_tokens += hit_tokens;
    }
  }
  if (is_remote) {
    move_to(request, Place::kOutside);
    const std::int32_t missing = pages_for(num_known) - hit_pages;
    const std::int32_t taken = take_pages(request, missing);
    TOKENSPEED_INVARIANT(taken == missing);
    ++request.in_flight_transfers;
    remote_prefills_.push_back({request.id, hit_tokens});
    return true;
  }
  move_to(request, Place::kPrefilling);
  request.promised_pages = needed - hit_pages;
  promised_pages_ += request.promised_pages;
  return true;
}

// Plans up to `num_tokens` more prompt tokens, as budget, chunk size and pages allow.
void Scheduler::plan_chunk(StepBuffers& out, Request& request, std::int32_t num_tokens) {
  num_tokens = std::min(num_tokens, config_.max_num_batched_tokens - out.num_tokens);
  if (config_.chunk_size > 0) num_tokens = std::min(num_tokens, config_.chunk_size);
  const bool is_first = out.num_requests == out.num_decodes;  // it gets on, whatever it costs
  num_tokens = std::max(affordable(request.num_planned, num_tokens), is_first ? 1 : 0);
  if (num_tokens == 0) {  // what is left of the cost is left: a prompt behind, whose tokens cost less, must not overtake
    prefill_cost_left_ = 0;
    return;
  }
  num_tokens = grow_for_prefill(request, num_tokens);
  if (num_tokens == 0) return;
  prefill_cost_left_ -= cost_of(request.num_planned, num_tokens);
  plan_row(out, request, num_tokens);
  if (request.num_planned == request.num_known()) {
    if (request.options.role == Role::kPrefill) {
      must_dispatch(request, HandOver{});
      ++request.in_flight_transfers;
      move_to(request, Place::kOutside);
    } else {
      must_dispatch(request, LastChunkPlanned{});
      move_to(request, Place::kDecoding);
    }
  }
}

// Pages for a chunk; returns how many tokens the request can take now. A prefill takes what there is. Only when there is nothing,
// and those behind it hold half-computed prompts, do they give way: decodes have their rows in this step already.
std::int32_t Scheduler::grow_for_prefill(Request& request, std::int32_t num_tokens) {
  for (;;) {
    const std::int32_t missing = pages_for(request.num_planned + num_tokens) - request.num_table_pages;
    if (missing > 0) take_pages(request, missing);
    const std::int32_t room = request.num_table_pages * config_.page_size - request.num_planned;
    if (room > 0) return std::min(num_tokens, room);
    Request& latest = *running_.back();
    if (num_draining_ > 0 || &latest == &request || !latest.is_prefilling()) return 0;
    retract_latest();
  }
}

// Up to `count` pages, evicting cached ones when the free list is short. Returns how many.
std::int32_t Scheduler::take_pages(Request& request, std::int32_t count) {
  while (allocator_.num_free() < count && tree_) {
    counters_.num_evicted_pages += tree_->evict(count - allocator_.num_free());
    if (allocator_.num_free() >= count || !sessions_.give_up_oldest()) break;
  }
  count = std::min(count, allocator_.num_free());
  KvHold& kv = *held_kv(request.state);
  allocator_.allocate_into(kv.pages, count);
  const auto taken = kv.pages.ids().last(static_cast<std::size_t>(count));
  for (const PageId page : taken) set_table(request, request.num_table_pages++, page);
  const std::int32_t kept_promise = std::min(count, request.promised_pages);
  request.promised_pages -= kept_promise;
  promised_pages_ -= kept_promise;
  return count;
}

void Scheduler::retract_latest() {
  Request& victim = *running_.back();
  must_dispatch(victim, Retract{});
  move_to(victim, Place::kRetracting);
  ++counters_.num_retractions;
  drain_when_idle(victim);
}

void Scheduler::plan_row(StepBuffers& out, Request& request, std::int32_t num_tokens) {
  const auto index = static_cast<std::size_t>(out.num_requests++);
  const std::int32_t first = request.num_planned;
  const std::int32_t end = first + num_tokens;
  const std::int32_t num_known = request.num_known();
  out.request_ids[index] = request.id;
  out.rows[index] = request.row;
  out.query_lens[index] = num_tokens;
  out.cu_query_lens[index] = out.num_tokens;
  out.seq_lens[index] = end;
  out.requests[index] = &request;

  const std::int32_t page_size = config_.page_size;
  const std::int32_t* pages = table_row(request.row);
  std::int32_t page_index = first / page_size;
  std::int32_t offset = first - page_index * page_size;
  std::int64_t slot = static_cast<std::int64_t>(pages[page_index]) * page_size + offset;
  auto token = static_cast<std::size_t>(out.num_tokens);
  for (std::int32_t position = first; position < end; ++position, ++token, ++offset, ++slot) {
    if (offset == page_size) {
      offset = 0;
      slot = static_cast<std::int64_t>(pages[++page_index]) * page_size;
    }
    out.token_ids[token] = position < num_known ? request.tokens[static_cast<std::size_t>(position)] : -1;
    out.positions[token] = position;
    out.slot_mapping[token] = slot;
  }
  out.num_tokens += num_tokens;

  if (end == num_known + request.in_flight_samples) {  // the last token there is: its logits give the next
    const auto sample = static_cast<std::size_t>(out.num_samples++);
    out.sample_rows[sample] = static_cast<std::int32_t>(index);
    out.output_index[sample] = request.num_sampled() + request.in_flight_samples;
    ++request.in_flight_samples;
  }
  counters_.recomputed_tokens += std::max(0, std::min(end, request.num_computed_high_water) - first);
  request.num_computed_high_water = std::max(request.num_computed_high_water, end);
  request.num_planned = end;
  ++request.in_flight_steps;
}

}  // namespace tokenspeed
