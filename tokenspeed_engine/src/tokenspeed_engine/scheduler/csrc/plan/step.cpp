#include "step.h"

#include "request.h"

namespace tokenspeed {

StepBuffers::StepBuffers(const SchedulerConfig& config) {
  const auto num_seqs = static_cast<std::size_t>(config.max_num_seqs);
  const auto num_tokens_max = static_cast<std::size_t>(config.max_num_batched_tokens);
  request_ids.resize(num_seqs);
  rows.resize(num_seqs);
  query_lens.resize(num_seqs);
  cu_query_lens.resize(num_seqs + 1);
  seq_lens.resize(num_seqs);
  token_ids.resize(num_tokens_max);
  positions.resize(num_tokens_max);
  slot_mapping.resize(num_tokens_max);
  sample_rows.resize(num_seqs);
  output_index.resize(num_seqs);
  requests.resize(num_seqs);
  page_updates = std::make_shared<const std::vector<PageUpdate>>();
}

void StepBuffers::clear() {
  num_requests = 0;
  num_tokens = 0;
  num_decodes = 0;
  num_samples = 0;
  work = {};
}

CommitBuffers::CommitBuffers(const SchedulerConfig& config) {
  const auto num_seqs = static_cast<std::size_t>(config.max_num_seqs);
  request_ids.resize(num_seqs);
  token_ids.resize(num_seqs);
  finish_reasons.resize(num_seqs);
  num_prompt_tokens.resize(num_seqs);
  num_cached_tokens.resize(num_seqs);
  num_host_cached_tokens.resize(num_seqs);
  output_index.resize(num_seqs);
}

void CommitBuffers::push(const Request& request, std::int32_t token, std::int32_t index, FinishReason reason) {
  const auto event = static_cast<std::size_t>(num_events++);
  request_ids[event] = request.id;
  token_ids[event] = token;
  finish_reasons[event] = static_cast<std::int8_t>(reason);
  num_prompt_tokens[event] = request.num_prompt;
  num_cached_tokens[event] = request.num_cached_tokens;
  num_host_cached_tokens[event] = request.num_host_cached_tokens;
  output_index[event] = index;
}

}  // namespace tokenspeed
