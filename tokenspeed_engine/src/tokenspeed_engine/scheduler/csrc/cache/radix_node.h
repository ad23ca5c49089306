// A node of the prefix cache: a run of pages, and where their keys and values are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "block_hash.h"
#include "page_allocator.h"
#include "token.h"

namespace tokenspeed::detail {

struct RadixNode;
struct TransferRecord;

// Orders siblings by the tokens of their first page, which never change while a node is in its parent's set.
struct FirstPageLess {
  using is_transparent = void;
  std::size_t page_size;
  bool operator()(const std::unique_ptr<RadixNode>& a, const std::unique_ptr<RadixNode>& b) const;
  bool operator()(const std::unique_ptr<RadixNode>& a, std::span<const TokenId> page) const;
  bool operator()(std::span<const TokenId> page, const std::unique_ptr<RadixNode>& b) const;
};

// In which order of eviction a node stands. A node is in one at most, besides the index of duplicates.
enum class EvictionPlace : std::int8_t {
  kNone,
  kDirtyLeaf,  // on the device alone, no child on the device, unlocked
  kCleanLeaf,  // the same with a copy on the host
  kHostLeaf,   // on the host alone, no child at all, unlocked
};

struct RadixNode {
  RadixNode(PageAllocator& device, PageAllocator& host, PageAllocator& window, PageAllocator& snapshots, std::size_t page_size,
            RadixNode* parent_node, std::uint64_t number)
      : parent(parent_node),
        pages(device),
        host_pages(host),
        window_pages(window),
        snapshot(snapshots),
        children(FirstPageLess{page_size}),
        construction_number(number) {}

  RadixNode* parent;            // null for the root of a salt
  std::vector<TokenId> tokens;  // page_size for each page
  // One page in each of these for each page of tokens, or none: a node is on the device, on the host, or on both.
  OwnedPages pages;
  OwnedPages host_pages;
  OwnedPages window_pages;  // the same of the layers that see a window only; gone where no window needs them
  OwnedPages snapshot;      // one slot with the state after the node's last token, or none
  std::set<std::unique_ptr<RadixNode>, FirstPageLess> children;
  std::uint64_t construction_number;
  std::uint64_t last_use = 0;
  std::int64_t last_use_us = 0;      // the clock at that time: as much later as last_use is, or at the same time
  std::int32_t locks = 0;            // references to this node, transfers of it, plus children that are locked
  std::int32_t keeps = 0;            // the same for references that only need some copy to stay
  std::int32_t device_children = 0;  // children that hold device pages, valid or on their way
  std::int32_t window_locks = 0;     // references whose window reaches into this node
  std::int32_t borrows = 0;          // readers of the snapshot
  std::uint64_t window_use = 0;      // logical time at which the last window left the node; 0: none reached it
  std::uint64_t snapshot_use = 0;    // logical time at which the snapshot was made or last read
  EvictionPlace place = EvictionPlace::kNone;
  bool in_window_index = false;
  bool in_snapshot_index = false;
  bool is_duplicate = false;       // among the host copies that the device makes redundant
  bool counts_as_clean = false;    // its pages are in the tree's count of unlocked pages with a host copy
  bool is_stored = false;          // its pages were given to the external store
  bool waits_for_store = false;    // in the index of what the external store lacks
  TransferRecord* transfer = nullptr;  // between the tiers, in flight; the pages on the receiving side are not valid yet
  TransferRecord* store = nullptr;     // to the external store, in flight
  std::string salt;                    // of a root
  std::vector<BlockHash> hashes;       // of the first hashes.size() pages; computed when somebody asks

  bool is_root() const noexcept { return parent == nullptr; }
  bool on_device() const noexcept { return !pages.empty(); }
};

// Least recently used first; equal times in the order of construction: never an address, a hash or a clock.
struct LeastRecentlyUsedFirst {
  using is_transparent = void;
  // Finds the first node that was used at this time of the clock or later.
  bool operator()(const RadixNode* a, std::int64_t time_us) const noexcept { return a->last_use_us < time_us; }
  bool operator()(const RadixNode* a, const RadixNode* b) const noexcept {
    if (a->last_use != b->last_use) return a->last_use < b->last_use;
    return a->construction_number < b->construction_number;
  }
};

struct WindowLeftFirst {
  bool operator()(const RadixNode* a, const RadixNode* b) const noexcept {
    if (a->window_use != b->window_use) return a->window_use < b->window_use;
    return a->construction_number < b->construction_number;
  }
};

struct SnapshotLeastRecentlyUsedFirst {
  bool operator()(const RadixNode* a, const RadixNode* b) const noexcept {
    if (a->snapshot_use != b->snapshot_use) return a->snapshot_use < b->snapshot_use;
    return a->construction_number < b->construction_number;
  }
};

struct ConstructedFirst {
  bool operator()(const RadixNode* a, const RadixNode* b) const noexcept { return a->construction_number < b->construction_number; }
};

}  // namespace tokenspeed::detail
