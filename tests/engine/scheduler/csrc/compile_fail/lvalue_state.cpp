// A transition consumes its state: an lvalue is not accepted.
#include "fsm/transitions.h"

using namespace tokenspeed;

Decoding advance(Prefilling& state) {
#ifdef MUST_NOT_COMPILE
  return transition(state, LastChunkPlanned{});
#else
  return transition(std::move(state), LastChunkPlanned{});
#endif
}
