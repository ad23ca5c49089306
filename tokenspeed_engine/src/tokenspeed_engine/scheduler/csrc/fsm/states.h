// The states of a request. What a request holds is part of the type of its state: destroying the state gives it back, once.
//
//   Bootstrapping --Bootstrapped--> Submitted
//   Bootstrapping --Abort--> Finished
//   Bootstrapping --Failed--> Finished
//   Submitted --Admit--> Prefilling
//   Submitted --Load--> LoadingBack
//   Submitted --Abort--> Finished
//   Submitted --Failed--> Finished
//   LoadingBack --Loaded--> Prefilling
//   LoadingBack --RemotePrefillDone--> Decoding
//   LoadingBack --Retract--> Retracting
//   LoadingBack --Abort--> Aborting
//   LoadingBack --Failed--> Draining
//   Prefilling --LastChunkPlanned--> Decoding
//   Prefilling --HandOver--> PrefillDone
//   Prefilling --Retract--> Retracting
//   Prefilling --Abort--> Aborting
//   Prefilling --Failed--> Draining
//   PrefillDone --Succeeded--> Draining
//   PrefillDone --Failed--> Draining
//   PrefillDone --Abort--> Aborting
//   Decoding --Finish--> Draining
//   Decoding --Retract--> Retracting
//   Decoding --Abort--> Aborting
//   Retracting --Finish--> Draining
//   Retracting --WriteBack--> WritingBack
//   Retracting --Drained--> Retracted
//   Retracting --Abort--> Aborting
//   Retracting --Failed--> Draining
//   WritingBack --Drained--> Retracted
//   WritingBack --Abort--> Aborting
//   WritingBack --Failed--> Draining
//   Retracted --Admit--> Prefilling
//   Retracted --Load--> LoadingBack
//   Retracted --Abort--> Finished
//   Retracted --Failed--> Finished
//   Draining --Park--> Paused
//   Draining --Drained--> Finished
//   Aborting --Drained--> Finished
//   Paused --Offload--> Paused
//   Paused --Resume--> Finished
//   Paused --Expire--> Finished
//
// LoadingBack, WritingBack, PrefillDone, Retracting, Draining and Aborting keep their pages because a step or a transfer that is
// still in flight may read or write them; Drained is the event that none is left.
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

// Prefill and decode run on different engines, and the two have not found each other yet; holds nothing.
struct Bootstrapping {
  static constexpr std::string_view kName = "Bootstrapping";
};
// Waits for its first admission; holds nothing.
struct Submitted {
  static constexpr std::string_view kName = "Submitted";
};
// Its pages are being filled from outside: from the host, or by the engine that computes its prompt.
struct LoadingBack {
  static constexpr std::string_view kName = "LoadingBack";
  KvHold kv;
};
// Some of its known tokens (prompt, or prompt and output after a retraction) are still to be computed.
struct Prefilling {
  static constexpr std::string_view kName = "Prefilling";
  KvHold kv;
};
// Its prompt was computed for another engine, which still reads the pages.
struct PrefillDone {
  static constexpr std::string_view kName = "PrefillDone";
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
// Put back to the queue; its pages are being copied to the host, so that they need not be computed again.
struct WritingBack {
  static constexpr std::string_view kName = "WritingBack";
  KvHold kv;
};
// In the queue again, before all that never ran; holds nothing but its tokens.
struct Retracted {
  static constexpr std::string_view kName = "Retracted";
};
// Ended by itself; a step that was planned before its end was known, or a transfer, is in flight.
struct Draining {
  static constexpr std::string_view kName = "Draining";
  KvHold kv;
};
// Ended by its user; a step or a transfer is in flight.
struct Aborting {
  static constexpr std::string_view kName = "Aborting";
  KvHold kv;
};
// Over, but its conversation goes on: what it computed stays in the prefix cache for the next turn.
struct Paused {
  static constexpr std::string_view kName = "Paused";
  NodeRef prefix;  // on the device, or
  KeepRef kept;    // on the host
};
// Over; holds nothing.
struct Finished {
  static constexpr std::string_view kName = "Finished";
};

using RequestState = std::variant<Bootstrapping, Submitted, LoadingBack, Prefilling, PrefillDone, Decoding, Retracting, WritingBack,
                                  Retracted, Draining, Aborting, Paused, Finished>;

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
