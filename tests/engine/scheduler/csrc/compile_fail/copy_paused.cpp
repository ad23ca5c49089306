// What a conversation keeps has one owner.
#include "fsm/transitions.h"

using namespace tokenspeed;

Paused keep(Paused& state) {
#ifdef MUST_NOT_COMPILE
  return state;
#else
  return std::move(state);
#endif
}
