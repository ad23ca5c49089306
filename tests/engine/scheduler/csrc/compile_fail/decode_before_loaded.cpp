// A request whose pages are still being filled cannot be taken for one that decodes.
#include "fsm/transitions.h"

using namespace tokenspeed;

#ifdef MUST_NOT_COMPILE
Draining end(LoadingBack& state) { return transition(std::move(state), Finish{}); }
#else
Draining end(Decoding& state) { return transition(std::move(state), Finish{}); }
#endif
