// Hashes of pages, what KV events tell, and the way of pages from and to the external store.
#include <algorithm>
#include <utility>
#include <vector>

#include "../invariant.h"
#include "radix_tree.h"

namespace tokenspeed {

BlockHash RadixTree::hash_before(const Node& node) const {
  const Node& parent = *node.parent;
  return parent.is_root() ? root_hash(static_cast<std::int32_t>(page_size_), parent.salt) : parent.hashes.back();
}

// A page is hashed once: a node keeps its hashes, and a split divides them.
void RadixTree::ensure_hashes(Node& node) {
  const auto is_complete = [this](const Node& n) { return n.hashes.size() == static_cast<std::size_t>(pages_of(n)); };
  std::vector<Node*> todo;
  for (Node* at = &node; !at->is_root() && !is_complete(*at); at = at->parent) todo.push_back(at);
  for (auto last = todo.rbegin(); last != todo.rend(); ++last) {
    Node& at = **last;
    const BlockHash before = at.hashes.empty() ? hash_before(at) : at.hashes.back();
    append_hashes(before, std::span(at.tokens).subspan(at.hashes.size() * page_size_), static_cast<std::int32_t>(page_size_), at.hashes);
  }
}

namespace {
KvEvent event_of(KvEventKind kind, Tier tier, std::string_view salt, std::span<const BlockHash> hashes) {
  KvEvent event;
  event.kind = kind;
  event.tier = tier;
  event.salt = salt;
  event.hashes.assign(hashes.begin(), hashes.end());
  return event;
}

const std::string& salt_of(const detail::RadixNode& node) {
  const detail::RadixNode* root = &node;
  while (!root->is_root()) root = root->parent;
  return root->salt;
}
}  // namespace

void RadixTree::tell_stored(Node& node, std::int32_t first, std::int32_t count, Tier tier) {
  if (events_ == nullptr) return;
  ensure_hashes(node);
  const auto begin = static_cast<std::size_t>(first);
  const auto size = static_cast<std::size_t>(count);
  KvEvent event = event_of(KvEventKind::kStored, tier, salt_of(node), std::span(node.hashes).subspan(begin, size));
  event.parent = first == 0 ? hash_before(node) : node.hashes[begin - 1];
  const auto tokens = std::span(node.tokens).subspan(begin * page_size_, size * page_size_);
  event.tokens.assign(tokens.begin(), tokens.end());
  events_->push(std::move(event));
}

void RadixTree::tell_removed(Node& node, std::int32_t first, std::int32_t count, Tier tier) {
  if (events_ == nullptr) return;
  ensure_hashes(node);
  const auto hashes = std::span(node.hashes).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
  events_->push(event_of(KvEventKind::kRemoved, tier, salt_of(node), hashes));
}

OwnedPages RadixTree::host_allocate(std::int32_t count) {
  TOKENSPEED_INVARIANT(host_ != nullptr);
  make_host_room(count, nullptr, false);
  return host_->allocate(std::min(count, host_->num_free()));
}

std::int32_t RadixTree::missing_hashes(std::span<const TokenId> tokens, std::int32_t max_pages, std::string_view salt,
                                       std::vector<BlockHash>& out) {
  tokens = whole_pages(tokens, max_pages);
  const auto page_size = static_cast<std::int32_t>(page_size_);
  BlockHash before = root_hash(page_size, salt);
  std::int32_t first = 0;
  const Node* root = find_root(salt);
  for (Node* node = root == nullptr ? nullptr : find_child(*root, tokens); node != nullptr; node = find_child(*node, tokens)) {
    const std::int32_t common = common_pages(*node, tokens);
    ensure_hashes(*node);
    before = node->hashes[static_cast<std::size_t>(common - 1)];
    first += common;
    tokens = tokens.subspan(static_cast<std::size_t>(common) * page_size_);
    if (common < pages_of(*node)) break;
  }
  append_hashes(before, tokens, page_size, out);
  return first;
}

std::int32_t RadixTree::insert_host(std::span<const TokenId> tokens, std::int32_t first_page, OwnedPages&& host, std::string_view salt) {
  TOKENSPEED_INVARIANT(host_ != nullptr && first_page >= 0);
  OwnedPages pages(std::move(host));
  const std::int32_t end = first_page + pages.size();
  TOKENSPEED_INVARIANT(tokens.size() >= static_cast<std::size_t>(end) * page_size_);
  tokens = whole_pages(tokens, end);
  Node* last = &root_of(salt);
  std::int32_t index = 0;
  while (Node* child = find_child(*last, tokens)) {
    const std::int32_t common = common_pages(*child, tokens);
    const bool whole = common == pages_of(*child);
    index += common;
    tokens = tokens.subspan(static_cast<std::size_t>(common) * page_size_);
    last = child;
    if (whole) continue;
    if (index >= first_page && !tokens.empty()) last = &split(*child, common);
    break;
  }
  if (tokens.empty() || index < first_page) {  // all is there already, or the pages before ours have gone
    if (last->is_root()) drop_unused_root(*last);
    return 0;
  }
  pages.take_front(index - first_page).release();
  const std::int32_t count = pages.size();
  Node& added = add_child(*last, tokens);
  added.host_pages = std::move(pages);
  added.is_stored = true;
  num_host_pages_ += count;
  reindex(added);
  reindex(*last);
  tell_stored(added, 0, count, Tier::kHost);
  return count;
}

TransferId RadixTree::begin_store(std::int32_t max_pages, std::vector<StorePage>& pages) {
  if (waiting_for_store_.empty() || max_pages <= 0) return kNoTransfer;
  detail::TransferRecord& record = open_transfer(Kind::kStore);
  for (std::int32_t count = 0; count < max_pages && !waiting_for_store_.empty();) {
    Node& node = **waiting_for_store_.begin();
    count += pages_of(node);
    ensure_hashes(node);
    node.store = &record;
    record.nodes.push_back(&node);
    record.locked.push_back(&node);
    lock(&node, kNoUse);
    reindex(node);
    for (std::size_t i = 0; i < node.hashes.size(); ++i) pages.push_back({node.hashes[i], node.host_pages.ids()[i]});
  }
  return record.id;
}

}  // namespace tokenspeed
