// Transitions that the scheduler itself causes: one that does not exist is a bug, unlike an event from outside.
#pragma once

#include <string>
#include <utility>

#include "../fsm/dispatch.h"
#include "../invariant.h"
#include "scheduler.h"

namespace tokenspeed {

template <class Event>
void Scheduler::must_dispatch(Request& request, Event&& event) {
  if (const auto error = dispatch(request.state, std::forward<Event>(event))) {
    throw InvariantError("scheduler: request " + std::to_string(request.id) + " in state " + std::string(error->state) +
                         " got " + std::string(error->event));
  }
}

}  // namespace tokenspeed
