// Every transition that exists, as a function from an rvalue state to the next. There is no catch-all: what is not written here
// does not compile, and an lvalue state is not accepted, so that no state is left behind that still seems to own something.
#pragma once

#include <string_view>
#include <utility>

#include "states.h"

namespace tokenspeed {

// Prefill and decode engine have found each other.
struct Bootstrapped {
  static constexpr std::string_view kName = "Bootstrapped";
};
// The scheduler gives the request a row, its cached prefix and pages for its first chunk.
struct Admit {
  static constexpr std::string_view kName = "Admit";
  KvHold kv;
};
// The scheduler gives the request a row and pages that are filled from outside.
struct Load {
  static constexpr std::string_view kName = "Load";
  KvHold kv;
};
// The copies from the host that its first step needs are there.
struct Loaded {
  static constexpr std::string_view kName = "Loaded";
};
// The other engine has written all pages of the prompt, and will write no more.
struct RemotePrefillDone {
  static constexpr std::string_view kName = "RemotePrefillDone";
};
// The step just planned computes the last of the known tokens.
struct LastChunkPlanned {
  static constexpr std::string_view kName = "LastChunkPlanned";
};
// The same for a request that another engine decodes.
struct HandOver {
  static constexpr std::string_view kName = "HandOver";
};
// The other engine has read all pages.
struct Succeeded {
  static constexpr std::string_view kName = "Succeeded";
};
// The other engine is lost, or gave up; it neither reads nor writes any more.
struct Failed {
  static constexpr std::string_view kName = "Failed";
};
// Pages ran out and this request gives way.
struct Retract {
  static constexpr std::string_view kName = "Retract";
};
// No step writes its pages any more; they are worth copying to the host.
struct WriteBack {
  static constexpr std::string_view kName = "WriteBack";
};
// The token just committed was its last.
struct Finish {
  static constexpr std::string_view kName = "Finish";
};
// The user wants no more of it.
struct Abort {
  static constexpr std::string_view kName = "Abort";
};
// No step or transfer in flight touches the request's pages any more.
struct Drained {
  static constexpr std::string_view kName = "Drained";
};
// The same for the last request of a conversation that goes on.
struct Park {
  static constexpr std::string_view kName = "Park";
};
// The pages of the conversation have copies on the host, and their place on the device is wanted.
struct Offload {
  static constexpr std::string_view kName = "Offload";
  KeepRef kept;
};
// The next turn of the conversation took over what was kept for it.
struct Resume {
  static constexpr std::string_view kName = "Resume";
};
// The next turn did not come in time, or its pages were needed.
struct Expire {
  static constexpr std::string_view kName = "Expire";
};

inline Submitted transition(Bootstrapping&&, Bootstrapped&&) { return {}; }

inline Prefilling transition(Submitted&&, Admit&& event) { return {std::move(event.kv)}; }
inline Prefilling transition(Retracted&&, Admit&& event) { return {std::move(event.kv)}; }

inline LoadingBack transition(Submitted&&, Load&& event) { return {std::move(event.kv)}; }
inline LoadingBack transition(Retracted&&, Load&& event) { return {std::move(event.kv)}; }

inline Prefilling transition(LoadingBack&& state, Loaded&&) { return {std::move(state.kv)}; }

inline Decoding transition(LoadingBack&& state, RemotePrefillDone&&) { return {std::move(state.kv)}; }

inline Decoding transition(Prefilling&& state, LastChunkPlanned&&) { return {std::move(state.kv)}; }

inline PrefillDone transition(Prefilling&& state, HandOver&&) { return {std::move(state.kv)}; }

inline Draining transition(PrefillDone&& state, Succeeded&&) { return {std::move(state.kv)}; }

inline Retracting transition(LoadingBack&& state, Retract&&) { return {std::move(state.kv)}; }
inline Retracting transition(Prefilling&& state, Retract&&) { return {std::move(state.kv)}; }
inline Retracting transition(Decoding&& state, Retract&&) { return {std::move(state.kv)}; }

inline WritingBack transition(Retracting&& state, WriteBack&&) { return {std::move(state.kv)}; }

inline Draining transition(Decoding&& state, Finish&&) { return {std::move(state.kv)}; }
inline Draining transition(Retracting&& state, Finish&&) { return {std::move(state.kv)}; }

inline Finished transition(Bootstrapping&&, Failed&&) { return {}; }
inline Finished transition(Submitted&&, Failed&&) { return {}; }
inline Draining transition(LoadingBack&& state, Failed&&) { return {std::move(state.kv)}; }
inline Draining transition(Prefilling&& state, Failed&&) { return {std::move(state.kv)}; }
inline Draining transition(PrefillDone&& state, Failed&&) { return {std::move(state.kv)}; }
inline Draining transition(Retracting&& state, Failed&&) { return {std::move(state.kv)}; }
inline Draining transition(WritingBack&& state, Failed&&) { return {std::move(state.kv)}; }
inline Finished transition(Retracted&&, Failed&&) { return {}; }

inline Finished transition(Bootstrapping&&, Abort&&) { return {}; }
inline Finished transition(Submitted&&, Abort&&) { return {}; }
inline Aborting transition(LoadingBack&& state, Abort&&) { return {std::move(state.kv)}; }
inline Aborting transition(Prefilling&& state, Abort&&) { return {std::move(state.kv)}; }
inline Aborting transition(PrefillDone&& state, Abort&&) { return {std::move(state.kv)}; }
inline Aborting transition(Decoding&& state, Abort&&) { return {std::move(state.kv)}; }
inline Aborting transition(Retracting&& state, Abort&&) { return {std::move(state.kv)}; }
inline Aborting transition(WritingBack&& state, Abort&&) { return {std::move(state.kv)}; }
inline Finished transition(Retracted&&, Abort&&) { return {}; }

// The old state is moved into a local, which gives its pages back at the end of the function.
inline Retracted transition(Retracting&& state, Drained&&) {
  const KvHold released = std::move(state.kv);
  return {};
}
inline Retracted transition(WritingBack&& state, Drained&&) {
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
inline Paused transition(Draining&& state, Park&&) {
  KvHold released = std::move(state.kv);
  return {std::move(released.prefix), KeepRef()};
}
inline Paused transition(Paused&& state, Offload&& event) {
  const NodeRef released = std::move(state.prefix);
  return {NodeRef(), std::move(event.kept)};
}
inline Finished transition(Paused&& state, Resume&&) {
  const Paused released = std::move(state);
  return {};
}
inline Finished transition(Paused&& state, Expire&&) {
  const Paused released = std::move(state);
  return {};
}

template <class State, class Event>
concept HasTransition = requires(State&& state, Event&& event) { transition(std::move(state), std::move(event)); };

}  // namespace tokenspeed
