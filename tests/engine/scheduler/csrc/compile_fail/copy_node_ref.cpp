// A lock on the prefix cache cannot be copied.
#include "cache/radix_tree.h"

using namespace tokenspeed;

NodeRef pass_on(NodeRef& lock) {
#ifdef MUST_NOT_COMPILE
  return NodeRef(lock);
#else
  return NodeRef(std::move(lock));
#endif
}
