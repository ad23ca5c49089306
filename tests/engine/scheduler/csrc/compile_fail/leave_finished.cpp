// Nothing leads out of the end.
#include "fsm/transitions.h"

using namespace tokenspeed;

#ifdef MUST_NOT_COMPILE
Prefilling advance(Finished& state, Admit& event) { return transition(std::move(state), std::move(event)); }
#else
Prefilling advance(Retracted& state, Admit& event) { return transition(std::move(state), std::move(event)); }
#endif
