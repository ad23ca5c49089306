// plan(): which tokens run in the next step, and on which pages.
//
// Decodes first: each running stream gets its token. What the budget leaves goes to prompts, those that are being computed and those
// that wait, in one order (queue.h): a better priority first, then the tenant that was served least, then arrival. The head of the
// queue is never overtaken by those behind it. Where a step's cost is bounded (budget.h), chunks shrink as their context grows, so that
// a step late in a long prompt takes no longer than one at its start.
//
// Who is admitted, and who gives way when rows or pages run out, is in admission.cpp.
#include <algorithm>
#include <iterator>

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
  num_forecasts_ = 0;
  preempt_for_priority();
  make_room_for_decodes();
  const std::shared_ptr<StepBuffers>& out = ring_[static_cast<std::size_t>(next_step_) % ring_.size()];
  out->clear();
  write_back_ahead();
  plan_decodes(*out);
  plan_prompts(*out);
  if (out->num_requests == 0) {
    // The first of the running, or of the queue, can get on unless a step or a transfer in flight holds its token or its pages.
    TOKENSPEED_INVARIANT(requests_.empty() || next_step_ > oldest_open_step_ || waits_for_transfer());
    return nullptr;
  }
  out->step = next_step_++;
  out->work = budget_.work();
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
  for (Request* request : running_) {
    if (!decodes_now(*request)) continue;
    if (lacks_page(*request)) {
      WaitingQueue::charge(*request);
      if (take_pages(*request, 1) == 0) continue;  // it waits for a commit
    }
    plan_row(out, *request, 1);
  }
  out.num_decodes = out.num_requests;
  std::int64_t cost = 0;
  if (budget_.counts_work()) {
    for (std::int32_t i = 0; i < out.num_decodes; ++i) cost += budget_.cost_of(out.seq_lens[static_cast<std::size_t>(i)] - 1, 1);
  }
  budget_.begin(out.num_decodes, cost);
}

// Chunks of prompts that are being computed, and of requests that wait, in the order in which they are to be served.
void Scheduler::plan_prompts(StepBuffers& out) {
  prompts_.clear();
  if (num_prefilling_ > 0) {
    std::copy_if(running_.begin(), running_.end(), std::back_inserter(prompts_), [](const Request* r) { return r->is_prefilling(); });
    std::sort(prompts_.begin(), prompts_.end(), [](const Request* a, const Request* b) { return WaitingQueue::prompt_before(*a, *b); });
  }
  bool admits = true;  // until one cannot be: nobody overtakes it
  for (std::size_t next = 0; has_room(out);) {
    // Who was retracted in this step is passed, and so is who was admitted again: it has its chunk.
    while (next < prompts_.size() && !(prompts_[next]->is_prefilling() && prompts_[next]->last_prompt_step != next_step_)) ++next;
    Request* running = next < prompts_.size() ? prompts_[next] : nullptr;
    Request* waiting = admits && rows_.num_free() > 0 ? queue_.front(now_us_) : nullptr;
    if (waiting != nullptr && (running == nullptr || WaitingQueue::prompt_before(*waiting, *running))) {
      admits = admit(*waiting);
      if (waiting->is_prefilling()) plan_chunk(out, *waiting);  // else another engine computes its prompt
      continue;
    }
    if (running == nullptr) return;
    ++next;
    plan_chunk(out, *running);
  }
}

// Plans more prompt tokens, as many as budget, chunk size and pages allow.
void Scheduler::plan_chunk(StepBuffers& out, Request& request) {
  std::int32_t num_tokens = request.num_known() - request.num_planned;
  num_tokens = std::min(num_tokens, config_.max_num_batched_tokens - out.num_tokens);
  if (config_.chunk_size > 0) num_tokens = std::min(num_tokens, config_.chunk_size);
  const bool is_first = out.num_requests == out.num_decodes;  // it gets on, whatever it costs
  num_tokens = std::max(budget_.affordable(request.num_planned, num_tokens), is_first ? 1 : 0);
  if (num_tokens == 0) {  // what is left of the cost is left: a prompt behind, whose tokens cost less, must not overtake
    budget_.close();
    return;
  }
  num_tokens = grow_for_prefill(request, num_tokens);
  if (num_tokens == 0) return;
  budget_.spend(request.num_planned, num_tokens);
  plan_row(out, request, num_tokens);
  WaitingQueue::charge(request);
  request.last_prompt_step = next_step_;
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
    if (num_draining_ > 0) return 0;
    const auto gives_way = [&](const Request* behind) {
      return behind->is_prefilling() && behind->last_prompt_step != next_step_ && WaitingQueue::prompt_before(request, *behind);
    };
    const auto last = std::find_if(prompts_.rbegin(), prompts_.rend(), gives_way);
    if (last == prompts_.rend()) return 0;
    ++counters_.num_retractions;
    retract(**last);
  }
}

// Up to `count` pages, evicting cached ones when the free list is short, those kept for sessions last. Returns how many.
std::int32_t Scheduler::take_pages(Request& request, std::int32_t count) {
  while (allocator_.num_free() < count && tree_) {
    evict_for(count - allocator_.num_free());
    if (allocator_.num_free() >= count || !release_sessions(false)) break;
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
