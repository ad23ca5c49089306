// Every transition that exists, as a function from an rvalue state to the next. There is no catch-all: what is not written here
// does not compile, and an lvalue state is not accepted, so that no state is left behind that still seems to own something.
#pragma once

#include <string_view>
#include <utility>

#include "states.h"

namespace tokenspeed {

// The scheduler gives the request a row, its cached prefix and pages for its first chunk.
struct Admit {
  static constexpr std::string_view kName = "Admit";
  KvHold kv;
};
// The step just planned computes the last of the known tokens.
struct LastChunkPlanned {
  static constexpr std::string_view kName = "LastChunkPlanned";
};
// Pages ran out and this request gives way.
struct Retract {
  static constexpr std::string_view kName = "Retract";
};
// The token just committed was its last.
struct Finish {
  static constexpr std::string_view kName = "Finish";
};
// The user wants no more of it.
struct Abort {
  static constexpr std::string_view kName = "Abort";
};
// No step in flight contains the request any more.
struct Drained {
  static constexpr std::string_view kName = "Drained";
};

inline Prefilling transition(Submitted&&, Admit&& event) { return {std::move(event.kv)}; }
inline Prefilling transition(Retracted&&, Admit&& event) { return {std::move(event.kv)}; }

inline Decoding transition(Prefilling&& state, LastChunkPlanned&&) { return {std::move(state.kv)}; }

inline Retracting transition(Prefilling&& state, Retract&&) { return {std::move(state.kv)}; }
inline Retracting transition(Decoding&& state, Retract&&) { return {std::move(state.kv)}; }

inline Draining transition(Decoding&& state, Finish&&) { return {std::move(state.kv)}; }
inline Draining transition(Retracting&& state, Finish&&) { return {std::move(state.kv)}; }

inline Finished transition(Submitted&&, Abort&&) { return {}; }
inline Finished transition(Retracted&&, Abort&&) { return {}; }
inline Aborting transition(Prefilling&& state, Abort&&) { return {std::move(state.kv)}; }
inline Aborting transition(Decoding&& state, Abort&&) { return {std::move(state.kv)}; }
inline Aborting transition(Retracting&& state, Abort&&) { return {std::move(state.kv)}; }

// The old state is moved into a local, which gives its pages back at the end of the function.
inline Retracted transition(Retracting&& state, Drained&&) {
  const KvHold released = std::move(state.kv);
  return {};
}
inline Finished transition(Draining&& state, Drained&&) {
  const KvHold released = std::move(state.kv);
  return {};
}
inline Finished transition(Aborting&& state, Drained&&) {
  const KvHold released = std::move(state.kv);
  return {};
}

template <class State, class Event>
concept HasTransition = requires(State&& state, Event&& event) { transition(std::move(state), std::move(event)); };

}  // namespace tokenspeed
