// Copies between the tiers: what a plan asks for, and what is told about their ends.
#include "transfers.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "scheduler.h"

namespace tokenspeed {

Transfers Scheduler::take_transfers() {
  if (!remote_prefills_.empty()) {
    planned_transfers_.remote_prefills = std::make_shared<const std::vector<RemotePrefill>>(std::exchange(remote_prefills_, {}));
  }
  return std::exchange(planned_transfers_, Transfers{});
}

std::int32_t Scheduler::complete_transfers(std::span<const std::int64_t> ids, std::span<const bool> ok) {
  if (ids.size() != ok.size()) {
    throw std::invalid_argument("scheduler.complete_transfers: expected one entry of ok for each of " + std::to_string(ids.size()) +
                                " ids, got " + std::to_string(ok.size()));
  }
  return 0;
}

}  // namespace tokenspeed
