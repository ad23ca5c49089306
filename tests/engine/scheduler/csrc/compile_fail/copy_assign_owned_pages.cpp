// Nor by assignment.
#include "cache/page_allocator.h"

using namespace tokenspeed;

void pass_on(OwnedPages& from, OwnedPages& to) {
#ifdef MUST_NOT_COMPILE
  to = from;
#else
  to = std::move(from);
#endif
}
