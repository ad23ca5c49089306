// The handles that hold parts of the tree.
#include <algorithm>
#include <utility>

#include "../invariant.h"
#include "radix_tree.h"

namespace tokenspeed {

NodeRef::NodeRef(RadixTree& tree, detail::RadixNode& node) noexcept : tree_(&tree), node_(&node) {
  tree.lock(&node, tree.use_now());
  if (tree.window_ != nullptr) window_tokens_ = tree.lock_window(node);
}

NodeRef::NodeRef(NodeRef&& other) noexcept
    : tree_(std::exchange(other.tree_, nullptr)),
      node_(std::exchange(other.node_, nullptr)),
      window_tokens_(std::exchange(other.window_tokens_, 0)) {}

NodeRef& NodeRef::operator=(NodeRef&& other) noexcept {
  if (this != &other) {
    release();
    tree_ = std::exchange(other.tree_, nullptr);
    node_ = std::exchange(other.node_, nullptr);
    window_tokens_ = std::exchange(other.window_tokens_, 0);
  }
  return *this;
}

void NodeRef::release() noexcept {
  if (tree_ != nullptr) {
    if (window_tokens_ > 0) tree_->unlock_window(node_, std::exchange(window_tokens_, 0));
    tree_->unlock(node_, tree_->use_now());
  }
  tree_ = nullptr;
  node_ = nullptr;
}

void NodeRef::append_path_pages(std::vector<PageId>& out) const {
  std::vector<const detail::RadixNode*> path;
  for (const detail::RadixNode* node = node_; node != nullptr; node = node->parent) path.push_back(node);
  for (auto node = path.rbegin(); node != path.rend(); ++node) {
    const std::span<const PageId> pages = (*node)->pages.ids();
    out.insert(out.end(), pages.begin(), pages.end());
  }
}

void NodeRef::append_window_pages(std::vector<PageId>& out) const {
  std::vector<const detail::RadixNode*> path;
  for (const detail::RadixNode* node = node_; node != nullptr; node = node->parent) path.push_back(node);
  std::size_t behind = 0;  // tokens of the path that lie before the window
  for (const detail::RadixNode* node : path) behind += node->tokens.size();
  behind -= window_tokens_;
  for (auto node = path.rbegin(); node != path.rend(); ++node) {
    const std::span<const PageId> pages = (*node)->window_pages.ids();
    const bool is_held = behind == 0 && !pages.empty();
    if (is_held) {
      out.insert(out.end(), pages.begin(), pages.end());
    } else {
      out.insert(out.end(), static_cast<std::size_t>((*node)->pages.size()), PageId{-1});
    }
    behind -= std::min(behind, (*node)->tokens.size());
  }
}

SnapshotRef::SnapshotRef(RadixTree& tree, detail::RadixNode& node) noexcept : tree_(&tree), node_(&node) {
  tree.lock(&node, tree.use_now());
  ++node.borrows;
  tree.reindex_groups(node);
  node.snapshot_use = tree.now_;
}

SnapshotRef::SnapshotRef(SnapshotRef&& other) noexcept
    : tree_(std::exchange(other.tree_, nullptr)), node_(std::exchange(other.node_, nullptr)) {}

SnapshotRef& SnapshotRef::operator=(SnapshotRef&& other) noexcept {
  if (this != &other) {
    release();
    tree_ = std::exchange(other.tree_, nullptr);
    node_ = std::exchange(other.node_, nullptr);
  }
  return *this;
}

PageId SnapshotRef::slot() const {
  TOKENSPEED_INVARIANT(node_ != nullptr);
  return node_->snapshot.ids()[0];
}

void SnapshotRef::release() noexcept {
  if (tree_ != nullptr) {
    --node_->borrows;
    tree_->reindex_groups(*node_);
    tree_->unlock(node_, tree_->use_now());
  }
  tree_ = nullptr;
  node_ = nullptr;
}

KeepRef::KeepRef(RadixTree& tree, detail::RadixNode& node) noexcept : tree_(&tree), node_(&node) { tree.change_keeps(&node, 1); }

KeepRef::KeepRef(KeepRef&& other) noexcept
    : tree_(std::exchange(other.tree_, nullptr)), node_(std::exchange(other.node_, nullptr)) {}

KeepRef& KeepRef::operator=(KeepRef&& other) noexcept {
  if (this != &other) {
    release();
    tree_ = std::exchange(other.tree_, nullptr);
    node_ = std::exchange(other.node_, nullptr);
  }
  return *this;
}

void KeepRef::release() noexcept {
  if (tree_ != nullptr) tree_->change_keeps(node_, -1);
  tree_ = nullptr;
  node_ = nullptr;
}

}  // namespace tokenspeed
