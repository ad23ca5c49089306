// The control plane: admission, batching, pages, retraction and the end of requests. A pure function of its calls.
//
// plan() decides one step; commit() brings its tokens. Up to max_in_flight_steps plans may be open, and steps must run in the order of
// their plans: that is what makes it safe to hand out a page again that an earlier step still reads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "../cache/page_allocator.h"
#include "../cache/radix_tree.h"
#include "../cache/row_pool.h"
#include "budget.h"
#include "config.h"
#include "lifetime.h"
#include "options.h"
#include "queue.h"
#include "request.h"
#include "sessions.h"
#include "step.h"
#include "transfers.h"

namespace tokenspeed {

// Who holds each page, found by walking all holders: what tests hold the counters against.
struct OwnerSnapshot {
  enum Kind : std::int8_t { kNobody = -1, kFree = 0, kRequest = 1, kCache = 2 };
  std::vector<std::int8_t> kind;         // [num_pages] the last holder found
  std::vector<std::int64_t> request_id;  // [num_pages] the holding request, -1 for none
  std::vector<std::int32_t> num_owners;  // [num_pages] must all be 1
};

class Scheduler {
 public:
  // Throws std::invalid_argument when config.problem() is not empty.
  explicit Scheduler(const SchedulerConfig& config);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  SubmitStatus submit(std::int64_t request_id, std::span<const TokenId> prompt, std::int64_t max_new_tokens,
                      std::span<const TokenId> stop_token_ids, std::int64_t min_new_tokens, bool use_prefix_cache,
                      const RequestOptions& options = {});
  AbortStatus abort(std::int64_t request_id);

  // What the transport to another engine tells (remote.cpp). An event that does not fit is a value, and changes nothing.
  EventStatus bootstrapped(std::int64_t request_id);
  EventStatus remote_prefill_done(std::int64_t request_id, TokenId first_token);
  EventStatus transfer_succeeded(std::int64_t request_id);
  EventStatus transfer_failed(std::int64_t request_id);
  // The request's entries of the page table; empty when it holds none.
  std::span<const PageId> pages_of(std::int64_t request_id) const;

  // Releases what is kept for a conversation. False when nothing is.
  bool end_session(std::int64_t session);

  // What the prefix cache gained and lost since the last call, in both tiers. Empty without kv_event_pages.
  std::vector<KvEvent> take_kv_events();

  // external.cpp: pages between the host's pool and a store outside. A ticket that is over, or a wrong length: std::invalid_argument.
  // The hashes of the whole pages behind those that device or host have; the first of them. Nothing without a host tier.
  std::int32_t missing_hashes(std::span<const TokenId> tokens, std::string_view salt, std::vector<BlockHash>& hashes);
  // Takes up to `count` pages of the host for data that is fetched; a ticket for them.
  std::int64_t reserve_host_pages(std::int32_t count);
  std::span<const PageId> reserved_host_pages(std::int64_t ticket) const;
  // Puts the ticket's pages, from `first_page` of `tokens` to their end, into the cache; how many were of use. The others go back.
  std::int32_t insert_host_pages(std::int64_t ticket, std::span<const TokenId> tokens, std::int32_t first_page, std::string_view salt);
  void release_host_pages(std::int64_t ticket);
  // Pages of the host that a store should keep, about `max_pages`; they stay as they are until the transfer is completed.
  TransferId begin_store(std::int32_t max_pages, std::vector<StorePage>& pages);

  // No step is planned between the two; what is in flight ends, and everything else goes on being received.
  void pause() noexcept { is_paused_ = true; }
  void resume() noexcept { is_paused_ = false; }
  bool is_paused() const noexcept { return is_paused_; }

  // The time, in microseconds of one clock that all ranks share: an input like any other. Throws std::invalid_argument backwards.
  void advance_clock(std::int64_t now_us);

  // Plans a step, or returns null when nothing can run before a commit or a submission. Throws UsageError when too many are open.
  std::shared_ptr<const StepBuffers> plan();
  // The copies that the last plan(), empty or not, asks for; gives them once.
  Transfers take_transfers();
  // Commits the oldest open step. Throws std::invalid_argument, before any change, when step, tokens or time do not fit.
  // step_time_us: how long the step took, as rank 0 measured it; 0: not measured.
  const CommitBuffers& commit(std::int64_t step, std::span<const TokenId> sampled, std::int64_t step_time_us = 0);

  // The transfers of these ids have ended: with ok[i] all of their pages are copied, else none is to be relied on. Returns how many
  // of the ids name a transfer in flight; others change nothing. Throws std::invalid_argument when the lengths differ.
  std::int32_t complete_transfers(std::span<const std::int64_t> ids, std::span<const bool> ok);

  // Drops all cached pages that no request uses. Returns their number.
  std::int32_t flush_cache();

  bool has_work() const noexcept { return !requests_.empty(); }
  const SchedulerConfig& config() const noexcept { return config_; }
  SchedulerStats stats() const;
  OwnerSnapshot owners() const;
  // Throws InvariantError where counts, places, the page table or the prefix cache disagree. Walks everything: for tests.
  void check() const;
  // [max_num_seqs, max_pages_per_request], -1 where no page is.
  std::span<const std::int32_t> page_table() const noexcept { return page_table_; }

 private:
  // planner.cpp
  void plan_decodes(StepBuffers& out);
  void plan_prompts(StepBuffers& out);
  void plan_chunk(StepBuffers& out, Request& request);
  void plan_row(StepBuffers& out, Request& request, std::int32_t num_tokens);
  bool has_room(const StepBuffers& out) const {
    return out.num_tokens < config_.max_num_batched_tokens && (budget_.has_left() || out.num_requests == out.num_decodes);
  }
  // Whether a step can compute its next token: its last one may be in flight.
  static bool decodes_now(const Request& request) {
    return request.is_decoding() && request.num_sampled() + request.in_flight_samples < request.max_new_tokens;
  }
  bool wants_page(const Request& request) const {
    return decodes_now(request) && lacks_page(request);
  }
  bool lacks_page(const Request& request) const {
    return request.num_planned == request.num_table_pages * config_.page_size;
  }
  std::int32_t grow_for_prefill(Request& request, std::int32_t num_tokens);
  std::int32_t take_pages(Request& request, std::int32_t count);

  // admission.cpp
  std::int32_t missing_pages(const Request& request) const;
  std::int32_t max_hit_pages(const Request& request) const;
  bool pool_outlasts(const Request& request, std::int32_t spare_pages);
  bool admit(Request& request);
  void preempt_for_priority();
  void make_room_for_decodes();
  Request* cheapest_victim(std::int32_t worse_than, bool for_pages) const;
  std::int32_t pages_back_from(const Request& request) const;
  std::int32_t expected_tokens(const Request& request) const;
  void retract(Request& victim);
  // The order of running_: who was passed over too often, then priority, then arrival. Its first is never retracted for pages.
  static bool ranks_before(const Request* a, const Request* b) {
    if (a->is_due != b->is_due) return a->is_due;
    if (a->options.priority != b->options.priority) return a->options.priority < b->options.priority;
    return a->arrival < b->arrival;
  }

  // commit.cpp
  void commit_row(Request& request, std::int32_t num_tokens, const TokenId* sampled);
  void learn_length(const Request& request);
  FinishReason finish_reason(const Request& request, TokenId token, std::int32_t index) const;
  void publish_full_pages(Request& request);

  // tiers.cpp
  void note_write_back(TransferId id);
  void note_load_back(TransferId id);
  void write_through(Request& request, bool finished);
  void write_back_ahead();
  std::int32_t evict_for(std::int32_t count);
  bool release_sessions(bool for_queue);
  bool is_worth_loading(const Request& request, const PrefixProbe& hit) const;
  NodeRef take_prefix(const Request& request, std::int32_t max_hit, bool& loads, std::int32_t& num_device_pages);
  bool write_back_retracted(Request& request);
  void end_write_back(TransferId id);
  void end_loads();
  bool waits_for_transfer() const noexcept { return num_outside_ > 0 || (tree_ && tree_->num_transfers() > 0); }

  // external.cpp
  std::map<std::int64_t, OwnedPages>::const_iterator host_ticket(std::int64_t ticket) const;

  // scheduler.cpp
  template <class Event>
  void must_dispatch(Request& request, Event&& event);
  void move_to(Request& request, Place place);
  void end(Request& request);
  void drain_when_idle(Request& request);
  void drain(Request& request);
  void end_transfer(Request& request);
  void forget(Request& request);
  void forget_promise(Request& request);
  void enter_running(Request& request);
  void leave_running(Request& request);
  std::int32_t available_pages() const noexcept;
  std::int32_t pages_for(std::int32_t num_tokens) const noexcept {
    return (num_tokens + config_.page_size - 1) / config_.page_size;
  }
  std::int32_t* table_row(std::int32_t row) noexcept {
    return page_table_.data() + static_cast<std::size_t>(row) * static_cast<std::size_t>(max_pages_per_request_);
  }
  void set_table(Request& request, std::int32_t index, PageId page);

  SchedulerConfig config_;
  std::int32_t max_pages_per_request_;

  // Holders of pages come after what they give pages back to: they are destroyed first.
  PageAllocator allocator_;
  std::optional<PageAllocator> host_allocator_;  // none without a host tier
  std::optional<KvEventBuffer> kv_events_;       // none when nobody wants them
  std::optional<RadixTree> tree_;  // none when the prefix cache is off
  std::map<std::int64_t, OwnedPages> host_tickets_;  // pages of the host that are being filled from outside
  std::int64_t next_host_ticket_ = 0;
  RowPool rows_;
  std::unordered_map<std::int64_t, std::unique_ptr<Request>> requests_;  // looked up by id, never walked to decide anything

  SessionTable sessions_;

  std::vector<Request*> running_;  // prefilling or decoding, in the order of ranks_before
  WaitingQueue queue_;             // submitted, retracting or retracted
  StepBudget budget_;
  std::int32_t longest_expected_ = 0;  // output of any tenant so far
  LengthEstimate output_length_;   // of all tenants together: what is expected of a tenant that is not known yet
  std::uint64_t next_arrival_ = 0;
  std::int64_t now_us_ = 0;             // as of the last advance_clock
  std::int32_t num_prefilling_ = 0;
  std::int32_t num_draining_ = 0;    // retracting, draining or aborting: their pages come back with a commit
  std::int32_t num_outside_ = 0;     // wait for another engine or for copies
  bool is_paused_ = false;
  std::int32_t promised_pages_ = 0;  // sum over requests
  std::uint64_t num_releases_ = 0;   // how often a request gave its pages back
  std::int64_t refused_request_ = -1;  // for which the pool would not have lasted, when num_releases_ was refused_at_
  std::uint64_t refused_at_ = 0;
  std::int32_t num_forecasts_ = 0;   // of the step that is being planned

  std::vector<std::int32_t> page_table_;
  std::vector<PageUpdate> pending_updates_;

  // Since the last take_transfers.
  PageCopies pending_write_backs_;
  PageCopies pending_load_backs_;
  std::vector<RemotePrefill> remote_prefills_;

  std::vector<std::int64_t> loading_;                  // requests in LoadingBack that wait for the host, in order of admission
  std::map<TransferId, std::int64_t> writing_;         // requests in WritingBack, by the copy that they wait for
  std::map<TransferId, std::int32_t> writing_pages_;   // pages of each copy to the host in flight
  std::int32_t num_writing_pages_ = 0;                 // sum over these
  std::int64_t next_write_back_step_ = 0;              // no write-back ahead of eviction before it
  bool flushes_again_ = false;                         // a flush left what transfers had locked

  std::vector<std::shared_ptr<StepBuffers>> ring_;  // step n lives in ring_[n % size]
  std::int64_t next_step_ = 0;
  std::int64_t oldest_open_step_ = 0;
  CommitBuffers commits_[2];  // taken in turn, so that the views of a commit outlive the next plan
  int commit_turn_ = 0;

  // Scratch, kept to allocate nothing per step.
  std::vector<PageReplacement> replaced_;
  std::vector<PageId> path_pages_;
  std::vector<Request*> prompts_;  // prefilling when the step began, in the order in which they are served
  PoolForecast forecast_;
  std::vector<PagePair> pairs_;

  SchedulerStats counters_;
};

}  // namespace tokenspeed
