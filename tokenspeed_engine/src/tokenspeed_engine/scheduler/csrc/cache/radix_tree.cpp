#include "radix_tree.h"

#include <algorithm>
#include <utility>

#include "../invariant.h"

namespace tokenspeed {

namespace {
// A node grows in place up to this size; then its continuation becomes a child. It bounds what growing ever copies: without it, the
// first page that a request with a 32,768-token prompt decodes would copy the whole prompt's node, 80 us in one commit.
constexpr std::size_t kGrowingTokens = 256;
}  // namespace

namespace detail {

namespace {
bool page_less(std::span<const TokenId> a, std::span<const TokenId> b) {
  return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
}
}  // namespace

bool FirstPageLess::operator()(const std::unique_ptr<RadixNode>& a, const std::unique_ptr<RadixNode>& b) const {
  return page_less(std::span(a->tokens).first(page_size), std::span(b->tokens).first(page_size));
}
bool FirstPageLess::operator()(const std::unique_ptr<RadixNode>& a, std::span<const TokenId> page) const {
  return page_less(std::span(a->tokens).first(page_size), page);
}
bool FirstPageLess::operator()(std::span<const TokenId> page, const std::unique_ptr<RadixNode>& b) const {
  return page_less(page, std::span(b->tokens).first(page_size));
}

}  // namespace detail

NodeRef::NodeRef(RadixTree& tree, detail::RadixNode& node) noexcept : tree_(&tree), node_(&node) { tree.lock(&node); }

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
  if (tree_ != nullptr) tree_->unlock(node_);
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

RadixTree::RadixTree(PageAllocator& allocator, std::int32_t page_size)
    : allocator_(allocator), page_size_(static_cast<std::size_t>(page_size)) {
  TOKENSPEED_INVARIANT(page_size > 0);
  root_ = std::make_unique<Node>(allocator_, page_size_, nullptr, next_construction_number_++);
}

RadixTree::~RadixTree() {
  // A long conversation is a deep chain: take the tree apart with a list, not by recursion.
  std::vector<std::unique_ptr<Node>> todo;
  todo.push_back(std::move(root_));
  while (!todo.empty()) {
    std::unique_ptr<Node> node = std::move(todo.back());
    todo.pop_back();
    while (!node->children.empty()) todo.push_back(std::move(node->children.extract(node->children.begin()).value()));
  }
}

std::int32_t RadixTree::common_pages(const Node& node, std::span<const TokenId> tokens) const {
  const std::size_t limit = std::min(node.tokens.size(), tokens.size());
  const auto end = node.tokens.begin() + static_cast<std::ptrdiff_t>(limit);
  const auto different = std::mismatch(node.tokens.begin(), end, tokens.begin()).first;
  return static_cast<std::int32_t>(static_cast<std::size_t>(different - node.tokens.begin()) / page_size_);
}

detail::RadixNode* RadixTree::find_child(const Node& node, std::span<const TokenId> tokens) const {
  if (tokens.size() < page_size_) return nullptr;
  const auto child = node.children.find(tokens.first(page_size_));
  return child == node.children.end() ? nullptr : child->get();
}

PrefixProbe RadixTree::probe(std::span<const TokenId> tokens, std::int32_t max_pages) const {
  tokens = tokens.first(std::min(tokens.size() / page_size_, static_cast<std::size_t>(max_pages)) * page_size_);
  PrefixProbe hit;
  for (const Node* node = find_child(*root_, tokens); node != nullptr; node = find_child(*node, tokens)) {
    const std::int32_t common = common_pages(*node, tokens);
    hit.num_pages += common;
    if (node->locks > 0) hit.num_locked_pages += common;
    if (common < node->pages.size()) break;
    tokens = tokens.subspan(node->tokens.size());
  }
  return hit;
}

NodeRef RadixTree::lock_prefix(std::span<const TokenId> tokens, std::int32_t max_pages) {
  tokens = tokens.first(std::min(tokens.size() / page_size_, static_cast<std::size_t>(max_pages)) * page_size_);
  Node* last = root_.get();
  while (Node* node = find_child(*last, tokens)) {
    const std::int32_t common = common_pages(*node, tokens);
    if (common < node->pages.size()) {
      last = split(*node, common);
      break;
    }
    last = node;
    tokens = tokens.subspan(node->tokens.size());
  }
  return NodeRef(*this, *last);
}

void RadixTree::extend(NodeRef& at, std::span<const TokenId> tokens, OwnedPages&& pages, std::vector<PageReplacement>& replaced) {
  TOKENSPEED_INVARIANT(at.tree_ == this);
  TOKENSPEED_INVARIANT(tokens.size() == static_cast<std::size_t>(pages.size()) * page_size_);
  std::int32_t index = 0;
  while (!tokens.empty()) {
    Node& node = *at.node_;
    Node* child = find_child(node, tokens);
    if (child == nullptr) {
      const bool is_only_ours = &node != root_.get() && node.locks == 1 && node.children.empty();
      if (is_only_ours && node.tokens.size() + tokens.size() <= kGrowingTokens) {
        // Nobody else relies on where this node ends, so it can grow in place: decoding does not make a node for each page.
        node.tokens.insert(node.tokens.end(), tokens.begin(), tokens.end());
        num_pages_ += pages.size();
        num_locked_pages_ += pages.size();
        node.pages.append(std::move(pages));
      } else {
        at = NodeRef(*this, *add_child(node, tokens, std::move(pages)));
      }
      return;
    }
    const std::int32_t common = common_pages(*child, tokens);
    if (common < child->pages.size()) child = split(*child, common);
    for (const PageId page : child->pages.ids()) replaced.push_back({index++, page});
    pages.take_front(common).release();
    tokens = tokens.subspan(static_cast<std::size_t>(common) * page_size_);
    at = NodeRef(*this, *child);  // the child is locked before the old reference goes
  }
}

std::int32_t RadixTree::evict(std::int32_t max_pages) {
  std::int32_t evicted = 0;
  while (evicted < max_pages && !evictable_leaves_.empty()) {
    Node* leaf = *evictable_leaves_.begin();
    const std::int32_t count = std::min(max_pages - evicted, leaf->pages.size());
    evicted += count;
    num_pages_ -= count;
    if (count < leaf->pages.size()) {
      leaf->pages.take_back(count).release();
      leaf->tokens.resize(static_cast<std::size_t>(leaf->pages.size()) * page_size_);
      break;
    }
    Node* parent = leaf->parent;
    evictable_leaves_.erase(evictable_leaves_.begin());
    parent->children.erase(parent->children.find(first_page(*leaf)));  // destroys the node, which gives its pages back
    --num_nodes_;
    if (parent != root_.get() && parent->children.empty() && parent->locks == 0) evictable_leaves_.insert(parent);
  }
  return evicted;
}

detail::RadixNode* RadixTree::add_child(Node& parent, std::span<const TokenId> tokens, OwnedPages&& pages) {
  auto child = std::make_unique<Node>(allocator_, page_size_, &parent, next_construction_number_++);
  if (tokens.size() < kGrowingTokens) child->tokens.reserve(kGrowingTokens);
  child->tokens.assign(tokens.begin(), tokens.end());
  child->pages = std::move(pages);
  num_pages_ += child->pages.size();
  ++num_nodes_;
  Node* added = child.get();
  TOKENSPEED_INVARIANT(parent.locks > 0);  // else the parent might stand among the evictable leaves
  parent.children.insert(std::move(child));
  return added;
}

detail::RadixNode* RadixTree::split(Node& node, std::int32_t num_pages) {
  TOKENSPEED_INVARIANT(num_pages > 0 && num_pages < node.pages.size());
  Node& parent = *node.parent;
  auto extracted = parent.children.extract(parent.children.find(first_page(node)));
  auto upper = std::make_unique<Node>(allocator_, page_size_, &parent, next_construction_number_++);
  const auto cut = node.tokens.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(num_pages) * page_size_);
  upper->tokens.assign(node.tokens.begin(), cut);
  node.tokens.erase(node.tokens.begin(), cut);
  upper->pages = node.pages.take_front(num_pages);
  upper->last_use = node.last_use;
  upper->locks = node.locks > 0 ? 1 : 0;  // its one child; the parent goes on counting one locked child
  node.parent = upper.get();
  upper->children.insert(std::move(extracted));
  ++num_nodes_;
  Node* added = upper.get();
  parent.children.insert(std::move(upper));
  return added;
}

void RadixTree::lock(Node* node) noexcept {
  for (; node != nullptr; node = node->parent) {
    if (node->locks++ > 0) return;
    if (node == root_.get()) return;
    num_locked_pages_ += node->pages.size();
    if (node->children.empty()) evictable_leaves_.erase(node);
  }
}

void RadixTree::unlock(Node* node) noexcept {
  for (; node != nullptr; node = node->parent) {
    if (--node->locks > 0) return;
    if (node == root_.get()) return;
    num_locked_pages_ -= node->pages.size();
    node->last_use = now_;
    if (node->children.empty()) evictable_leaves_.insert(node);
  }
}

}  // namespace tokenspeed
