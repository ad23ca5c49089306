// The prefix cache: a radix tree over whole pages of tokens.
//
// A node is a run of one or more pages; the path from the root spells the tokens whose keys and values those pages hold. Everything
// in the tree is final: a page enters only when a committed step has written it and its tokens are known.
//
// Locks reach to the root: a node counts its own references plus its locked children, so locking a leaf protects the whole path
// and costs only the nodes that were not locked yet. What is not locked can be evicted, from the end of the least recently used leaf.
// The order of eviction is (logical time of the last unlock, construction number): never an address, a hash or a clock.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "page_allocator.h"

namespace tokenspeed {

using TokenId = std::int32_t;

class NodeRef;
class RadixTree;

namespace detail {

struct RadixNode;

// Orders siblings by the tokens of their first page, which never change while a node is in its parent's set.
struct FirstPageLess {
  using is_transparent = void;
  std::size_t page_size;
  bool operator()(const std::unique_ptr<RadixNode>& a, const std::unique_ptr<RadixNode>& b) const;
  bool operator()(const std::unique_ptr<RadixNode>& a, std::span<const TokenId> page) const;
  bool operator()(std::span<const TokenId> page, const std::unique_ptr<RadixNode>& b) const;
};

struct RadixNode {
  RadixNode(PageAllocator& allocator, std::size_t page_size, RadixNode* parent_node, std::uint64_t number)
      : parent(parent_node), pages(allocator), children(FirstPageLess{page_size}), construction_number(number) {}

  RadixNode* parent;
  std::vector<TokenId> tokens;  // pages.size() * page_size of them
  OwnedPages pages;
  std::set<std::unique_ptr<RadixNode>, FirstPageLess> children;
  std::uint64_t construction_number;
  std::uint64_t last_use = 0;
  std::int32_t locks = 0;  // references to this node, plus children that are locked
};

struct LeastRecentlyUsedFirst {
  bool operator()(const RadixNode* a, const RadixNode* b) const noexcept {
    if (a->last_use != b->last_use) return a->last_use < b->last_use;
    return a->construction_number < b->construction_number;
  }
};

}  // namespace detail

// A lock on a node and its path to the root. It always stands for the tokens up to the end of its node. Move-only.
class NodeRef {
 public:
  NodeRef() noexcept = default;  // locks nothing: what a request holds when the prefix cache is off
  NodeRef(NodeRef&& other) noexcept;
  NodeRef& operator=(NodeRef&& other) noexcept;
  NodeRef(const NodeRef&) = delete;
  NodeRef& operator=(const NodeRef&) = delete;
  ~NodeRef() { release(); }

  bool empty() const noexcept { return tree_ == nullptr; }
  // Appends the pages of the path, from the root, to `out`.
  void append_path_pages(std::vector<PageId>& out) const;

 private:
  friend class RadixTree;
  NodeRef(RadixTree& tree, detail::RadixNode& node) noexcept;
  void release() noexcept;

  RadixTree* tree_ = nullptr;
  detail::RadixNode* node_ = nullptr;
};

// What a prompt would find.
struct PrefixProbe {
  std::int32_t num_pages = 0;         // pages of the longest cached prefix
  std::int32_t num_locked_pages = 0;  // those of them that are locked already: taking them costs no evictable page
};

// A page that a request computed although the tree holds the same tokens already: the tree's page takes its place.
struct PageReplacement {
  std::int32_t index;  // counted from the first page handed to `extend`
  PageId page;
};

class RadixTree {
 public:
  RadixTree(PageAllocator& allocator, std::int32_t page_size);
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;
  ~RadixTree();

  // Advances the logical clock that stamps unlocked nodes.
  void tick() noexcept { ++now_; }

  // Looks for the longest cached prefix of `tokens`, at most `max_pages` pages. Changes nothing.
  PrefixProbe probe(std::span<const TokenId> tokens, std::int32_t max_pages) const;
  // Locks that prefix; splits a node where the prefix ends inside one.
  NodeRef lock_prefix(std::span<const TokenId> tokens, std::int32_t max_pages);
  // Puts `pages`, which hold `tokens`, behind `at` and moves `at` to their end. Where the tree has the same tokens already, its own
  // page stays, ours is given back, and `replaced` is told.
  void extend(NodeRef& at, std::span<const TokenId> tokens, OwnedPages&& pages, std::vector<PageReplacement>& replaced);
  // Gives back up to `max_pages` unlocked pages, least recently used first. Returns how many.
  std::int32_t evict(std::int32_t max_pages);

  std::int32_t num_pages() const noexcept { return num_pages_; }
  std::int32_t num_locked_pages() const noexcept { return num_locked_pages_; }
  std::int32_t num_evictable_pages() const noexcept { return num_pages_ - num_locked_pages_; }
  std::int64_t num_nodes() const noexcept { return num_nodes_; }

  // Calls visit(node) for each node below the root, parents first, siblings in token order.
  template <class Visit>
  void for_each_node(Visit visit) const {
    std::vector<const detail::RadixNode*> todo{root_.get()};
    while (!todo.empty()) {
      const detail::RadixNode* node = todo.back();
      todo.pop_back();
      if (node != root_.get()) visit(*node);
      for (auto child = node->children.rbegin(); child != node->children.rend(); ++child) todo.push_back(child->get());
    }
  }

 private:
  friend class NodeRef;
  using Node = detail::RadixNode;

  // Pages of `node` that spell the beginning of `tokens`.
  std::int32_t common_pages(const Node& node, std::span<const TokenId> tokens) const;
  Node* find_child(const Node& node, std::span<const TokenId> tokens) const;
  Node* add_child(Node& parent, std::span<const TokenId> tokens, OwnedPages&& pages);
  // Cuts `node` after `num_pages` pages. The part before becomes a new parent; `node` keeps the end, and with it all references.
  Node* split(Node& node, std::int32_t num_pages);
  void lock(Node* node) noexcept;
  void unlock(Node* node) noexcept;
  std::span<const TokenId> first_page(const Node& node) const { return std::span(node.tokens).first(page_size_); }

  PageAllocator& allocator_;
  std::size_t page_size_;
  std::unique_ptr<Node> root_;
  std::set<Node*, detail::LeastRecentlyUsedFirst> evictable_leaves_;
  std::uint64_t now_ = 0;
  std::uint64_t next_construction_number_ = 0;
  std::int32_t num_pages_ = 0;
  std::int32_t num_locked_pages_ = 0;
  std::int64_t num_nodes_ = 0;
};

}  // namespace tokenspeed
