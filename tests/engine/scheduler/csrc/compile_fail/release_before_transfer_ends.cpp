// Success of a transfer does not give pages back while a step may write them: the way goes through Draining.
#include "fsm/transitions.h"

using namespace tokenspeed;

#ifdef MUST_NOT_COMPILE
Finished end(PrefillDone& state) { return transition(std::move(state), Succeeded{}); }
#else
Draining end(PrefillDone& state) { return transition(std::move(state), Succeeded{}); }
#endif
