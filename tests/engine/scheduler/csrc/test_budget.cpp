#include <cstdint>
#include <cstdlib>

#include "check.h"
#include "plan/budget.h"

using namespace tokenspeed;

namespace {

// A machine: base + d * decode tokens + p * prefill tokens, in ns, with a deterministic wobble of up to `wobble` per mille.
struct Machine {
  std::int64_t base_ns, decode_ns, prefill_ns, wobble;
  std::uint32_t state = 1;
  std::int64_t time_ns(std::int64_t decodes, std::int64_t prefills) {
    state = state * 1664525u + 1013904223u;
    const std::int64_t exact = base_ns + decode_ns * decodes + prefill_ns * prefills;
    return exact + exact * (static_cast<std::int64_t>(state >> 16) % (2 * wobble + 1) - wobble) / 1000;
  }
};

bool near(std::int64_t got, std::int64_t expected, std::int64_t percent) {
  return std::abs(got - expected) * 100 <= expected * percent;
}

SchedulerConfig with_target(std::int32_t target_us) {
  SchedulerConfig config;
  config.num_pages = 1 << 16;
  config.page_size = 16;
  config.max_num_seqs = 256;
  config.max_num_batched_tokens = 8192;
  config.max_model_len = 131072;
  config.inter_token_latency_us = target_us;
  return config;
}

// Runs steps of `decodes` streams beside a prompt without end; returns the last step's time.
std::int64_t run(StepBudget& budget, Machine& machine, std::int32_t decodes, int steps, std::int32_t* chunk = nullptr) {
  std::int64_t time_ns = 0;
  for (int i = 0; i < steps; ++i) {
    budget.begin(decodes, decodes * budget.unit());
    const std::int32_t tokens = std::max(budget.affordable(0, 8192), 1);
    budget.spend(0, tokens);
    time_ns = machine.time_ns(decodes, tokens);
    budget.learn(budget.work(), time_ns / 1000);
    if (chunk != nullptr) *chunk = tokens;
  }
  return time_ns;
}

}  // namespace

TEST(the_model_finds_base_and_rates) {
  StepTimeModel model;
  Machine machine{4'000'000, 20'000, 50'000, 20};
  for (int i = 0; i < 200; ++i) {
    const std::int64_t decodes = 1 + (i * 37) % 128;
    const std::int64_t prefills = i % 3 == 0 ? 100 + (i * 91) % 1000 : 0;
    model.learn(decodes, prefills, machine.time_ns(decodes, prefills));
  }
  CHECK(near(model.predict_ns(64, 0), 4'000'000 + 64 * 20'000, 8));
  CHECK(near(model.predict_ns(10, 500), 4'000'000 + 10 * 20'000 + 500 * 50'000, 8));
  CHECK(near(model.prefill_tokens_in(10'000'000), 200, 10));
}

TEST(a_long_run_of_decodes_does_not_make_it_forget_prompts) {
  StepTimeModel model;
  for (int i = 0; i < 20; ++i) model.learn(8, 400, 2'000'000 + 8 * 10'000 + 400 * 30'000);
  for (int i = 0; i < 5000; ++i) model.learn(8 + i % 16, 0, 2'000'000 + (8 + i % 16) * 10'000);
  CHECK(near(model.predict_ns(8, 400), 14'080'000, 5));
}

TEST(a_first_step_that_compiled_is_forgotten) {
  StepTimeModel model;
  model.learn(0, 512, 20'000'000'000);  // 20 s
  int steps = 0;
  for (; steps < 100 && model.predict_ns(0, 64) > 2 * 64 * 40'000; ++steps) model.learn(0, 64, 64 * 40'000);
  CHECK(steps < 40);
  for (int i = 0; i < 30; ++i) model.learn(0, 64, 64 * 40'000);
  // One slow step later, something else was slow: it counts, but not for what it was.
  model.learn(0, 64, 20'000'000'000);
  CHECK(model.predict_ns(0, 64) < 2 * 64 * 40'000);
}

TEST(steps_end_within_the_target_and_use_it) {
  for (const std::int32_t decodes : {1, 16, 200}) {
    StepBudget budget(with_target(50'000));
    Machine machine{5'000'000, 30'000, 60'000, 10};
    const std::int64_t last = run(budget, machine, decodes, 60);
    CHECK(last <= 51'000'000);
    CHECK(last >= 42'000'000);
  }
}

TEST(the_chunk_follows_a_machine_that_becomes_slower_and_faster) {
  StepBudget budget(with_target(50'000));
  Machine machine{5'000'000, 30'000, 60'000, 10};
  run(budget, machine, 16, 40);
  machine.prefill_ns = 240'000;
  CHECK(run(budget, machine, 16, 30) <= 55'000'000);
  machine.prefill_ns = 30'000;
  const std::int64_t last = run(budget, machine, 16, 60);
  CHECK(last <= 55'000'000 && last >= 35'000'000);
}

// Decodes that take the whole target alone leave prompts a quarter of what a step could hold without them.
TEST(prompts_keep_their_share_however_slow_the_decodes_are) {
  StepBudget budget(with_target(50'000));
  Machine machine{80'000'000, 30'000, 60'000, 0};
  for (int i = 0; i < 40; ++i) budget.learn({16 + i % 8, 0}, machine.time_ns(16 + i % 8, 0) / 1000);
  std::int32_t chunk = 0;
  run(budget, machine, 16, 60, &chunk);
  CHECK(chunk >= 50'000'000 / 60'000 / 4 * 8 / 10);
  CHECK(chunk <= 50'000'000 / 60'000 / 4 * 12 / 10);
}

TEST(without_decodes_or_without_measurements_the_target_bounds_nothing) {
  StepBudget budget(with_target(1000));
  budget.begin(4, 4);
  CHECK_EQ(budget.affordable(0, 8192), 8192);
  budget.learn({4, 8192}, 800'000);
  budget.begin(0, 0);
  CHECK_EQ(budget.affordable(0, 8192), 8192);
  budget.begin(4, 4);
  CHECK(budget.affordable(0, 8192) < 100);
  CHECK(budget.affordable(0, 8192) >= 1);
}

TEST(the_smaller_of_the_two_bounds_counts) {
  SchedulerConfig config = with_target(50'000);
  config.max_step_cost = 100;
  StepBudget budget(config);
  for (int i = 0; i < 20; ++i) budget.learn({8, 100}, 1000);  // 10 us a token: the target would allow thousands
  budget.begin(8, 8);
  CHECK_EQ(budget.affordable(0, 8192), 92);
}

TEST(extreme_times_do_not_overflow) {
  SchedulerConfig config = with_target(INT32_MAX);
  config.context_cost_scale = 1;
  StepBudget budget(config);
  for (int i = 0; i < 64; ++i) {
    budget.begin(256, 256 * budget.cost_of(131071, 1));
    budget.spend(100'000, std::max(budget.affordable(100'000, 8192), 1));
    budget.learn(budget.work(), i % 2 == 0 ? INT64_MAX : 1);
    CHECK(budget.model().predict_ns(256, 8192) >= 0);
    CHECK(budget.model().deviation_ns() >= 0);
  }
}
