// The one place where state and event meet at run time. A pair without a transition is an error value for that request alone.
#pragma once

#include <optional>
#include <string_view>
#include <utility>

#include "transitions.h"

namespace tokenspeed {

struct TransitionError {
  std::string_view state;
  std::string_view event;
};

// Takes `state` to its next state. Returns nothing on success; on an error the state and what the event carries are untouched.
template <class Event>
[[nodiscard]] std::optional<TransitionError> dispatch(RequestState& state, Event&& event) {
  static_assert(std::is_rvalue_reference_v<Event&&>, "an event is consumed");
  return std::visit(
      [&]<class State>(State& current) -> std::optional<TransitionError> {
        if constexpr (HasTransition<State, Event>) {
          state = transition(std::move(current), std::move(event));
          return std::nullopt;
        } else {
          return TransitionError{State::kName, Event::kName};
        }
      },
      state);
}

}  // namespace tokenspeed
