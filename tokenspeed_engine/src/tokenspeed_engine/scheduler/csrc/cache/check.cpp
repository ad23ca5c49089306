// The whole tree held against its counters and indexes. For tests: it walks everything.
#include <algorithm>
#include <vector>

#include "../invariant.h"
#include "radix_tree.h"

namespace tokenspeed {

void RadixTree::check() const {
  std::int32_t device = 0, locked = 0, clean = 0, host = 0;
  std::int64_t nodes = 0;
  std::size_t dirty_leaves = 0, clean_leaves = 0, host_leaves = 0, duplicates = 0, waiting = 0;
  for_each_node([&](const Node& node) {
    ++nodes;
    const std::int32_t count = pages_of(node);
    TOKENSPEED_INVARIANT(count > 0 && node.tokens.size() % page_size_ == 0);
    TOKENSPEED_INVARIANT(node.on_device() || !node.host_pages.empty());
    TOKENSPEED_INVARIANT(!node.on_device() || node.pages.size() == count);
    TOKENSPEED_INVARIANT(node.host_pages.empty() || node.host_pages.size() == count);
    TOKENSPEED_INVARIANT(node.hashes.size() <= static_cast<std::size_t>(count));
    std::int32_t locked_children = 0, kept_children = 0, device_children = 0;
    for (const auto& child : node.children) {
      TOKENSPEED_INVARIANT(child->parent == &node);
      locked_children += child->locks > 0 ? 1 : 0;
      kept_children += child->keeps > 0 ? 1 : 0;
      device_children += child->on_device() ? 1 : 0;
    }
    TOKENSPEED_INVARIANT(node.locks >= locked_children && node.keeps >= kept_children && node.device_children == device_children);
    TOKENSPEED_INVARIANT(node.keeps == 0 || node.locks > 0 || host_ready(node));
    TOKENSPEED_INVARIANT((node.transfer == nullptr && node.store == nullptr) || node.locks > 0);
    TOKENSPEED_INVARIANT(node.place == place_of(node));
    dirty_leaves += node.place == Place::kDirtyLeaf ? 1 : 0;
    clean_leaves += node.place == Place::kCleanLeaf ? 1 : 0;
    host_leaves += node.place == Place::kHostLeaf ? 1 : 0;
    duplicates += node.is_duplicate ? 1 : 0;
    waiting += node.waits_for_store ? 1 : 0;
    TOKENSPEED_INVARIANT(node.is_duplicate == (host_ready(node) && device_ready(node) && node.keeps == 0 && node.store == nullptr));
    TOKENSPEED_INVARIANT(node.waits_for_store == (external_store_ && host_ready(node) && !node.is_stored && node.store == nullptr));
    device += node.pages.size();
    host += node.host_pages.size();
    locked += node.locks > 0 ? node.pages.size() : 0;
    clean += node.locks == 0 && node.on_device() && host_ready(node) ? count : 0;
    TOKENSPEED_INVARIANT(!node.is_duplicate || duplicates_.contains(const_cast<Node*>(&node)));
  });
  TOKENSPEED_INVARIANT(nodes == num_nodes_ && device == num_pages_ && host == num_host_pages_ && locked == num_locked_pages_);
  TOKENSPEED_INVARIANT(clean == num_clean_evictable_pages_);
  TOKENSPEED_INVARIANT(dirty_leaves == dirty_leaves_.size() && clean_leaves == clean_leaves_.size());
  check_groups();
  TOKENSPEED_INVARIANT(host_leaves == host_leaves_.size() && duplicates == duplicates_.size() && waiting == waiting_for_store_.size());
}

}  // namespace tokenspeed
