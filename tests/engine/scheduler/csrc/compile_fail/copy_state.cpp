// A state that holds pages cannot be copied.
#include "fsm/states.h"

using namespace tokenspeed;

RequestState pass_on(RequestState& state) {
#ifdef MUST_NOT_COMPILE
  return RequestState(state);
#else
  return RequestState(std::move(state));
#endif
}
