// Pages have one owner: the handle cannot be copied.
#include "cache/page_allocator.h"

using namespace tokenspeed;

OwnedPages pass_on(OwnedPages& pages) {
#ifdef MUST_NOT_COMPILE
  return OwnedPages(pages);
#else
  return OwnedPages(std::move(pages));
#endif
}
