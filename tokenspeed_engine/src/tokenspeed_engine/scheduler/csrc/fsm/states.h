// The states of a request. What a request holds is part of the type of its state: destroying the state gives it back, once.
//
//   Submitted --Admit--> Prefilling --LastChunkPlanned--> Decoding
//   Prefilling, Decoding --Retract--> Retracting --Drained--> Retracted --Admit--> Prefilling
//   Decoding, Retracting --Finish--> Draining --Drained--> Finished
//   Prefilling, Decoding, Retracting --Abort--> Aborting --Drained--> Finished
//   Submitted, Retracted --Abort--> Finished
//
// Retracting, Draining and Aborting keep their pages because a step that is still in flight may write them; Drained is the event
// that no such step is left.
#pragma once

#include <concepts>
#include <string_view>
#include <type_traits>
#include <variant>

#include "../cache/page_allocator.h"
#include "../cache/radix_tree.h"
#include "../cache/row_pool.h"

namespace tokenspeed {

// Everything that a request on the device holds. Members go in reverse order: own pages, then the lock on the prefix, then the row.
struct KvHold {
  RowLease row;       // its row in the page table
  NodeRef prefix;     // full, committed pages: shared through the prefix cache
  OwnedPages pages;   // pages behind them that only this request may write
};

// Waits for its first admission; holds nothing.
struct Submitted {
  static constexpr std::string_view kName = "Submitted";
};
// Some of its known tokens (prompt, or prompt and output after a retraction) are still to be computed.
struct Prefilling {
  static constexpr std::string_view kName = "Prefilling";
  KvHold kv;
};
// All known tokens are planned: each further step computes the token that the step before sampled.
struct Decoding {
  static constexpr std::string_view kName = "Decoding";
  KvHold kv;
};
// Put back to the queue for want of pages. Steps in flight still write its pages, and their tokens count.
struct Retracting {
  static constexpr std::string_view kName = "Retracting";
  KvHold kv;
};
// In the queue again, before all that never ran; holds nothing but its tokens.
struct Retracted {
  static constexpr std::string_view kName = "Retracted";
};
// Ended by itself; a step that was planned before its end was known is in flight.
struct Draining {
  static constexpr std::string_view kName = "Draining";
  KvHold kv;
};
// Ended by its user; a step is in flight.
struct Aborting {
  static constexpr std::string_view kName = "Aborting";
  KvHold kv;
};
// Over; holds nothing.
struct Finished {
  static constexpr std::string_view kName = "Finished";
};

using RequestState =
    std::variant<Submitted, Prefilling, Decoding, Retracting, Retracted, Draining, Aborting, Finished>;

template <class State>
concept HoldsKv = requires(State& state) {
  { state.kv } -> std::same_as<KvHold&>;
};

static_assert(!std::is_copy_constructible_v<KvHold> && std::is_nothrow_move_constructible_v<KvHold>);
static_assert(!std::is_copy_constructible_v<RequestState> && std::is_nothrow_move_constructible_v<RequestState>);

// What the state holds, or null.
inline KvHold* held_kv(RequestState& state) noexcept {
  return std::visit(
      []<class State>(State& s) -> KvHold* {
        if constexpr (HoldsKv<State>) {
          return &s.kv;
        } else {
          return nullptr;
        }
      },
      state);
}

inline std::string_view state_name(const RequestState& state) noexcept {
  return std::visit([]<class State>(const State&) { return State::kName; }, state);
}

}  // namespace tokenspeed
