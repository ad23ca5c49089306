// What was aborted is not kept for a next turn.
#include "fsm/transitions.h"

using namespace tokenspeed;

#ifdef MUST_NOT_COMPILE
Paused keep(Aborting& state) { return transition(std::move(state), Park{}); }
#else
Paused keep(Draining& state) { return transition(std::move(state), Park{}); }
#endif
