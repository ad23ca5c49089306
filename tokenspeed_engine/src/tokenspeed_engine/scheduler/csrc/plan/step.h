// Buffers that a plan and its commit fill. Allocated once at their largest size, so that views of them never move.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "budget.h"
#include "config.h"

namespace tokenspeed {

struct Request;

// A change of the page table: table[row, index] = page.
struct PageUpdate {
  std::int32_t row;
  std::int32_t index;
  std::int32_t page;
};
static_assert(sizeof(PageUpdate) == 3 * sizeof(std::int32_t));

// One planned step. Decode rows come first, then prefill chunks; each in the order in which they are served.
struct StepBuffers {
  explicit StepBuffers(const SchedulerConfig& config);

  std::int64_t step = -1;  // the step that the buffers hold; -1 before the first
  std::int32_t num_requests = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_decodes = 0;
  std::int32_t num_samples = 0;
  StepWork work;  // what it costs

  std::vector<std::int64_t> request_ids;   // [num_requests]
  std::vector<std::int32_t> rows;          // [num_requests] rows of the page table
  std::vector<std::int32_t> query_lens;    // [num_requests]
  std::vector<std::int32_t> cu_query_lens; // [num_requests + 1]
  std::vector<std::int32_t> seq_lens;      // [num_requests] including this step's tokens
  std::vector<std::int32_t> token_ids;     // [num_tokens] -1: sampled by a step that is not committed
  std::vector<std::int32_t> positions;     // [num_tokens]
  std::vector<std::int64_t> slot_mapping;  // [num_tokens] page * page_size + offset
  std::vector<std::int32_t> sample_rows;   // [num_samples] indices into the requests
  std::vector<std::int32_t> output_index;  // [num_samples] tokens that the request had sampled before
  std::shared_ptr<const std::vector<PageUpdate>> page_updates;  // since the last plan; never changed once it is here

  std::vector<Request*> requests;          // [num_requests] alive while the step is in flight

  void clear();
};

// What a commit tells. One event for each token that still counts.
struct CommitBuffers {
  explicit CommitBuffers(const SchedulerConfig& config);

  std::int64_t step = -1;
  std::int32_t num_events = 0;
  std::vector<std::int64_t> request_ids;
  std::vector<std::int32_t> token_ids;
  std::vector<std::int8_t> finish_reasons;
  std::vector<std::int32_t> num_prompt_tokens;
  std::vector<std::int32_t> num_cached_tokens;
  std::vector<std::int32_t> num_host_cached_tokens;
  std::vector<std::int32_t> output_index;

  void clear() { num_events = 0; }
  void push(const Request& request, std::int32_t token, std::int32_t index, FinishReason reason);
};

}  // namespace tokenspeed
