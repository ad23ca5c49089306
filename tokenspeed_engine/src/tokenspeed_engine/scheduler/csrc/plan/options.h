// What a request says about itself beyond its tokens and lengths. The names of sessions and tenants are numbers here: whoever
// receives the request turns text into them, the same on every rank.
#pragma once

#include <cstdint>
#include <string>

namespace tokenspeed {

// Which part of the request this engine does.
enum class Role : std::int8_t {
  kLocal = 0,    // all of it
  kPrefill = 1,  // computes the prompt; another engine reads its pages and goes on
  kDecode = 2,   // another engine computes the prompt and writes its pages here
};

struct RequestOptions {
  std::int64_t session = 0;         // the conversation that it belongs to; 0: none
  std::string salt;                 // requests share cached pages only with those of equal salt
  std::int32_t priority = 0;        // class; a smaller one goes first
  std::int64_t tenant = 0;          // whose share of the machine it uses
  std::int32_t tenant_weight = 1;   // that share, against the weights of other tenants
  std::int64_t deadline_us = -1;    // when its first token is due, on the clock of advance_clock; -1: never
  Role role = Role::kLocal;
};

}  // namespace tokenspeed
