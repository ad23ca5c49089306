// Copies between the tiers: which nodes, which pages, and what becomes of them at the end.
#include <algorithm>
#include <utility>
#include <vector>

#include "../invariant.h"
#include "radix_tree.h"

namespace tokenspeed {

detail::TransferRecord& RadixTree::open_transfer(Kind kind) {
  auto record = std::make_unique<detail::TransferRecord>();
  record->id = next_transfer_++;
  record->kind = kind;
  detail::TransferRecord& opened = *record;
  transfers_.emplace(opened.id, std::move(record));
  return opened;
}

TransferId RadixTree::close_if_empty(detail::TransferRecord& record) {
  if (!record.nodes.empty()) return record.id;
  next_transfer_ = record.id;
  transfers_.erase(record.id);
  return kNoTransfer;
}

// The caller has made room on the host.
void RadixTree::write_node(detail::TransferRecord& record, Node& node, std::vector<PagePair>& pairs) {
  TOKENSPEED_INVARIANT(node.on_device() && node.host_pages.empty() && node.transfer == nullptr);
  const std::int32_t count = pages_of(node);
  node.transfer = &record;
  node.host_pages = host_->allocate(count);
  num_host_pages_ += count;
  record.nodes.push_back(&node);
  record.locked.push_back(&node);
  lock(&node, kNoUse);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) pairs.push_back({node.pages.ids()[i], node.host_pages.ids()[i]});
}

TransferId RadixTree::begin_write_through(const NodeRef& at, bool finished, std::vector<PagePair>& pairs) {
  if (host_ == nullptr || at.empty() || (host_->num_free() == 0 && host_leaves_.empty())) return kNoTransfer;
  std::vector<Node*> nodes;
  // What lies before a node with a copy was offered earlier.
  for (Node* node = at.node_; !node->is_root() && node->host_pages.empty(); node = node->parent) {
    const bool still_grows = node == at.node_ && can_grow(*node) && node->tokens.size() + page_size_ <= kGrowingTokens;
    if (finished || !still_grows) nodes.push_back(node);
  }
  if (nodes.empty()) return kNoTransfer;
  detail::TransferRecord& record = open_transfer(Kind::kWriteBack);
  for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
    // Copies of device pages are what this policy is for: only what the host alone has, and what is older, gives way.
    if (!make_host_room(pages_of(**node), *node, true)) break;
    write_node(record, **node, pairs);
  }
  return close_if_empty(record);
}

TransferId RadixTree::begin_write_back(std::int32_t max_pages, std::vector<PagePair>& pairs) {
  if (host_ == nullptr) return kNoTransfer;
  detail::TransferRecord& record = open_transfer(Kind::kWriteBack);
  std::vector<Node*> chain;
  while (max_pages > 0 && !dirty_leaves_.empty()) {
    // A leaf, and before it what would become a leaf of the same age. The end goes first, so it is what the bound cuts out of.
    chain.clear();
    for (Node* node = first_to_go(dirty_leaves_); max_pages > 0; node = node->parent) {
      const bool is_next = chain.empty() || (!node->is_root() && node->locks == 0 && node->device_children == 1 && node->host_pages.empty() &&
                                             node->on_device() && node->last_use == chain.back()->last_use);
      if (!is_next) break;
      if (pages_of(*node) > max_pages) split(*node, pages_of(*node) - max_pages);
      chain.push_back(node);
      max_pages -= pages_of(*node);
    }
    std::size_t fits = 0;
    std::int32_t needed = 0;
    while (fits < chain.size()) {
      needed += pages_of(*chain[fits]);
      if (!make_host_room(needed, chain[fits], false)) break;
      ++fits;
    }
    for (std::size_t i = fits; i-- > 0;) write_node(record, *chain[i], pairs);
    if (fits < chain.size()) break;  // the host holds better: the rest is dropped when its pages are wanted
  }
  return close_if_empty(record);
}

TransferId RadixTree::begin_offload(const NodeRef& at, std::vector<PagePair>& pairs) {
  if (host_ == nullptr || at.empty()) return kNoTransfer;
  std::vector<Node*> nodes;
  for (Node* node = at.node_; !node->is_root(); node = node->parent) {
    if (node->host_pages.empty()) nodes.push_back(node);
  }
  if (nodes.empty()) return kNoTransfer;
  detail::TransferRecord& record = open_transfer(Kind::kWriteBack);
  // From here on no copy of the path goes, be it to make room for the rest of it.
  record.kept = at.node_;
  lock(at.node_, kNoUse);
  change_keeps(at.node_, 1);
  for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
    if (!make_host_room(pages_of(**node), nullptr, false)) break;
    write_node(record, **node, pairs);
  }
  if (!record.nodes.empty()) return record.id;
  change_keeps(at.node_, -1);
  unlock(at.node_, kNoUse);
  return close_if_empty(record);
}

std::int32_t RadixTree::num_load_pages(const NodeRef& at) const {
  std::int32_t count = 0;
  if (at.empty()) return count;
  for (const Node* node = at.node_; !node->is_root(); node = node->parent) count += node->on_device() ? 0 : pages_of(*node);
  return count;
}

TransferId RadixTree::begin_load_back(const NodeRef& at, std::vector<PagePair>& pairs) {
  const std::int32_t needed = num_load_pages(at);
  if (needed == 0 || needed > device_.num_free()) return kNoTransfer;
  std::vector<Node*> nodes;
  for (Node* node = at.node_; !node->is_root(); node = node->parent) {
    if (!node->on_device()) nodes.push_back(node);
  }
  detail::TransferRecord& record = open_transfer(Kind::kLoadBack);
  for (auto last = nodes.rbegin(); last != nodes.rend(); ++last) {
    Node& node = **last;
    TOKENSPEED_INVARIANT(node.transfer == nullptr);
    node.transfer = &record;
    record.nodes.push_back(&node);
    record.locked.push_back(&node);
    lock(&node, kNoUse);
    give_device_pages(node, device_.allocate(pages_of(node)));
    for (std::size_t i = 0; i < static_cast<std::size_t>(pages_of(node)); ++i) {
      pairs.push_back({node.host_pages.ids()[i], node.pages.ids()[i]});
    }
  }
  return record.id;
}

bool RadixTree::complete(TransferId id) { return end_transfer(id, true); }
bool RadixTree::fail(TransferId id) { return end_transfer(id, false); }

bool RadixTree::end_transfer(TransferId id, bool ok) {
  const auto entry = transfers_.find(id);
  if (entry == transfers_.end()) return false;
  const std::unique_ptr<detail::TransferRecord> record = std::move(entry->second);
  transfers_.erase(entry);
  for (Node* node : record->nodes) {
    switch (record->kind) {
      case Kind::kStore:
        node->store = nullptr;
        node->is_stored = ok;
        break;
      case Kind::kWriteBack:
        node->transfer = nullptr;
        if (ok) {
          tell_stored(*node, 0, pages_of(*node), Tier::kHost);
        } else {
          num_host_pages_ -= node->host_pages.size();
          node->host_pages.release();
        }
        break;
      case Kind::kLoadBack:
        node->transfer = nullptr;
        if (ok) {
          tell_stored(*node, 0, pages_of(*node), Tier::kDevice);
        } else {
          take_device_pages(*node);
        }
        break;
    }
    reindex(*node);
  }
  if (record->kept != nullptr) {
    change_keeps(record->kept, -1);
    unlock(record->kept, kNoUse);
  }
  for (Node* node : record->locked) unlock(node, kNoUse);
  return true;
}

bool RadixTree::is_ready(const NodeRef& at) const {
  if (at.empty()) return true;
  for (const Node* node = at.node_; !node->is_root(); node = node->parent) {
    if (!device_ready(*node)) return false;
  }
  return true;
}

KeepRef RadixTree::keep(const NodeRef& at) {
  if (at.empty()) return {};
  for (const Node* node = at.node_; !node->is_root(); node = node->parent) {
    if (!host_ready(*node)) return {};
  }
  return KeepRef(*this, *at.node_);
}

}  // namespace tokenspeed
