// A row of the page table has one holder.
#include "cache/row_pool.h"

using namespace tokenspeed;

RowLease pass_on(RowLease& row) {
#ifdef MUST_NOT_COMPILE
  return RowLease(row);
#else
  return RowLease(std::move(row));
#endif
}
