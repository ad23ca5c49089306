#include "budget.h"

#include <algorithm>
#include <limits>

namespace tokenspeed {

namespace {
constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;
constexpr std::int64_t kMostTimeNs = std::int64_t{60} * 1'000'000'000;  // a step that took a minute teaches nothing more
constexpr int kWindowBits = 3;  // the latest 8 steps of a kind carry most of the weight
constexpr int kSurpriseBits = 1;
constexpr std::int64_t kWeight = 1 << 10;
constexpr int kDeviationBits = 3;
constexpr std::int64_t kSlowest = 4;
constexpr std::int64_t kMostGrowth = 4;  // of a step's prompt tokens over those seen lately
constexpr std::int64_t kFirstTokens = 64;

template <class Wide>
std::int64_t clamped_time(Wide value) {
  return static_cast<std::int64_t>(std::clamp<Wide>(value, 0, kMostTimeNs));
}
template <class Wide>
std::int64_t clamped_rate(Wide value) {
  return static_cast<std::int64_t>(std::clamp<Wide>(value, 0, kMostTimeNs << 16));
}
}  // namespace

void StepTimeModel::Sums::forget(int bits) {
  for (Wide* sum : {&one, &x, &z, &y, &xx, &xy}) *sum -= *sum >> bits;
}

void StepTimeModel::Sums::add(Wide x_value, Wide z_value, Wide y_value) {
  forget(kWindowBits);
  one += kWeight;
  x += kWeight * x_value;
  z += kWeight * z_value;
  y += kWeight * y_value;
  xx += kWeight * x_value * x_value;
  xy += kWeight * x_value * y_value;
  ++num_samples;
}

std::int64_t StepTimeModel::predict_ns(std::int64_t decode_tokens, std::int64_t prefill_tokens) const {
  const Wide rates = static_cast<Wide>(decode_) * decode_tokens + static_cast<Wide>(prefill_) * prefill_tokens;
  return static_cast<std::int64_t>(std::min<Wide>(base_ns_ + (rates >> kRateBits), kMostTimeNs));
}

std::int64_t StepTimeModel::prefill_tokens_in(std::int64_t time_ns) const {
  if (time_ns <= 0) return 0;
  const Wide tokens = (static_cast<Wide>(time_ns) << kRateBits) / std::max<std::int64_t>(prefill_, 1);
  return static_cast<std::int64_t>(std::min<Wide>(tokens, kMostGrowth * most_prefill_tokens_ + kFirstTokens));
}

void StepTimeModel::learn(std::int64_t decode_tokens, std::int64_t prefill_tokens, std::int64_t time_ns) {
  decode_tokens = std::clamp<std::int64_t>(decode_tokens, 0, kMostTokens);
  prefill_tokens = std::clamp<std::int64_t>(prefill_tokens, 0, kMostTokens);
  time_ns = std::clamp<std::int64_t>(time_ns, 0, kMostTimeNs);
  Sums& sums = prefill_tokens > 0 ? with_prompts_ : without_prompts_;
  if (sums.num_samples > 0) {
    const std::int64_t predicted = predict_ns(decode_tokens, prefill_tokens);
    if (predicted > 0) time_ns = std::min(time_ns, kSlowest * predicted);
    deviation_ns_ += (std::abs(time_ns - predicted) - deviation_ns_) >> kDeviationBits;
    // Far from the prediction, what was learnt is out of date: a first step that compiled, or a machine that others use.
    if (4 * std::abs(time_ns - predicted) > predicted) sums.forget(kSurpriseBits);
  }
  sums.add(decode_tokens, prefill_tokens, time_ns);
  if (prefill_tokens == 0) {
    solve_decode();
  } else {
    most_prefill_tokens_ = std::max(prefill_tokens, most_prefill_tokens_ - (most_prefill_tokens_ >> kWindowBits));
  }
  solve_prefill();
}

void StepTimeModel::solve_decode() {
  const Sums& s = without_prompts_;
  // Where the decodes of the latest steps hardly differ, their times do not tell base and rate apart: the rate stays as it was.
  const Wide spread = s.one * s.xx - s.x * s.x;
  if (spread > (s.x * s.x) >> 6) decode_ = clamped_rate(((s.one * s.xy - s.x * s.y) << kRateBits) / spread);
  base_ns_ = clamped_time((s.y - ((static_cast<Wide>(decode_) * s.x) >> kRateBits)) / s.one);
  if (base_ns_ == 0 && s.xx > 0) decode_ = clamped_rate((s.xy << kRateBits) / s.xx);
}

void StepTimeModel::solve_prefill() {
  const Sums& s = with_prompts_;
  if (s.z == 0) return;
  const Wide decodes = static_cast<Wide>(base_ns_) * s.one + ((static_cast<Wide>(decode_) * s.x) >> kRateBits);
  prefill_ = clamped_rate(((s.y - decodes) << kRateBits) / s.z);
}

StepBudget::StepBudget(const SchedulerConfig& config)
    : max_step_cost_(config.max_step_cost),
      context_cost_scale_(config.context_cost_scale),
      unit_(config.context_cost_scale == 0 ? 1 : 2 * static_cast<std::int64_t>(config.context_cost_scale)),
      target_ns_(static_cast<std::int64_t>(config.inter_token_latency_us) * 1000) {}

// A token at position i costs (2 * scale + 2 * i) / unit, and i runs from `first` on.
std::int64_t StepBudget::cost_of(std::int64_t first, std::int64_t num_tokens) const {
  if (context_cost_scale_ == 0) return num_tokens;
  return num_tokens * (2 * context_cost_scale_ + 2 * first + num_tokens - 1);
}

void StepBudget::begin(std::int32_t num_decodes, std::int64_t decode_cost) {
  work_ = {decode_cost, 0};
  left_ = kUnbounded;
  if (max_step_cost_ > 0) {
    const std::int64_t whole = max_step_cost_ * unit_;
    left_ = std::max(whole - decode_cost, whole / 4);
  }
  if (target_ns_ > 0 && num_decodes > 0 && model_.knows_prefill()) {
    const std::int64_t beside_decodes = target_ns_ - model_.predict_ns(decode_cost / unit_, 0) - model_.deviation_ns();
    const std::int64_t tokens = std::max(model_.prefill_tokens_in(beside_decodes), model_.prefill_tokens_in(target_ns_ / 4));
    left_ = std::min(left_, std::max<std::int64_t>(tokens, 1) * unit_);
  }
}

std::int32_t StepBudget::affordable(std::int32_t first, std::int32_t num_tokens) const {
  if (cost_of(first, num_tokens) <= left_) return num_tokens;
  std::int32_t least = 0;
  while (num_tokens - least > 1) {  // `least` tokens are allowed, `num_tokens` are too many
    const std::int32_t middle = least + (num_tokens - least) / 2;
    (cost_of(first, middle) <= left_ ? least : num_tokens) = middle;
  }
  return least;
}

void StepBudget::spend(std::int32_t first, std::int32_t num_tokens) {
  const std::int64_t cost = cost_of(first, num_tokens);
  work_.prefill_cost += cost;
  left_ = left_ == kUnbounded ? left_ : left_ - cost;
}

void StepBudget::learn(const StepWork& work, std::int64_t time_us) {
  if (target_ns_ == 0 || time_us == 0) return;
  const std::int64_t time_ns = time_us > kMostTimeNs / 1000 ? kMostTimeNs : time_us * 1000;
  model_.learn(work.decode_cost / unit_, (work.prefill_cost + unit_ - 1) / unit_, time_ns);
}

}  // namespace tokenspeed
