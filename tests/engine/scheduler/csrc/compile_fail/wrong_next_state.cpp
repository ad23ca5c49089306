// The next state is part of the transition's type: an abort of a request with pages does not skip the wait for steps in flight.
#include "fsm/transitions.h"

using namespace tokenspeed;

#ifdef MUST_NOT_COMPILE
Finished advance(Decoding& state) { return transition(std::move(state), Abort{}); }
#else
Aborting advance(Decoding& state) { return transition(std::move(state), Abort{}); }
#endif
