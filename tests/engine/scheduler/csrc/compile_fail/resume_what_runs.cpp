// Only a paused conversation can be resumed.
#include "fsm/transitions.h"

using namespace tokenspeed;

#ifdef MUST_NOT_COMPILE
Finished resume(Draining& state) { return transition(std::move(state), Resume{}); }
#else
Finished resume(Paused& state) { return transition(std::move(state), Resume{}); }
#endif
