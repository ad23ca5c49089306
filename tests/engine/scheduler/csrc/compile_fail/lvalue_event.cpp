// An event that carries pages is consumed as well.
#include "fsm/transitions.h"

using namespace tokenspeed;

Prefilling advance(Submitted& state, Admit& event) {
#ifdef MUST_NOT_COMPILE
  return transition(std::move(state), event);
#else
  return transition(std::move(state), std::move(event));
#endif
}
