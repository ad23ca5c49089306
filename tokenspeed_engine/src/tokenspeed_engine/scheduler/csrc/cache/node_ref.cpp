// The handles that hold parts of the tree.
#include <utility>

#include "radix_tree.h"

namespace tokenspeed {

NodeRef::NodeRef(RadixTree& tree, detail::RadixNode& node) noexcept : tree_(&tree), node_(&node) { tree.lock(&node, tree.now_); }

NodeRef::NodeRef(NodeRef&& other) noexcept
    : tree_(std::exchange(other.tree_, nullptr)), node_(std::exchange(other.node_, nullptr)) {}

NodeRef& NodeRef::operator=(NodeRef&& other) noexcept {
  if (this != &other) {
    release();
    tree_ = std::exchange(other.tree_, nullptr);
    node_ = std::exchange(other.node_, nullptr);
  }
  return *this;
}

void NodeRef::release() noexcept {
  if (tree_ != nullptr) tree_->unlock(node_, tree_->now_);
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
