// What the scheduler is told once, and the answers of its interface.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace tokenspeed {

struct SchedulerConfig {
  std::int32_t num_pages = 0;               // pages of the pool; all of them can be used
  std::int32_t page_size = 0;               // tokens in a page
  std::int32_t max_num_seqs = 0;            // requests that run at the same time: rows of the page table
  std::int32_t max_num_batched_tokens = 0;  // tokens in one step
  std::int32_t max_model_len = 0;           // tokens in one request, prompt and output together
  std::int32_t chunk_size = 0;              // prompt tokens of one request in one step; 0: as many as the budget allows
  bool enable_prefix_cache = true;
  std::int32_t max_in_flight_steps = 2;     // steps that may be planned and not committed
  // Bounds the time of a step: a token after p others costs 1 + p / context_cost_scale, or 1 where the scale is 0. Decodes always
  // run; prompt chunks share what the decodes leave of max_step_cost, and never less than a quarter of it. 0: no bound.
  std::int32_t max_step_cost = 0;
  std::int32_t context_cost_scale = 0;
  std::int64_t session_ttl_us = 0;  // how long a session's pages are kept after a turn; 0: not beyond what the cache does anyway
  // Prompts take no more of a step with decodes than lets it end within this time, by the model that is learnt from the times told to
  // commit(), and never less than a quarter of what they could have without decodes. 0: no target.
  std::int32_t inter_token_latency_us = 0;
  // Admissions of better priorities, or of deadlines, that a waiting class lets pass before its next request goes first.
  std::int32_t starvation_limit = 64;
  std::int32_t num_host_pages = 0;      // pages of the host tier; 0: none
  bool host_write_through = false;      // copy pages to the host when they are full; else ahead of their eviction
  // What bringing one page from the host takes, and computing one token: what is cheaper is done. A load_page_ns of 0 always loads.
  std::int64_t load_page_ns = 0;
  std::int64_t prefill_token_ns = 0;
  bool external_store = false;          // offer pages of the host to a store behind it
  std::int32_t kv_event_pages = 0;      // page hashes that may wait for take_kv_events; 0: no events
  bool adaptive_eviction = true;        // learn when cached pages are wanted again; else, or without a clock, the least recently used go

  // No request can hold more than the pool has.
  std::int32_t max_pages_per_request() const { return std::min((max_model_len + page_size - 1) / page_size, num_pages); }
  // Empty when the values fit together, else what is wrong and what to do.
  std::string problem() const;
};

enum class SubmitStatus : std::int8_t {
  kOk,
  kEmpty,           // no prompt token
  kInvalidToken,    // a negative token id
  kInvalidLength,   // max_new_tokens under 1, or min_new_tokens negative
  kTooLong,         // prompt + max_new_tokens over max_model_len
  kNeverFits,       // needs more pages than the pool has
  kDuplicate,       // the id is in use
};

enum class AbortStatus : std::int8_t {
  kOk,             // no further scheduling and no further output
  kNotFound,       // no such request
  kAlreadyEnded,   // finished or aborted before; its pages wait for a step in flight
};

// What became of an event that another engine caused.
enum class EventStatus : std::int8_t {
  kOk,
  kFinished,    // it was the last thing that the request waited for
  kNotFound,    // no such request
  kUnexpected,  // the request is not in a state that knows the event; nothing was changed
};

enum class FinishReason : std::int8_t { kRunning = 0, kStop = 1, kLength = 2 };

struct SchedulerStats {
  std::int32_t num_pages = 0;
  std::int32_t free_pages = 0;
  std::int32_t owned_pages = 0;      // held by one request
  std::int32_t cached_pages = 0;     // in the prefix cache, in use or not
  std::int32_t evictable_pages = 0;  // those of them that no request uses
  std::int32_t num_waiting = 0;      // submitted or retracted
  std::int32_t num_running = 0;      // prefilling or decoding
  std::int32_t num_draining = 0;     // over or retracted, pages held for a step in flight
  std::int32_t num_outside = 0;      // wait for another engine or for copies
  std::int32_t num_sessions = 0;     // conversations whose pages are kept for their next turn
  std::int32_t num_in_flight_steps = 0;
  std::int64_t num_steps = 0;            // planned so far
  std::int64_t num_submitted = 0;        // accepted so far
  std::int64_t num_finished = 0;         // by stop or length
  std::int64_t num_aborted = 0;
  std::int64_t num_failed = 0;           // lost their other engine
  std::int64_t num_retractions = 0;      // for want of pages
  std::int64_t num_preemptions = 0;      // for a better priority
  std::int64_t num_evicted_pages = 0;
  std::int64_t prefix_query_tokens = 0;  // prompt tokens of first admissions that may use the cache
  std::int64_t prefix_hit_tokens = 0;    // those of them that were found
  std::int64_t prefix_host_hit_tokens = 0;  // those of these that came from the host
  std::int32_t num_host_pages = 0;       // pages of the host tier
  std::int32_t host_cached_pages = 0;    // those of them that hold something
  std::int32_t num_transfers = 0;        // copies in flight
  std::int64_t num_written_back_pages = 0;
  std::int64_t num_loaded_back_pages = 0;
  std::int64_t num_failed_transfers = 0;
  std::int64_t recomputed_tokens = 0;    // tokens computed again after retractions
};

}  // namespace tokenspeed
