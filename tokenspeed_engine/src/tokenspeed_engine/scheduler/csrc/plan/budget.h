// How much prompt work a step may hold beside its decodes.
//
// Work is counted in tokens without context: a token after p others costs 1 + p / context_cost_scale. Two bounds hold, and the smaller
// one counts: max_step_cost, measured or configured before the first step, and, in steps that hold decodes, the inter-token-latency
// target through a model of step times that is learnt from the steps that ran. Decodes always run; whatever they take, prompts keep a
// quarter of what a step could hold without them, and one token in any case: so running streams are not stalled by a long prompt,
// and a long prompt always gets on.
//
// All arithmetic is on whole numbers, and the measured times are inputs like any other: the same calls give the same plans everywhere.
#pragma once

#include <cstdint>

#include "config.h"

namespace tokenspeed {

// What one step computes, in units of 1 / StepBudget::unit() tokens without context.
struct StepWork {
  std::int64_t decode_cost = 0;
  std::int64_t prefill_cost = 0;
};

// time = base + decode_tokens * d + prefill_tokens * p, with all three at least 0. Base and d come from steps without prompts, by least
// squares; p is what steps with prompts took beyond that, so that what nobody has measured yet counts as the prompts'. Steps of the two
// kinds are remembered apart: a long run of either does not make it forget the other. The latest steps count most.
class StepTimeModel {
 public:
  // Tokens are in units of tokens without context. A time far beyond the prediction counts as four times it: something else was slow.
  void learn(std::int64_t decode_tokens, std::int64_t prefill_tokens, std::int64_t time_ns);

  bool knows_prefill() const noexcept { return with_prompts_.num_samples > 0; }
  std::int64_t predict_ns(std::int64_t decode_tokens, std::int64_t prefill_tokens) const;
  // Mean distance between prediction and time.
  std::int64_t deviation_ns() const noexcept { return deviation_ns_; }
  // The most prompt tokens that take at most `time_ns` beside nothing else. Not many times what was seen lately: a rate that few tokens
  // taught may be anything.
  std::int64_t prefill_tokens_in(std::int64_t time_ns) const;

 private:
  __extension__ using Wide = __int128;
  static constexpr int kRateBits = 16;  // rates are in units of 2^-16 ns a token
  // Sums over steps of weight 1, x (decode tokens), z (prefill tokens), y (ns) and products.
  struct Sums {
    Wide one = 0, x = 0, z = 0, y = 0, xx = 0, xy = 0;
    std::int64_t num_samples = 0;
    void add(Wide x_value, Wide z_value, Wide y_value);
    void forget(int bits);
  };
  void solve_decode();
  void solve_prefill();

  Sums with_prompts_;
  Sums without_prompts_;
  std::int64_t base_ns_ = 0;
  std::int64_t decode_ = 0;   // rate
  std::int64_t prefill_ = 0;  // rate
  std::int64_t deviation_ns_ = 0;
  std::int64_t most_prefill_tokens_ = 0;  // in a step, lately
};

class StepBudget {
 public:
  explicit StepBudget(const SchedulerConfig& config);

  std::int64_t unit() const noexcept { return unit_; }
  // What `num_tokens` cost after `first` others.
  std::int64_t cost_of(std::int64_t first, std::int64_t num_tokens) const;
  // Whether the cost of decodes has any effect, so that it need not be added up otherwise.
  bool counts_work() const noexcept { return max_step_cost_ > 0 || target_ns_ > 0; }

  // A step begins whose decodes cost `decode_cost`.
  void begin(std::int32_t num_decodes, std::int64_t decode_cost);
  bool has_left() const noexcept { return left_ > 0; }
  // The most tokens, up to `num_tokens`, that what is left allows after `first` others.
  std::int32_t affordable(std::int32_t first, std::int32_t num_tokens) const;
  void spend(std::int32_t first, std::int32_t num_tokens);
  void close() noexcept { left_ = 0; }
  const StepWork& work() const noexcept { return work_; }

  // The step that did this work took so long.
  void learn(const StepWork& work, std::int64_t time_us);
  const StepTimeModel& model() const noexcept { return model_; }

 private:
  std::int64_t max_step_cost_;
  std::int64_t context_cost_scale_;
  std::int64_t unit_;
  std::int64_t target_ns_;
  std::int64_t left_ = 0;  // of the step that is being planned
  StepWork work_;
  StepTimeModel model_;
};

}  // namespace tokenspeed
