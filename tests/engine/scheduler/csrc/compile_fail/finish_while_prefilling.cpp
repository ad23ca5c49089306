// A request that has sampled nothing since its admission cannot finish.
#include "fsm/transitions.h"

using namespace tokenspeed;

#ifdef MUST_NOT_COMPILE
Draining advance(Prefilling& state) { return transition(std::move(state), Finish{}); }
#else
Draining advance(Decoding& state) { return transition(std::move(state), Finish{}); }
#endif
