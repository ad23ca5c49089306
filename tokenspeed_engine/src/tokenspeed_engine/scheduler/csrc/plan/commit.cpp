// commit(): the tokens of a step become part of their requests, full pages become shareable, and what is over ends.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "../invariant.h"
#include "must_dispatch.h"
#include "scheduler.h"

namespace tokenspeed {

const CommitBuffers& Scheduler::commit(std::int64_t step, std::span<const TokenId> sampled, std::int64_t step_time_us) {
  if (oldest_open_step_ == next_step_) {
    throw std::invalid_argument("scheduler.commit: expected a step in flight, got step " + std::to_string(step) +
                                " while none is. Fix: commit each plan once, in the order of planning");
  }
  if (step != oldest_open_step_) {
    throw std::invalid_argument("scheduler.commit: expected step " + std::to_string(oldest_open_step_) +
                                ", the oldest in flight, got " + std::to_string(step) +
                                ". Fix: commit each plan once, in the order of planning");
  }
  const StepBuffers& plan = *ring_[static_cast<std::size_t>(step) % ring_.size()];
  if (sampled.size() != static_cast<std::size_t>(plan.num_samples)) {
    throw std::invalid_argument("scheduler.commit: expected " + std::to_string(plan.num_samples) +
                                " sampled tokens for step " + std::to_string(step) + ", got " + std::to_string(sampled.size()) +
                                ". Fix: give one token for each entry of plan.sample_rows");
  }
  for (const TokenId token : sampled) {
    if (token < 0) {
      throw std::invalid_argument("scheduler.commit: expected token ids of at least 0, got " + std::to_string(token));
    }
  }

  if (step_time_us < 0) {
    throw std::invalid_argument("scheduler.commit: expected a step_time_us of at least 0, got " + std::to_string(step_time_us));
  }

  budget_.learn(plan.work, step_time_us);
  if (tree_) tree_->tick();
  ++oldest_open_step_;
  commit_turn_ ^= 1;
  CommitBuffers& result = commits_[commit_turn_];
  result.clear();
  result.step = step;
  std::int32_t sample = 0;
  for (std::int32_t row = 0; row < plan.num_requests; ++row) {
    const auto index = static_cast<std::size_t>(row);
    const bool samples = sample < plan.num_samples && plan.sample_rows[static_cast<std::size_t>(sample)] == row;
    const TokenId* token = samples ? &sampled[static_cast<std::size_t>(sample++)] : nullptr;
    commit_row(*plan.requests[index], plan.query_lens[index], token);
  }
  return result;
}

void Scheduler::commit_row(Request& request, std::int32_t num_tokens, const TokenId* sampled) {
  --request.in_flight_steps;
  const bool runs = request.is_prefilling() || request.is_decoding();
  const bool hands_over = std::holds_alternative<PrefillDone>(request.state);
  if (!runs && !hands_over && !request.is_retracting()) {  // ended before: the token is nobody's, but its pages were still in use
    drain_when_idle(request);
    return;
  }
  request.num_committed += num_tokens;
  FinishReason reason = FinishReason::kRunning;
  if (sampled != nullptr) {
    const std::int32_t index = request.num_sampled();
    --request.in_flight_samples;
    request.tokens.append(*sampled);
    reason = finish_reason(request, *sampled, index);
    commits_[commit_turn_].push(request, *sampled, index, reason);
  }
  publish_full_pages(request);
  if (hands_over) return;  // the other engine goes on, or ends
  if (reason != FinishReason::kRunning) {
    ++counters_.num_finished;
    request.is_kept = true;
    learn_length(request);
    write_through(request, true);
    must_dispatch(request, Finish{});
    end(request);
  } else if (!runs) {
    drain_when_idle(request);
  }
}

// What the tenant's next outputs are expected to be like.
void Scheduler::learn_length(const Request& request) {
  for (LengthEstimate* estimate : {&output_length_, &request.account->output_length}) {
    estimate->observe(request.num_sampled());
    longest_expected_ = std::max(longest_expected_, estimate->expected());
  }
}

FinishReason Scheduler::finish_reason(const Request& request, TokenId token, std::int32_t index) const {
  if (index >= request.min_new_tokens && request.is_stop(token)) return FinishReason::kStop;
  if (index + 1 >= request.max_new_tokens) return FinishReason::kLength;
  return FinishReason::kRunning;
}

// Pages that are full of committed tokens go to the prefix cache: no step can write them any more, and their tokens are known.
void Scheduler::publish_full_pages(Request& request) {
  const std::int32_t page_size = config_.page_size;
  if (!tree_ || request.num_committed < (request.num_shared_pages + 1) * page_size) return;
  const std::int32_t num_full = request.num_committed / page_size;
  const std::int32_t num_new = num_full - request.num_shared_pages;
  TOKENSPEED_INVARIANT(num_new > 0);
  KvHold& kv = *held_kv(request.state);
  const auto first_token = static_cast<std::size_t>(request.num_shared_pages) * static_cast<std::size_t>(page_size);
  const auto num_tokens = static_cast<std::size_t>(num_new) * static_cast<std::size_t>(page_size);
  const std::span<const TokenId> tokens = request.tokens.span().subspan(first_token, num_tokens);
  replaced_.clear();
  const std::int32_t taken = tree_->extend(kv.prefix, tokens, kv.pages, replaced_);
  for (const PageReplacement& replacement : replaced_) {
    set_table(request, request.num_shared_pages + replacement.index, replacement.page);
  }
  request.num_shared_pages += taken;
  write_through(request, false);
}

}  // namespace tokenspeed
