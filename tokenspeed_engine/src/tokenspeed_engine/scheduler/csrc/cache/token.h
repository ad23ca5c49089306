#pragma once

#include <cstdint>

namespace tokenspeed {

using TokenId = std::int32_t;

}  // namespace tokenspeed
