// The host tier: what is copied there, when it comes back, and what its transfers' ends mean for requests and sessions.
//
// The tree owns both sides of a transfer and locks them until its end; a plan only carries the pairs of pages. A request waits in
// LoadingBack until every page of its prefix is on the device, and in WritingBack until its pages have a copy on the host. An abort
// in either needs no waiting: the transfer goes on with the tree's pages, and they can be evicted when it has ended.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "../invariant.h"
#include "must_dispatch.h"
#include "scheduler.h"

namespace tokenspeed {

namespace {
constexpr std::int64_t kStepsAfterFailure = 64;  // without write-backs ahead of eviction: what fails is not tried at once again
}  // namespace

Transfers Scheduler::take_transfers() {
  const auto shared = [](PageCopies& copies) -> std::shared_ptr<const PageCopies> {
    if (copies.empty()) return nullptr;
    return std::make_shared<const PageCopies>(std::exchange(copies, {}));
  };
  Transfers planned;
  planned.write_backs = shared(pending_write_backs_);
  planned.load_backs = shared(pending_load_backs_);
  if (!remote_prefills_.empty()) {
    planned.remote_prefills = std::make_shared<const std::vector<RemotePrefill>>(std::exchange(remote_prefills_, {}));
  }
  return planned;
}

// Hands the pairs of a transfer that the tree has just begun to the next plan.
void Scheduler::note_write_back(TransferId id) {
  if (id != kNoTransfer) {
    for (const PagePair& pair : pairs_) pending_write_backs_.push(id, pair.from, pair.to);
    num_writing_pages_ += static_cast<std::int32_t>(pairs_.size());
    writing_pages_.emplace(id, static_cast<std::int32_t>(pairs_.size()));
    counters_.num_written_back_pages += static_cast<std::int64_t>(pairs_.size());
  }
  pairs_.clear();
}

void Scheduler::note_load_back(TransferId id) {
  if (id != kNoTransfer) {
    for (const PagePair& pair : pairs_) pending_load_backs_.push(id, pair.from, pair.to);
    counters_.num_loaded_back_pages += static_cast<std::int64_t>(pairs_.size());
  }
  pairs_.clear();
}

// Pages that were full at a commit, under the policy that copies them at once.
void Scheduler::write_through(Request& request, bool finished) {
  if (!config_.host_write_through || !tree_) return;
  note_write_back(tree_->begin_write_through(held_kv(request.state)->prefix, finished, pairs_));
}

// Keeps as many pages free, or with a copy on the host, as the next steps may take: evicting them then loses nothing.
void Scheduler::write_back_ahead() {
  if (!host_allocator_ || !tree_ || next_step_ < next_write_back_step_) return;
  const std::int32_t wanted = std::min(config_.num_pages / 2, 2 * pages_for(config_.max_num_batched_tokens) + config_.max_num_seqs);
  const std::int32_t ready = allocator_.num_free() + tree_->num_clean_evictable_pages() + num_writing_pages_;
  if (ready < wanted) note_write_back(tree_->begin_write_back(wanted - ready, pairs_));
}

// Gives back device pages that nobody uses, those with a copy on the host first. Returns how many.
std::int32_t Scheduler::evict_for(std::int32_t count) {
  std::int32_t evicted = host_allocator_ ? tree_->evict(count, EvictMode::kCleanOnly) : 0;
  if (evicted < count) evicted += tree_->evict(count - evicted);
  counters_.num_evicted_pages += evicted;
  return evicted;
}

// Takes device pages from sessions that wait: those that have a copy on the host keep that one, others lose their hold. The queue
// (`for_queue`) takes from the latter only when nothing runs: what runs will end and give pages back, and that is worth waiting for.
bool Scheduler::release_sessions(bool for_queue) {
  if (!tree_) return false;
  if (host_allocator_ && sessions_.move_oldest_to_host(*tree_, config_.num_host_pages / 2)) return true;
  if (for_queue && (!running_.empty() || num_draining_ > 0 || num_writing_pages_ > 0)) return false;
  return sessions_.give_up_oldest_on_device();
}

// Whether bringing what the host has is cheaper than computing it again.
bool Scheduler::is_worth_loading(const Request& request, const PrefixProbe& hit) const {
  if (!host_allocator_ || request.avoids_host || request.awaits_remote || hit.num_loading_pages + hit.num_host_pages == 0) return false;
  const std::int64_t computed = static_cast<std::int64_t>(hit.num_loading_pages + hit.num_host_pages) * config_.page_size;
  return config_.load_page_ns * hit.num_load_pages <= config_.prefill_token_ns * computed || config_.load_page_ns == 0;
}

// Locks the prefix that the request will use, and starts to load what only the host has. False in `loads` when all is on the device.
NodeRef Scheduler::take_prefix(const Request& request, std::int32_t max_hit, bool& loads, std::int32_t& num_device_pages) {
  const std::span<const TokenId> tokens = request.tokens.span();
  const PrefixProbe hit = tree_->probe(tokens, max_hit, request.options.salt);
  num_device_pages = hit.num_pages;
  loads = is_worth_loading(request, hit);
  NodeRef prefix = tree_->lock_prefix(tokens, max_hit, request.options.salt, loads ? Tier::kHost : Tier::kDevice);
  if (!loads) return prefix;
  const std::int32_t count = tree_->num_load_pages(prefix);
  if (allocator_.num_free() < count) evict_for(count - allocator_.num_free());
  if (allocator_.num_free() < count) {  // what admission counted on is locked by a transfer: what the device has will do
    loads = false;
    return tree_->lock_prefix(tokens, max_hit, request.options.salt, Tier::kDevice);
  }
  note_load_back(tree_->begin_load_back(prefix, pairs_));
  loads = !tree_->is_ready(prefix);
  return prefix;
}

// A retracted request whose pages are worth a copy waits for it; false when they are not, or have one.
bool Scheduler::write_back_retracted(Request& request) {
  if (!host_allocator_ || !std::holds_alternative<Retracting>(request.state)) return false;
  // After a load that failed it holds less than its prefix, and will not take from the host what a copy would keep there.
  if (request.avoids_host) return false;
  // It is written once and loaded once.
  const std::int64_t computed = static_cast<std::int64_t>(request.num_shared_pages) * config_.page_size;
  if (2 * config_.load_page_ns * request.num_shared_pages > config_.prefill_token_ns * computed && config_.load_page_ns > 0) return false;
  request.write_back = tree_->begin_offload(held_kv(request.state)->prefix, pairs_);
  if (request.write_back == kNoTransfer) return false;
  note_write_back(request.write_back);
  writing_.emplace(request.write_back, request.id);
  must_dispatch(request, WriteBack{});
  return true;
}

std::int32_t Scheduler::complete_transfers(std::span<const std::int64_t> ids, std::span<const bool> ok) {
  if (ids.size() != ok.size()) {
    throw std::invalid_argument("scheduler.complete_transfers: expected one entry of ok for each of " + std::to_string(ids.size()) +
                                " ids, got " + std::to_string(ok.size()));
  }
  if (!tree_ || ids.empty()) return 0;
  tree_->tick();
  std::int32_t count = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!(ok[i] ? tree_->complete(ids[i]) : tree_->fail(ids[i]))) continue;
    ++count;
    if (!ok[i]) {
      ++counters_.num_failed_transfers;
      next_write_back_step_ = next_step_ + kStepsAfterFailure;
    }
    if (const auto pages = writing_pages_.find(ids[i]); pages != writing_pages_.end()) {
      num_writing_pages_ -= pages->second;
      writing_pages_.erase(pages);
    }
    end_write_back(ids[i]);
  }
  if (count == 0) return 0;
  end_loads();
  if (flushes_again_ && tree_->num_transfers() == 0) flush_cache();
  return count;
}

// With a copy or without: the request waits in the queue like any other that was retracted.
void Scheduler::end_write_back(TransferId id) {
  const auto entry = writing_.find(id);
  if (entry == writing_.end()) return;
  const auto request = requests_.find(entry->second);
  writing_.erase(entry);
  if (request != requests_.end() && std::holds_alternative<WritingBack>(request->second->state)) drain(*request->second);
}

// Requests whose prefix is on the device go on; those whose load failed compute what is missing.
void Scheduler::end_loads() {
  std::vector<std::int64_t> still_loading;
  for (const std::int64_t id : loading_) {
    const auto entry = requests_.find(id);
    if (entry == requests_.end()) continue;
    Request& request = *entry->second;
    const auto* loading = std::get_if<LoadingBack>(&request.state);
    if (loading == nullptr) continue;
    if (tree_->is_ready(loading->kv.prefix)) {
      must_dispatch(request, Loaded{});
      move_to(request, Place::kPrefilling);
    } else if (tree_->num_load_pages(loading->kv.prefix) > 0) {
      request.avoids_host = true;
      must_dispatch(request, Retract{});
      move_to(request, Place::kRetracting);
      drain(request);
    } else {
      still_loading.push_back(id);
    }
  }
  loading_ = std::move(still_loading);
}

}  // namespace tokenspeed
