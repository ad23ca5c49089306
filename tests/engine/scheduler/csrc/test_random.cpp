// Random lives of the whole control plane. Python checks the same more closely; here the sanitizers watch every access.
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "check.h"
#include "plan/scheduler.h"

using namespace tokenspeed;

namespace {

struct World {
  explicit World(std::uint32_t seed) : random(seed) {
    const std::int32_t page_sizes[] = {1, 2, 3, 16};
    config.page_size = page_sizes[pick(4)];
    config.num_pages = 2 + pick(30);
    config.max_num_seqs = 1 + pick(6);
    config.max_num_batched_tokens = config.max_num_seqs + pick(24);
    config.max_model_len = 80;
    config.chunk_size = pick(3) == 0 ? 5 : 0;
    config.max_step_cost = pick(3) == 0 ? 6 : 0;
    config.context_cost_scale = pick(2) == 0 ? 7 : 0;
    config.enable_prefix_cache = pick(5) != 0;
    config.max_in_flight_steps = 1 + pick(3);
    config.inter_token_latency_us = pick(3) == 0 ? 500 : 0;
    config.starvation_limit = 1 + pick(5);
    has_classes = pick(2) == 0;
    scheduler.emplace(config);
    cache.assign(static_cast<std::size_t>(config.num_pages * config.page_size), -1);
  }

  // std::mt19937 is the same everywhere; distributions are not.
  std::int32_t pick(std::int32_t below) { return static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(below)); }

  void submit() {
    std::vector<TokenId> prompt;
    for (std::int32_t i = pick(30); i > 0; --i) prompt.push_back(i % 3);
    for (std::int32_t i = pick(10); i > 0; --i) prompt.push_back(pick(3));
    const std::int64_t id = next_id++;
    const std::vector<TokenId> stops{3};
    RequestOptions options;
    if (has_classes) {
      options.priority = pick(3) - 1;
      options.tenant = pick(3);
      options.tenant_weight = 1 + pick(4);
      options.deadline_us = pick(3) == 0 ? now_us + pick(5000) : -1;
    }
    const std::int64_t max_new = 1 + pick(12);
    const std::int64_t min_new = pick(2);
    if (scheduler->submit(id, prompt, max_new, stops, min_new, pick(6) != 0, options) == SubmitStatus::kOk) sequences[id] = prompt;
  }

  void plan() {
    if (static_cast<std::int32_t>(open.size()) >= config.max_in_flight_steps) return;
    const auto step = scheduler->plan();
    if (step == nullptr) {
      CHECK(!open.empty() || !scheduler->has_work());
      return;
    }
    open.push_back(step);
  }

  void commit(bool may_stop = true) {
    if (open.empty()) return;
    const StepBuffers& step = *open.front();
    write_and_read_back(step);
    std::vector<TokenId> sampled;
    for (std::int32_t i = 0; i < step.num_samples; ++i) sampled.push_back(pick(may_stop ? 4 : 3));
    const CommitBuffers& events = scheduler->commit(step.step, sampled, 1 + pick(1000));
    scheduler->advance_clock(now_us += pick(400));
    for (std::size_t i = 0; i < static_cast<std::size_t>(events.num_events); ++i) {
      const auto found = sequences.find(events.request_ids[i]);
      CHECK(found != sequences.end());
      found->second.push_back(events.token_ids[i]);
      if (events.finish_reasons[i] != 0) sequences.erase(found);
    }
    open.pop_front();
  }

  void abort() {
    if (next_id == 0) return;
    const std::int64_t id = pick(static_cast<std::int32_t>(next_id) + 1);
    CHECK_EQ(scheduler->abort(id) == AbortStatus::kOk, sequences.erase(id) == 1);
  }

  void write_and_read_back(const StepBuffers& step) {
    for (std::size_t row = 0; row < static_cast<std::size_t>(step.num_requests); ++row) {
      const auto found = sequences.find(step.request_ids[row]);
      for (auto t = step.cu_query_lens[row]; t < step.cu_query_lens[row] + step.query_lens[row]; ++t) {
        const auto token = static_cast<std::size_t>(t);
        const auto position = static_cast<std::size_t>(step.positions[token]);
        cache.at(static_cast<std::size_t>(step.slot_mapping[token])) = found == sequences.end() ? -7 : found->second.at(position);
      }
    }
    const std::span<const std::int32_t> table = scheduler->page_table();
    for (std::size_t row = 0; row < static_cast<std::size_t>(step.num_requests); ++row) {
      const auto found = sequences.find(step.request_ids[row]);
      if (found == sequences.end()) continue;
      for (std::int32_t position = 0; position < step.seq_lens[row]; ++position) {
        const auto entry = step.rows[row] * config.max_pages_per_request() + position / config.page_size;
        const std::int32_t page = table[static_cast<std::size_t>(entry)];
        CHECK(page >= 0);
        CHECK_EQ(cache.at(static_cast<std::size_t>(page * config.page_size + position % config.page_size)),
                 found->second.at(static_cast<std::size_t>(position)));
      }
    }
  }

  void check_owners() {
    for (const std::int32_t count : scheduler->owners().num_owners) CHECK_EQ(count, 1);
  }

  std::mt19937 random;
  SchedulerConfig config;
  std::optional<Scheduler> scheduler;
  std::map<std::int64_t, std::vector<TokenId>> sequences;  // of requests that live
  std::deque<std::shared_ptr<const StepBuffers>> open;
  std::vector<TokenId> cache;
  std::int64_t next_id = 0;
  std::int64_t now_us = 0;
  bool has_classes = false;
};

}  // namespace

TEST(random_lives_read_their_own_tokens_and_leave_no_page_behind) {
  std::int64_t retractions = 0, preemptions = 0, evictions = 0, hits = 0;
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    World world(seed);
    for (int call = 0; call < 200; ++call) {
      const std::int32_t kind = world.pick(20);
      if (kind < 5) {
        world.submit();
      } else if (kind < 12) {
        world.plan();
      } else if (kind < 18) {
        world.commit();
      } else if (kind < 19) {
        world.abort();
      } else {
        if (world.pick(4) == 0) world.scheduler->flush_cache();
      }
      world.check_owners();
    }
    if (seed % 10 == 0) continue;  // some are destroyed in the middle of their work
    for (int step = 0; world.scheduler->has_work(); ++step) {
      CHECK(step < 20'000);
      world.plan();
      world.commit(false);
    }
    CHECK_EQ(world.scheduler->stats().owned_pages, 0);
    retractions += world.scheduler->stats().num_retractions;
    preemptions += world.scheduler->stats().num_preemptions;
    evictions += world.scheduler->stats().num_evicted_pages;
    hits += world.scheduler->stats().prefix_hit_tokens;
  }
  CHECK(retractions > 20);
  CHECK(preemptions > 100);
  CHECK(evictions > 1000);
  CHECK(hits > 1000);
}
