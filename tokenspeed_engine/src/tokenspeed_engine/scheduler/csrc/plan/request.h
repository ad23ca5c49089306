// One request: its tokens, its limits, how far it has come, and the state that holds its pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <variant>
#include <vector>

#include "../fsm/states.h"
#include "config.h"
#include "options.h"
#include "sequence_tokens.h"

namespace tokenspeed {

// Where the scheduler counts a request. It follows from the state, but for the two that both wait for their steps to end.
enum class Place : std::int8_t {
  kNowhere,     // over, or being made
  kWaiting,     // in the queue
  kPrefilling,  // among the running ones
  kDecoding,    // among the running ones
  kRetracting,  // in the queue; its pages come back with a commit
  kDraining,    // its pages come back with a commit
  kOutside,     // waits for another engine or for copies
};

struct TenantAccount;

struct Request {
  // What was asked for.
  std::int64_t id = 0;
  std::uint64_t arrival = 0;  // position in the order of submission
  std::int32_t num_prompt = 0;
  std::int32_t max_new_tokens = 0;
  std::int32_t min_new_tokens = 0;
  bool use_prefix_cache = true;
  SequenceTokens tokens;  // prompt, then sampled tokens

  RequestState state{Submitted{}};
  Place place = Place::kNowhere;

  // How far it has come since it was last admitted, in tokens of the sequence.
  std::int32_t num_planned = 0;    // in the cache once all planned steps have run
  std::int32_t num_committed = 0;  // in the cache now
  std::int32_t num_shared_pages = 0;  // leading pages that the prefix cache owns
  std::int32_t num_table_pages = 0;   // entries of its row in the page table
  std::int32_t row = -1;
  std::int32_t promised_pages = 0;    // pages that its admission counted on and that it has not taken yet

  std::int32_t in_flight_steps = 0;    // planned steps, not committed, that contain it
  std::int32_t in_flight_samples = 0;  // those of them that yield a token
  std::int32_t in_flight_transfers = 0;  // copies, or a transport to another engine, that touch its own pages
  TransferId write_back = kNoTransfer;   // the copy that it waits for in WritingBack
  bool avoids_host = false;    // a load for it failed: it computes what the device does not have
  bool awaits_remote = false;  // the other engine has its part still to do
  bool is_kept = false;        // it ended well: its session may keep what it computed
  bool admitted_before = false;
  std::int32_t num_cached_tokens = 0;  // prompt tokens found in the prefix cache when it was first admitted
  std::int32_t num_host_cached_tokens = 0;  // those of them that came from the host
  std::int32_t num_computed_high_water = 0;  // most tokens that were ever planned: what lies below is recomputation

  // Read less often than every step: behind what is.
  std::vector<TokenId> stop_token_ids;
  RequestOptions options;
  // How it is served; see queue.h.
  TenantAccount* account = nullptr;  // of its tenant, as long as it lives
  bool has_live_deadline = false;    // a deadline that can still be met
  bool is_due = false;               // passed over too often: goes before all, and is not pre-empted for priority
  std::int32_t num_charged = 0;      // tokens that were found in the cache or are on its tenant's account
  std::int32_t num_hit_pages = 0;    // leading pages that the prefix cache had when it was admitted
  std::int64_t last_prompt_step = -1;  // the last step with a chunk of it

  std::int32_t num_known() const { return static_cast<std::int32_t>(tokens.size()); }
  std::int32_t num_sampled() const { return num_known() - num_prompt; }
  // Tokens whose keys and values are ever needed: the last sampled token is never computed.
  std::int32_t most_cached_tokens() const { return num_prompt + max_new_tokens - 1; }
  bool is_prefilling() const { return std::holds_alternative<Prefilling>(state); }
  bool is_decoding() const { return std::holds_alternative<Decoding>(state); }
  bool is_retracting() const {
    return std::holds_alternative<Retracting>(state) || std::holds_alternative<WritingBack>(state);
  }
  bool is_stop(TokenId token) const {
    return std::find(stop_token_ids.begin(), stop_token_ids.end(), token) != stop_token_ids.end();
  }
};

}  // namespace tokenspeed
