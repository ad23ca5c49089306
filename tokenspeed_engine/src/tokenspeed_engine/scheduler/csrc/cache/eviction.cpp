// Who goes. Every index is an ordered set that changes with the nodes: nothing here walks what it does not evict.
#include <algorithm>
#include <utility>
#include <vector>

#include "../invariant.h"
#include "radix_tree.h"

namespace tokenspeed {

namespace {
// A device copy with a host copy behind it goes in runs of at least this many tokens: each run becomes a node of its own, and a prompt
// of 50,000 tokens that went page by page would become thousands.
constexpr std::int32_t kRunTokens = 256;
}  // namespace

detail::EvictionPlace RadixTree::place_of(const Node& node) const noexcept {
  if (node.locks > 0 || node.is_root()) return Place::kNone;
  if (node.on_device()) {
    if (node.device_children > 0) return Place::kNone;
    return node.host_pages.empty() ? Place::kDirtyLeaf : Place::kCleanLeaf;
  }
  return node.keeps == 0 && node.children.empty() && !node.host_pages.empty() ? Place::kHostLeaf : Place::kNone;
}

RadixTree::LruIndex* RadixTree::index_of(Place place) noexcept {
  switch (place) {
    case Place::kDirtyLeaf: return &dirty_leaves_;
    case Place::kCleanLeaf: return &clean_leaves_;
    case Place::kHostLeaf: return &host_leaves_;
    case Place::kNone: break;
  }
  return nullptr;
}

void RadixTree::reindex(Node& node) {
  if (const Place place = place_of(node); place != node.place) {
    if (LruIndex* index = index_of(node.place)) index->erase(&node);
    if (victim_ == &node) victim_ = nullptr;
    node.place = place;
    if (LruIndex* index = index_of(place)) index->insert(&node);
  }
  if (has_groups()) reindex_groups(node);
  if (host_ == nullptr) return;
  const bool has_copy = host_ready(node);
  if (const bool is_duplicate = has_copy && device_ready(node) && node.keeps == 0 && node.store == nullptr;
      is_duplicate != node.is_duplicate) {
    node.is_duplicate = is_duplicate;
    if (is_duplicate) {
      duplicates_.insert(&node);
    } else {
      duplicates_.erase(&node);
    }
  }
  if (const bool is_clean = has_copy && node.on_device() && node.locks == 0; is_clean != node.counts_as_clean) {
    node.counts_as_clean = is_clean;
    num_clean_evictable_pages_ += is_clean ? pages_of(node) : -pages_of(node);
  }
  if (const bool waits = external_store_ && has_copy && !node.is_stored && node.store == nullptr; waits != node.waits_for_store) {
    node.waits_for_store = waits;
    if (waits) {
      waiting_for_store_.insert(&node);
    } else {
      waiting_for_store_.erase(&node);
    }
  }
}

void RadixTree::leave_indexes(Node& node) noexcept {
  if (LruIndex* index = index_of(node.place)) index->erase(&node);
  if (victim_ == &node) victim_ = nullptr;
  node.place = Place::kNone;
  if (node.is_duplicate) duplicates_.erase(&node);
  if (node.counts_as_clean) num_clean_evictable_pages_ -= pages_of(node);
  if (node.waits_for_store) waiting_for_store_.erase(&node);
  if (has_groups()) leave_group_indexes(node);
}

// Classes of idle time from the one that is worth least, and in a class the longest idle: a bounded number of look-ups in an ordered set.
detail::RadixNode* RadixTree::first_to_go(const LruIndex& index) const {
  if (!adaptive_ || !return_times_.is_known() || index.size() == 1) return *index.begin();
  for (const int idle_class : return_times_.order()) {
    const bool is_last = idle_class + 1 == ReturnTimes::kNumClasses;
    // Idle for less than the next class: used after that long ago.
    const auto found = is_last ? index.begin() : index.lower_bound(now_us_ - ReturnTimes::shortest_us(idle_class + 1) + 1);
    if (found != index.end() && now_us_ - (*found)->last_use_us >= ReturnTimes::shortest_us(idle_class)) return *found;
  }
  return *index.begin();
}

bool RadixTree::goes_before(const Node& a, const Node& b) const {
  if (adaptive_ && return_times_.is_known()) {
    if ((a.locks > 0) != (b.locks > 0)) return a.locks == 0;
    const int rank_a = rank_of(a), rank_b = rank_of(b);
    if (rank_a != rank_b) return rank_a < rank_b;
  }
  return detail::LeastRecentlyUsedFirst{}(&a, &b);
}

// Who is evicted goes on being evicted, as long as it may: it is looked for once.
detail::RadixNode* RadixTree::device_victim(EvictMode mode) {
  if (adaptive_ && victim_ != nullptr && (mode == EvictMode::kAny || victim_->place == Place::kCleanLeaf)) return victim_;
  Node* clean = clean_leaves_.empty() ? nullptr : first_to_go(clean_leaves_);
  Node* dirty = mode == EvictMode::kCleanOnly || dirty_leaves_.empty() ? nullptr : first_to_go(dirty_leaves_);
  victim_ = dirty == nullptr || (clean != nullptr && goes_before(*clean, *dirty)) ? clean : dirty;
  return victim_;
}

std::int32_t RadixTree::evict(std::int32_t max_pages, EvictMode mode) {
  std::int32_t evicted = 0;
  while (evicted < max_pages) {
    Node* node = device_victim(mode);
    if (node == nullptr) break;
    evicted += node->place == Place::kCleanLeaf ? evict_clean(*node, max_pages - evicted) : evict_dirty(*node, max_pages - evicted);
  }
  return evicted;
}

std::int32_t RadixTree::evict_clean(Node& node, std::int32_t max_pages) {
  const auto run = static_cast<std::int32_t>((kRunTokens + page_size_ - 1) / page_size_);
  const std::int32_t count = std::min(std::max(max_pages, run), pages_of(node));
  if (count < pages_of(node)) split(node, pages_of(node) - count);
  tell_removed(node, 0, count, Tier::kDevice);
  take_device_pages(node);
  return count;
}

std::int32_t RadixTree::evict_dirty(Node& node, std::int32_t max_pages) {
  if (!node.children.empty()) remove_descendants(node);  // only the host has them, and nothing leads there any more
  const std::int32_t count = std::min(max_pages, pages_of(node));
  if (count == pages_of(node)) {
    remove_leaf(node);
    return count;
  }
  tell_removed(node, pages_of(node) - count, count, Tier::kDevice);
  num_pages_ -= count;
  node.pages.take_back(count).release();
  if (!node.window_pages.empty()) {
    num_window_pages_ -= count;
    node.window_pages.take_back(count).release();
  }
  if (!node.snapshot.empty()) drop_snapshot(node);  // of an end that is no more
  drop_end(node, count);
  return count;
}

void RadixTree::drop_end(Node& node, std::int32_t num_pages) {
  const auto left = static_cast<std::size_t>(pages_of(node) - num_pages);
  node.tokens.resize(left * page_size_);
  if (node.hashes.size() > left) node.hashes.resize(left);
}

void RadixTree::remove_leaf(Node& node) {
  TOKENSPEED_INVARIANT(node.children.empty() && node.locks == 0 && node.keeps == 0);
  Node& parent = *node.parent;
  // What is left of a path that was used at the same time still waits for its return; here the last of it goes.
  if (adaptive_ && node.last_use > 0 && (parent.is_root() || parent.locks > 0 || parent.last_use != node.last_use)) {
    return_times_.given_up(now_us_ - node.last_use_us);
  }
  if (node.on_device()) {
    tell_removed(node, 0, pages_of(node), Tier::kDevice);
    num_pages_ -= node.pages.size();
    --parent.device_children;
  }
  if (!node.host_pages.empty()) {
    tell_removed(node, 0, pages_of(node), Tier::kHost);
    num_host_pages_ -= node.host_pages.size();
  }
  num_window_pages_ -= node.window_pages.size();
  num_snapshots_ -= node.snapshot.size();
  leave_indexes(node);
  parent.children.erase(parent.children.find(first_page(node)));  // destroys the node, which gives its pages back
  --num_nodes_;
  if (parent.is_root()) {
    drop_unused_root(parent);
  } else {
    reindex(parent);
  }
}

void RadixTree::remove_descendants(Node& node) {
  std::vector<Node*> found;
  const auto add_children = [&](const Node& of) {
    for (const auto& child : of.children) found.push_back(child.get());
  };
  add_children(node);
  for (std::size_t i = 0; i < found.size(); ++i) add_children(*found[i]);
  for (auto last = found.rbegin(); last != found.rend(); ++last) remove_leaf(**last);
}

std::int32_t RadixTree::evict_duplicate(Node& node) {
  const std::int32_t count = pages_of(node);
  tell_removed(node, 0, count, Tier::kHost);
  num_host_pages_ -= count;
  node.host_pages.release();
  reindex(node);
  return count;
}

std::int32_t RadixTree::evict_host_leaf(Node& node, std::int32_t max_pages) {
  const std::int32_t count = std::min(max_pages, pages_of(node));
  if (count == pages_of(node)) {
    remove_leaf(node);
    return count;
  }
  tell_removed(node, pages_of(node) - count, count, Tier::kHost);
  num_host_pages_ -= count;
  node.host_pages.take_back(count).release();
  drop_end(node, count);
  return count;
}

std::int32_t RadixTree::evict_host(std::int32_t max_pages) {
  std::int32_t evicted = 0;
  while (evicted < max_pages && !duplicates_.empty()) evicted += evict_duplicate(**duplicates_.rbegin());
  while (evicted < max_pages && !host_leaves_.empty()) evicted += evict_host_leaf(*first_to_go(host_leaves_), max_pages - evicted);
  return evicted;
}

bool RadixTree::make_host_room(std::int32_t count, const Node* writer, bool spare_copies) {
  const detail::LeastRecentlyUsedFirst before;
  while (host_->num_free() < count) {
    if (!spare_copies && !duplicates_.empty() && (writer == nullptr || before(writer, *duplicates_.rbegin()))) {
      evict_duplicate(**duplicates_.rbegin());
      continue;
    }
    Node* leaf = host_leaves_.empty() ? nullptr : first_to_go(host_leaves_);
    if (leaf == nullptr || (writer != nullptr && !goes_before(*leaf, *writer))) return false;
    evict_host_leaf(*leaf, count - host_->num_free());
  }
  return true;
}

std::int32_t RadixTree::flush() {
  const bool adaptive = std::exchange(adaptive_, false);  // nothing to learn from
  const std::int32_t flushed = evict(num_pages_);
  evict_host(num_host_pages_);
  adaptive_ = adaptive;
  if (num_nodes_ == 0 && events_ != nullptr) events_->push(KvEvent{});
  return flushed;
}

}  // namespace tokenspeed
