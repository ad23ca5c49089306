// Pages that a step may still write are not copied to the host.
#include "fsm/transitions.h"

using namespace tokenspeed;

#ifdef MUST_NOT_COMPILE
WritingBack offload(Decoding& state) { return transition(std::move(state), WriteBack{}); }
#else
WritingBack offload(Retracting& state) { return transition(std::move(state), WriteBack{}); }
#endif
