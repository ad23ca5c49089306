// Only a prompt that is being computed can be handed over to another engine.
#include "fsm/transitions.h"

using namespace tokenspeed;

#ifdef MUST_NOT_COMPILE
PrefillDone hand_over(Decoding& state) { return transition(std::move(state), HandOver{}); }
#else
PrefillDone hand_over(Prefilling& state) { return transition(std::move(state), HandOver{}); }
#endif
