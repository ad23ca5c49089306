// What a request says about itself beyond its tokens and lengths. The names of sessions, salts and tenants are numbers here: whoever
// receives the request turns text into them, the same on every rank.
#pragma once

#include <cstdint>

namespace tokenspeed {

struct RequestOptions {
  std::int64_t session = 0;         // the conversation that it belongs to; 0: none
  std::uint64_t salt = 0;           // requests share cached pages only with those of equal salt
  std::int32_t priority = 0;        // class; a smaller one goes first
  std::int64_t tenant = 0;          // whose share of the machine it uses
  std::int32_t tenant_weight = 1;   // that share, against the weights of other tenants
  std::int64_t deadline_us = -1;    // when its first token is due, on the clock of advance_clock; -1: never
};

}  // namespace tokenspeed
