// Walks, growth, splits and locks.
#include "radix_tree.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "../invariant.h"

namespace tokenspeed {

namespace {
// Moves all behind the first `count` elements out of `from`; copies the shorter part.
template <class T>
std::vector<T> cut_front(std::vector<T>& from, std::size_t count) {
  const auto cut = from.begin() + static_cast<std::ptrdiff_t>(count);
  if (count <= from.size() / 2) {
    std::vector<T> front(from.begin(), cut);
    from.erase(from.begin(), cut);
    return front;
  }
  std::vector<T> back(cut, from.end());
  from.resize(count);
  std::swap(from, back);
  return back;
}
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

RadixTree::RadixTree(PageAllocator& device, std::int32_t page_size, const RadixTreeOptions& options)
    : device_(device),
      host_(options.host),
      events_(options.events),
      external_store_(options.external_store),
      window_(options.window),
      snapshots_(options.snapshots),
      window_before_(options.window_tokens > 0 ? static_cast<std::size_t>(options.window_tokens - 1) : 0),
      page_size_(static_cast<std::size_t>(page_size)),
      adaptive_(options.adaptive_eviction) {
  TOKENSPEED_INVARIANT(page_size > 0);
  TOKENSPEED_INVARIANT((window_ != nullptr) == (options.window_tokens > 0));
  TOKENSPEED_INVARIANT(host_ == nullptr || !has_groups());
  default_root_ = &root_of("");
}

RadixTree::~RadixTree() {
  // A long conversation is a deep chain: take the tree apart with a list, not by recursion.
  std::vector<std::unique_ptr<Node>> todo;
  for (auto& [salt, root] : roots_) todo.push_back(std::move(root));
  while (!todo.empty()) {
    std::unique_ptr<Node> node = std::move(todo.back());
    todo.pop_back();
    while (!node->children.empty()) todo.push_back(std::move(node->children.extract(node->children.begin()).value()));
  }
}

const detail::RadixNode* RadixTree::find_root(std::string_view salt) const {
  if (salt.empty()) return default_root_;
  const auto found = roots_.find(salt);
  return found == roots_.end() ? nullptr : found->second.get();
}

detail::RadixNode& RadixTree::root_of(std::string_view salt) {
  auto entry = roots_.find(salt);
  if (entry == roots_.end()) {
    entry = roots_.emplace(salt, make_node(nullptr)).first;
    entry->second->salt = salt;
  }
  return *entry->second;
}

std::unique_ptr<detail::RadixNode> RadixTree::make_node(Node* parent) {
  const auto pool = [this](PageAllocator* given) -> PageAllocator& { return given != nullptr ? *given : device_; };
  return std::make_unique<Node>(device_, pool(host_), pool(window_), pool(snapshots_), page_size_, parent, next_construction_number_++);
}

void RadixTree::drop_unused_root(Node& root) {
  if (&root != default_root_ && root.children.empty() && root.locks == 0 && root.keeps == 0) roots_.erase(roots_.find(root.salt));
}

std::span<const TokenId> RadixTree::whole_pages(std::span<const TokenId> tokens, std::int32_t max_pages) const {
  return tokens.first(std::min(tokens.size() / page_size_, static_cast<std::size_t>(max_pages)) * page_size_);
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

PrefixProbe RadixTree::probe(std::span<const TokenId> tokens, std::int32_t max_pages, std::string_view salt) const {
  PrefixProbe hit;
  if (has_groups()) max_pages = resumable_pages(tokens, max_pages, salt);
  const Node* node = find_root(salt);
  if (node == nullptr) return hit;
  tokens = whole_pages(tokens, max_pages);
  bool behind_device = false;
  while ((node = find_child(*node, tokens)) != nullptr) {
    const std::int32_t common = common_pages(*node, tokens);
    behind_device = behind_device || !device_ready(*node);
    if (!behind_device) {
      hit.num_pages += common;
      if (node->locks > 0) hit.num_locked_pages += common;
    } else if (is_loading(*node)) {
      hit.num_loading_pages += common;
    } else {
      hit.num_host_pages += common;
      if (!node->on_device()) hit.num_load_pages += common;
    }
    if (common < pages_of(*node)) break;
    tokens = tokens.subspan(node->tokens.size());
  }
  return hit;
}

NodeRef RadixTree::lock_prefix(std::span<const TokenId> tokens, std::int32_t max_pages, std::string_view salt, Tier through) {
  if (has_groups()) max_pages = resumable_pages(tokens, max_pages, salt);
  tokens = whole_pages(tokens, max_pages);
  Node* last = salt.empty() ? default_root_ : &root_of(salt);
  while (Node* node = find_child(*last, tokens)) {
    if (through == Tier::kDevice && !device_ready(*node)) break;
    const std::int32_t common = common_pages(*node, tokens);
    if (common < pages_of(*node)) {
      last = &split(*node, common);
      break;
    }
    last = node;
    tokens = tokens.subspan(node->tokens.size());
  }
  if (adaptive_ && !last->is_root() && last->locks == 0 && last->last_use > 0) return_times_.returned(now_us_ - last->last_use_us);
  return NodeRef(*this, *last);
}

// Nobody else relies on where such a node ends, so it can grow: decoding does not make a node for each page.
bool RadixTree::can_grow(const Node& node) const noexcept {
  return !node.is_root() && node.locks == 1 && node.children.empty() && node.host_pages.empty() && node.snapshot.empty() &&
         (window_ == nullptr || !node.window_pages.empty());
}

std::int32_t RadixTree::extend(NodeRef& at, std::span<const TokenId> tokens, OwnedPages& pages, std::vector<PageReplacement>& replaced) {
  TOKENSPEED_INVARIANT(window_ == nullptr);
  return extend_groups(at, tokens, pages, replaced, nullptr, nullptr);
}

std::int32_t RadixTree::extend(NodeRef& at, std::span<const TokenId> tokens, OwnedPages& pages, std::vector<PageReplacement>& replaced,
                               OwnedPages& window, std::vector<PageReplacement>& window_replaced) {
  TOKENSPEED_INVARIANT(window_ != nullptr && tokens.size() / page_size_ <= static_cast<std::size_t>(window.size()));
  return extend_groups(at, tokens, pages, replaced, &window, &window_replaced);
}

std::int32_t RadixTree::extend_groups(NodeRef& at, std::span<const TokenId> tokens, OwnedPages& pages,
                                      std::vector<PageReplacement>& replaced, OwnedPages* window,
                                      std::vector<PageReplacement>* window_replaced) {
  TOKENSPEED_INVARIANT(at.tree_ == this);
  TOKENSPEED_INVARIANT(tokens.size() % page_size_ == 0 && tokens.size() / page_size_ <= static_cast<std::size_t>(pages.size()));
  std::int32_t taken = 0;
  while (!tokens.empty()) {
    Node& node = *at.node_;
    Node* child = find_child(node, tokens);
    if (child == nullptr) {
      const auto count = static_cast<std::int32_t>(tokens.size() / page_size_);
      if (can_grow(node) && node.tokens.size() + tokens.size() <= kGrowingTokens) {
        const std::int32_t first = pages_of(node);
        node.tokens.insert(node.tokens.end(), tokens.begin(), tokens.end());
        num_pages_ += count;
        num_locked_pages_ += count;
        node.pages.append(pages.take_front(count));
        if (window != nullptr) {
          node.window_pages.append(window->take_front(count));
          num_window_pages_ += count;
          if (node.window_locks > 0) {
            num_locked_window_pages_ += count;
            at.window_tokens_ += tokens.size();
          }
        }
        tell_stored(node, first, count, Tier::kDevice);
      } else {
        Node& added = add_child(node, tokens);
        if (window == nullptr) {
          at = NodeRef(*this, added);  // locked first: it never stands among the leaves that may go
          give_device_pages(added, pages.take_front(count));
          tell_stored(added, 0, count, Tier::kDevice);
        } else {
          give_device_pages(added, pages.take_front(count));
          give_window_pages(added, window->take_front(count));
          tell_stored(added, 0, count, Tier::kDevice);
          at = NodeRef(*this, added);  // cuts it where its front lies behind the window, so it must be whole by now
        }
      }
      return taken + count;
    }
    if (is_loading(*child)) return taken;
    const std::int32_t common = common_pages(*child, tokens);
    if (common < pages_of(*child)) child = &split(*child, common);
    OwnedPages ours = pages.take_front(common);
    if (window != nullptr) {
      OwnedPages our_window = window->take_front(common);
      if (child->window_pages.empty()) {
        give_window_pages(*child, std::move(our_window));
      } else {
        std::int32_t index = taken;
        for (const PageId page : child->window_pages.ids()) window_replaced->push_back({index++, page});
      }
    }
    if (child->on_device()) {
      for (const PageId page : child->pages.ids()) replaced.push_back({taken++, page});
      at = NodeRef(*this, *child);  // the child is locked before the old reference goes
    } else {
      at = NodeRef(*this, *child);
      give_device_pages(*child, std::move(ours));
      tell_stored(*child, 0, common, Tier::kDevice);
      taken += common;
    }
    tokens = tokens.subspan(static_cast<std::size_t>(common) * page_size_);
  }
  return taken;
}

detail::RadixNode& RadixTree::add_child(Node& parent, std::span<const TokenId> tokens) {
  auto child = make_node(&parent);
  if (tokens.size() < kGrowingTokens) child->tokens.reserve(kGrowingTokens);
  child->tokens.assign(tokens.begin(), tokens.end());
  child->last_use = now_;
  child->last_use_us = now_us_;
  ++num_nodes_;
  Node& added = *child;
  parent.children.insert(std::move(child));
  return added;
}

detail::RadixNode& RadixTree::split(Node& node, std::int32_t num_pages) {
  TOKENSPEED_INVARIANT(num_pages > 0 && num_pages < pages_of(node));
  Node& parent = *node.parent;
  auto extracted = parent.children.extract(parent.children.find(first_page(node)));
  auto made = make_node(&parent);
  Node& upper = *made;
  upper.tokens = cut_front(node.tokens, static_cast<std::size_t>(num_pages) * page_size_);
  upper.hashes = cut_front(node.hashes, std::min(node.hashes.size(), static_cast<std::size_t>(num_pages)));
  if (node.on_device()) upper.pages = node.pages.take_front(num_pages);
  if (!node.host_pages.empty()) upper.host_pages = node.host_pages.take_front(num_pages);
  if (!node.window_pages.empty()) upper.window_pages = node.window_pages.take_front(num_pages);
  upper.window_locks = node.window_locks;
  upper.window_use = node.window_use;
  upper.last_use = node.last_use;
  upper.last_use_us = node.last_use_us;
  upper.locks = node.locks > 0 ? 1 : 0;  // its one child; the parent goes on counting one locked child
  upper.keeps = node.keeps > 0 ? 1 : 0;
  upper.device_children = node.on_device() ? 1 : 0;
  upper.counts_as_clean = node.counts_as_clean;
  upper.is_stored = node.is_stored;
  upper.transfer = node.transfer;
  upper.store = node.store;
  for (detail::TransferRecord* record : {node.transfer, node.store}) {
    if (record != nullptr) record->nodes.insert(std::find(record->nodes.begin(), record->nodes.end(), &node), &upper);
  }
  node.parent = &upper;
  upper.children.insert(std::move(extracted));
  ++num_nodes_;
  parent.children.insert(std::move(made));
  reindex(upper);
  return upper;
}

void RadixTree::give_device_pages(Node& node, OwnedPages&& pages) {
  TOKENSPEED_INVARIANT(!node.on_device() && pages.size() == pages_of(node));
  num_pages_ += pages.size();
  if (node.locks > 0) num_locked_pages_ += pages.size();
  node.pages = std::move(pages);
  ++node.parent->device_children;
  reindex(node);
  reindex(*node.parent);
}

void RadixTree::take_device_pages(Node& node) {
  num_pages_ -= node.pages.size();
  if (node.locks > 0) num_locked_pages_ -= node.pages.size();
  node.pages.release();
  --node.parent->device_children;
  reindex(node);
  reindex(*node.parent);
}

void RadixTree::touch(Node& node, Use use) noexcept {
  if (use.tick <= node.last_use) return;
  // Only locked nodes are touched, and those stand in no order but this one.
  if (node.is_duplicate) duplicates_.erase(&node);
  node.last_use = use.tick;
  node.last_use_us = use.time_us;
  if (node.is_duplicate) duplicates_.insert(&node);
}

void RadixTree::lock(Node* node, Use use) noexcept {
  for (; node != nullptr; node = node->parent) {
    if (node->locks++ > 0) {
      touch(*node, use);
      return;
    }
    if (node->is_root()) return;
    num_locked_pages_ += node->pages.size();
    reindex(*node);
    touch(*node, use);
  }
}

void RadixTree::unlock(Node* node, Use use) noexcept {
  for (Node* parent = nullptr; node != nullptr; node = parent) {
    parent = node->parent;
    touch(*node, use);
    if (use.tick < node->last_use) use = {node->last_use, node->last_use_us};  // what was used at the end of a path was used before it too
    if (--node->locks > 0) return;
    if (node->is_root()) {
      drop_unused_root(*node);
      return;
    }
    num_locked_pages_ -= node->pages.size();
    reindex(*node);
  }
}

void RadixTree::retire(NodeRef&& at) {
  if (at.empty()) return;
  Node* const node = at.node_->is_root() ? nullptr : at.node_;  // the root of a salt may go with the reference
  at = NodeRef();
  if (node != nullptr) retire_path(node);
}

void RadixTree::retire(KeepRef&& at) {
  if (at.empty()) return;
  Node* const node = at.node_->is_root() ? nullptr : at.node_;
  at = KeepRef();
  if (node != nullptr) retire_path(node);
}

void RadixTree::retire_path(Node* node) {
  // Upwards as far as no other path, session or reader shares it. Keys change outside of every order.
  for (; !node->is_root() && node->locks == 0 && node->keeps == 0 && node->children.size() <= 1; node = node->parent) {
    if (!node->children.empty() && (*node->children.begin())->last_use != 0) return;
    leave_indexes(*node);
    node->is_duplicate = node->counts_as_clean = node->waits_for_store = node->in_window_index = node->in_snapshot_index = false;
    node->last_use = 0;
    node->last_use_us = std::numeric_limits<std::int64_t>::min() / 2;
    reindex(*node);
  }
}

void RadixTree::change_keeps(Node* node, std::int32_t by) noexcept {
  for (Node* parent = nullptr; node != nullptr; node = parent) {
    parent = node->parent;
    const bool was_kept = node->keeps > 0;
    node->keeps += by;
    if (was_kept == (node->keeps > 0)) return;
    if (node->is_root()) {
      drop_unused_root(*node);
      return;
    }
    reindex(*node);
  }
}

}  // namespace tokenspeed
