// Groups beside the pages of full attention: windows and snapshots of states.
//
// A window page is held while some reference's window reaches it. As a request runs on, its window moves, and the nodes it left keep
// their window pages only until somebody needs the room. A snapshot stands at the end of a node, so a split, whose lower half keeps the
// end and every reference, never moves it.
#include <algorithm>
#include <utility>

#include "../invariant.h"
#include "radix_tree.h"

namespace tokenspeed {

namespace {
// A node whose front lies this far behind the window is cut there: what is held beyond the window stays below this.
constexpr std::size_t kSlackTokens = 256;
}  // namespace

std::int32_t RadixTree::resumable_pages(std::span<const TokenId> tokens, std::int32_t max_pages, std::string_view salt) const {
  const Node* node = find_root(salt);
  if (node == nullptr) return 0;
  tokens = whole_pages(tokens, max_pages);
  std::int32_t best = 0;
  std::int32_t num_pages = 0;
  std::size_t in_window = 0;  // tokens, back from here without a gap, whose window pages are there
  while ((node = find_child(*node, tokens)) != nullptr) {
    const std::int32_t common = common_pages(*node, tokens);
    const bool is_whole = common == pages_of(*node);
    const std::size_t num_tokens = static_cast<std::size_t>(common) * page_size_;
    num_pages += common;
    in_window = node->window_pages.empty() ? 0 : in_window + num_tokens;
    const std::size_t position = static_cast<std::size_t>(num_pages) * page_size_;
    const bool window_goes_on = window_ == nullptr || in_window >= std::min(window_before_, position);
    const bool state_goes_on = snapshots_ == nullptr || (is_whole && !node->snapshot.empty());
    if (window_goes_on && state_goes_on) best = num_pages;
    if (!is_whole) break;
    tokens = tokens.subspan(num_tokens);
  }
  return best;
}

std::size_t RadixTree::lock_window(Node& end) noexcept {
  std::size_t covered = 0;
  for (Node* node = &end; !node->is_root() && covered < window_before_; node = node->parent) {
    const std::size_t needed = window_before_ - covered;
    if (node->tokens.size() >= needed + kSlackTokens) {
      const auto behind = static_cast<std::int32_t>((node->tokens.size() - needed) / page_size_);
      if (behind > 0) split(*node, behind);
    }
    if (node->window_locks++ == 0) {
      num_locked_window_pages_ += node->window_pages.size();
      reindex_groups(*node);
    }
    covered += node->tokens.size();
  }
  return covered;
}

void RadixTree::unlock_window(Node* node, std::size_t tokens) noexcept {
  while (tokens > 0) {
    tokens -= node->tokens.size();
    if (--node->window_locks == 0) {
      num_locked_window_pages_ -= node->window_pages.size();
      node->window_use = now_;
      reindex_groups(*node);
    }
    node = node->parent;
  }
}

void RadixTree::give_window_pages(Node& node, OwnedPages&& pages) {
  TOKENSPEED_INVARIANT(node.window_pages.empty() && pages.size() == pages_of(node));
  num_window_pages_ += pages.size();
  if (node.window_locks > 0) num_locked_window_pages_ += pages.size();
  node.window_pages = std::move(pages);
  reindex_groups(node);
}

void RadixTree::reindex_groups(Node& node) {
  if (const bool wanted = !node.window_pages.empty() && node.window_locks == 0; wanted != node.in_window_index) {
    node.in_window_index = wanted;
    if (wanted) {
      idle_windows_.insert(&node);
    } else {
      idle_windows_.erase(&node);
    }
  }
  if (const bool wanted = !node.snapshot.empty() && node.borrows == 0; wanted != node.in_snapshot_index) {
    node.in_snapshot_index = wanted;
    if (wanted) {
      idle_snapshots_.insert(&node);
    } else {
      idle_snapshots_.erase(&node);
    }
  }
}

void RadixTree::leave_group_indexes(Node& node) noexcept {
  if (node.in_window_index) idle_windows_.erase(&node);
  if (node.in_snapshot_index) idle_snapshots_.erase(&node);
}

std::int32_t RadixTree::evict_window(std::int32_t max_pages) {
  const auto run = static_cast<std::int32_t>((kSlackTokens + page_size_ - 1) / page_size_);
  std::int32_t evicted = 0;
  while (evicted < max_pages && !idle_windows_.empty()) {
    Node* node = *idle_windows_.begin();
    const std::int32_t count = std::min(std::max(max_pages - evicted, run), pages_of(*node));
    // The front goes first: whoever goes on behind this node needs its end.
    if (count < pages_of(*node)) node = &split(*node, count);
    num_window_pages_ -= count;
    node->window_pages.release();
    reindex_groups(*node);
    evicted += count;
  }
  return evicted;
}

void RadixTree::drop_snapshot(Node& node) {
  --num_snapshots_;
  node.snapshot.release();
  reindex_groups(node);
}

std::int32_t RadixTree::evict_snapshots(std::int32_t max_slots) {
  std::int32_t evicted = 0;
  for (; evicted < max_slots && !idle_snapshots_.empty(); ++evicted) drop_snapshot(**idle_snapshots_.begin());
  return evicted;
}

void RadixTree::attach_snapshot(const NodeRef& at, OwnedPages&& slot) {
  TOKENSPEED_INVARIANT(snapshots_ != nullptr && at.tree_ == this && !at.node_->is_root() && slot.size() == 1);
  OwnedPages ours(std::move(slot));
  Node& node = *at.node_;
  if (!node.snapshot.empty()) return;
  ++num_snapshots_;
  node.snapshot = std::move(ours);
  node.snapshot_use = now_;
  reindex_groups(node);
}

SnapshotRef RadixTree::borrow_snapshot(const NodeRef& at) {
  TOKENSPEED_INVARIANT(snapshots_ != nullptr && at.tree_ == this);
  if (at.node_->snapshot.empty()) return {};
  return SnapshotRef(*this, *at.node_);
}

void RadixTree::check_groups() const {
  std::int32_t window = 0, locked = 0, snapshots = 0;
  std::size_t idle_windows = 0, idle_snapshots = 0;
  for_each_node([&](const Node& node) {
    TOKENSPEED_INVARIANT(node.window_pages.empty() || node.window_pages.size() == pages_of(node));
    TOKENSPEED_INVARIANT(node.snapshot.size() <= 1 && (node.borrows == 0 || (node.snapshot.size() == 1 && node.locks > 0)));
    TOKENSPEED_INVARIANT(node.window_locks == 0 || node.locks > 0);
    window += node.window_pages.size();
    locked += node.window_locks > 0 ? node.window_pages.size() : 0;
    snapshots += node.snapshot.size();
    TOKENSPEED_INVARIANT(node.in_window_index == (!node.window_pages.empty() && node.window_locks == 0));
    TOKENSPEED_INVARIANT(node.in_snapshot_index == (!node.snapshot.empty() && node.borrows == 0));
    idle_windows += node.in_window_index ? 1 : 0;
    idle_snapshots += node.in_snapshot_index ? 1 : 0;
  });
  TOKENSPEED_INVARIANT(window == num_window_pages_ && locked == num_locked_window_pages_ && snapshots == num_snapshots_);
  TOKENSPEED_INVARIANT(idle_windows == idle_windows_.size() && idle_snapshots == idle_snapshots_.size());
}

}  // namespace tokenspeed
