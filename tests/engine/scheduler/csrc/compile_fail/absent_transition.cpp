// What is not in the diagram does not compile: a request that holds nothing cannot be retracted.
#include "fsm/transitions.h"

using namespace tokenspeed;

#ifdef MUST_NOT_COMPILE
Retracting advance(Submitted& state) { return transition(std::move(state), Retract{}); }
#else
Retracting advance(Decoding& state) { return transition(std::move(state), Retract{}); }
#endif
