// Calls of the scheduler that carry page hashes, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <string>

#include "../plan/scheduler.h"

namespace tokenspeed {

nanobind::tuple missing_hashes(Scheduler& scheduler, std::span<const TokenId> tokens, const std::string& salt);
nanobind::tuple reserve_host_pages(Scheduler& scheduler, std::int32_t count);
nanobind::tuple begin_store(Scheduler& scheduler, std::int32_t max_pages);
nanobind::list take_kv_events(Scheduler& scheduler);

}  // namespace tokenspeed
