// Copies of pages between the tiers, from begin to completion.
#pragma once

#include <cstdint>
#include <vector>

#include "block_hash.h"
#include "page_allocator.h"

namespace tokenspeed {

// Names a transfer in flight. Ascending in the order of begin, so that every rank has the same.
using TransferId = std::int64_t;
constexpr TransferId kNoTransfer = -1;  // there was nothing to do, or no room to do it

// One page to copy. Device to host for a write-back, host to device for a load-back.
struct PagePair {
  PageId from;
  PageId to;
};
static_assert(sizeof(PagePair) == 2 * sizeof(PageId));

// One page of the host to put into the external store.
struct StorePage {
  BlockHash hash;
  PageId page;
};

namespace detail {

struct RadixNode;

enum class TransferKind : std::int8_t { kWriteBack, kLoadBack, kStore };

// Which nodes a transfer fills. The pairs that the executor copies are a snapshot of pages; the nodes follow what happens to the tree
// meanwhile: a split puts both halves here.
struct TransferRecord {
  TransferId id;
  TransferKind kind;
  std::vector<RadixNode*> nodes;
  std::vector<RadixNode*> locked;  // on which the transfer holds a lock: the nodes as they were at begin
  RadixNode* kept = nullptr;       // end of a path whose copies on the host must all stay meanwhile, and which is locked
};

}  // namespace detail

}  // namespace tokenspeed
