#include <numeric>
#include <vector>

#include "check.h"
#include "plan/scheduler.h"

using namespace tokenspeed;

namespace {

SchedulerConfig small() {
  SchedulerConfig config;
  config.num_pages = 16;
  config.page_size = 4;
  config.max_num_seqs = 4;
  config.max_num_batched_tokens = 32;
  config.max_model_len = 64;
  return config;
}

std::vector<TokenId> prompt(std::int32_t length, TokenId first = 0) {
  std::vector<TokenId> ids(static_cast<std::size_t>(length));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

SubmitStatus submit(Scheduler& scheduler, std::int64_t id, const std::vector<TokenId>& ids, std::int64_t max_new = 4) {
  return scheduler.submit(id, ids, max_new, {}, 0, true);
}

const CommitBuffers& commit(Scheduler& scheduler, const StepBuffers& step, TokenId token = 7) {
  return scheduler.commit(step.step, std::vector<TokenId>(static_cast<std::size_t>(step.num_samples), token));
}

void check_pages(const Scheduler& scheduler) {
  const OwnerSnapshot owners = scheduler.owners();
  for (const std::int32_t count : owners.num_owners) CHECK_EQ(count, 1);
}

}  // namespace

TEST(one_request_from_prompt_to_end) {
  Scheduler scheduler(small());
  CHECK(submit(scheduler, 5, prompt(6)) == SubmitStatus::kOk);
  for (std::int32_t index = 0; index < 4; ++index) {
    const auto step = scheduler.plan();
    CHECK(step != nullptr);
    CHECK_EQ(step->num_tokens, index == 0 ? 6 : 1);
    CHECK_EQ(step->num_decodes, index == 0 ? 0 : 1);
    CHECK_EQ(step->seq_lens[0], 6 + index);
    CHECK_EQ(step->output_index[0], index);
    const CommitBuffers& events = commit(scheduler, *step);
    CHECK_EQ(events.num_events, 1);
    CHECK_EQ(static_cast<int>(events.finish_reasons[0]), index == 3 ? 2 : 0);
    check_pages(scheduler);
  }
  CHECK(!scheduler.has_work());
  CHECK_EQ(scheduler.stats().cached_pages, 2);
  CHECK_EQ(scheduler.stats().free_pages, 14);
}

TEST(an_abort_in_flight_holds_the_pages_until_the_commit) {
  Scheduler scheduler(small());
  CHECK(submit(scheduler, 1, prompt(10)) == SubmitStatus::kOk);
  const auto step = scheduler.plan();
  CHECK(scheduler.abort(1) == AbortStatus::kOk);
  CHECK(scheduler.abort(1) == AbortStatus::kAlreadyEnded);
  CHECK(submit(scheduler, 1, prompt(3)) == SubmitStatus::kDuplicate);
  CHECK_EQ(scheduler.stats().owned_pages, 3);
  CHECK(submit(scheduler, 2, prompt(10, 100)) == SubmitStatus::kOk);
  const auto next = scheduler.plan();
  for (std::int32_t token = 0; token < next->num_tokens; ++token) {
    const auto page = next->slot_mapping[static_cast<std::size_t>(token)] / 4;
    CHECK(page > 2);  // pages 0 to 2 may still be written by the first step
  }
  CHECK_EQ(commit(scheduler, *step).num_events, 0);
  CHECK_EQ(scheduler.stats().owned_pages, 3);  // those of request 2
  CHECK(scheduler.abort(1) == AbortStatus::kNotFound);
  check_pages(scheduler);
}

TEST(misuse_changes_nothing) {
  Scheduler scheduler(small());
  CHECK_THROWS(std::invalid_argument, scheduler.commit(0, {}));
  CHECK(submit(scheduler, 1, prompt(6)) == SubmitStatus::kOk);
  const auto step = scheduler.plan();
  const std::vector<TokenId> two{1, 2};
  const std::vector<TokenId> negative{-1};
  CHECK_THROWS(std::invalid_argument, scheduler.commit(step->step + 1, two));
  CHECK_THROWS(std::invalid_argument, scheduler.commit(step->step, two));
  CHECK_THROWS(std::invalid_argument, scheduler.commit(step->step, negative));
  const auto second = scheduler.plan();
  CHECK_EQ(second->token_ids[0], -1);
  CHECK_THROWS(UsageError, scheduler.plan());
  CHECK_EQ(commit(scheduler, *step, 3).token_ids[0], 3);
  CHECK_THROWS(std::invalid_argument, scheduler.commit(step->step, {}));
  check_pages(scheduler);
}

TEST(a_config_that_does_not_fit_is_refused) {
  SchedulerConfig config = small();
  config.max_num_batched_tokens = 3;
  CHECK_THROWS(std::invalid_argument, Scheduler(config));
  config = small();
  config.page_size = 0;
  CHECK_THROWS(std::invalid_argument, Scheduler(config));
}

TEST(two_requests_and_pages_for_one_and_a_half) {
  SchedulerConfig config = small();
  config.num_pages = 6;
  Scheduler scheduler(config);
  CHECK(submit(scheduler, 1, prompt(4, 0), 12) == SubmitStatus::kOk);
  CHECK(submit(scheduler, 2, prompt(4, 50), 12) == SubmitStatus::kOk);
  int steps = 0;
  int tokens = 0;
  while (scheduler.has_work()) {
    CHECK(++steps < 100);
    const auto step = scheduler.plan();
    CHECK(step != nullptr);
    tokens += commit(scheduler, *step).num_events;
    check_pages(scheduler);
  }
  CHECK_EQ(tokens, 24);
  CHECK(scheduler.stats().num_retractions > 0);
}
