// The prefix cache: a radix tree over whole pages of tokens, in two tiers.
//
// A node is a run of one or more pages; the path from the root spells the tokens whose keys and values those pages hold. Everything
// in the tree is final: a page enters only when a committed step has written it and its tokens are known.
//
// A node has device pages, host pages, or both. On a path, what is on the device comes first; behind it lies what only the host has.
// Eviction of a device copy keeps the host copy; a node goes when it has neither. Salts have trees of their own, with one order of
// eviction for all.
//
// Locks reach to the root: a node counts its own references plus its locked children, so locking a leaf protects the whole path
// and costs only the nodes that were not locked yet. What is not locked can be evicted, from the end of the least recently used leaf.
// The order of eviction is (logical time of the last unlock, construction number): never an address, a hash or a clock.
//
// Models with layers of other kinds have groups beside the pages: layers that see a sliding window keep pages of a pool of their own, and
// only near where somebody goes on; layers with a state keep snapshots of it in slots, at the end of nodes. A hit is where every group
// of the model can go on. Groups are on the device alone, so a tree with groups has no host tier.
//
// With adaptive eviction, how long pages are idle before they are wanted again is learnt (return_times.h), and the time since the last use
// decides through that. Without a clock, or before enough is known, it is the order above.
//
// radix_tree.cpp: walks, growth, splits, locks. eviction.cpp: who goes. transfers.cpp: write-back and load-back. external.cpp: page
// hashes, KV events, the way from and to the external store. groups.cpp: windows and snapshots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kv_events.h"
#include "page_allocator.h"
#include "radix_node.h"
#include "return_times.h"
#include "token.h"
#include "transfer.h"

namespace tokenspeed {

class RadixTree;

// A lock on a node and its path to the root: no copy of it goes. It always stands for the tokens up to the end of its node. Move-only.
class NodeRef {
 public:
  NodeRef() noexcept = default;  // locks nothing: what a request holds when the prefix cache is off
  NodeRef(NodeRef&& other) noexcept;
  NodeRef& operator=(NodeRef&& other) noexcept;
  NodeRef(const NodeRef&) = delete;
  NodeRef& operator=(const NodeRef&) = delete;
  ~NodeRef() { release(); }

  bool empty() const noexcept { return tree_ == nullptr; }
  // Appends the device pages of the path, from the root, to `out`. Pages of a load-back in flight are among them.
  void append_path_pages(std::vector<PageId>& out) const;
  // The same of the window's pool: -1 where no page is, or where none is held because it lies behind the window.
  void append_window_pages(std::vector<PageId>& out) const;

 private:
  friend class RadixTree;
  NodeRef(RadixTree& tree, detail::RadixNode& node) noexcept;
  void release() noexcept;

  RadixTree* tree_ = nullptr;
  detail::RadixNode* node_ = nullptr;
  std::size_t window_tokens_ = 0;  // tokens of the nodes, from the end, whose window pages it holds; splits do not change their sum
};

// A snapshot that is being read: copied into the slot in which a request goes on, which never writes the snapshot itself. It stays
// until the reader is done, and so does its node. Move-only.
class SnapshotRef {
 public:
  SnapshotRef() noexcept = default;
  SnapshotRef(SnapshotRef&& other) noexcept;
  SnapshotRef& operator=(SnapshotRef&& other) noexcept;
  SnapshotRef(const SnapshotRef&) = delete;
  SnapshotRef& operator=(const SnapshotRef&) = delete;
  ~SnapshotRef() { release(); }

  bool empty() const noexcept { return tree_ == nullptr; }
  // The slot to copy from. Requires !empty().
  PageId slot() const;

 private:
  friend class RadixTree;
  SnapshotRef(RadixTree& tree, detail::RadixNode& node) noexcept;
  void release() noexcept;

  RadixTree* tree_ = nullptr;
  detail::RadixNode* node_ = nullptr;
};

// A weaker lock, for a session that pauses: every page of the path keeps its host copy; device copies may go. Move-only.
class KeepRef {
 public:
  KeepRef() noexcept = default;
  KeepRef(KeepRef&& other) noexcept;
  KeepRef& operator=(KeepRef&& other) noexcept;
  KeepRef(const KeepRef&) = delete;
  KeepRef& operator=(const KeepRef&) = delete;
  ~KeepRef() { release(); }

  bool empty() const noexcept { return tree_ == nullptr; }

 private:
  friend class RadixTree;
  KeepRef(RadixTree& tree, detail::RadixNode& node) noexcept;
  void release() noexcept;

  RadixTree* tree_ = nullptr;
  detail::RadixNode* node_ = nullptr;
};

// What a prompt would find, in one walk.
struct PrefixProbe {
  std::int32_t num_pages = 0;          // pages of the longest prefix that the device has
  std::int32_t num_locked_pages = 0;   // those of them that are locked already: taking them costs no evictable page
  std::int32_t num_loading_pages = 0;  // pages behind it that a load-back in flight is bringing
  std::int32_t num_host_pages = 0;     // further pages of the path, which the host has
  std::int32_t num_load_pages = 0;     // device pages that a load-back of all of that takes
};

// A page that a request computed although the tree holds the same tokens already: the tree's page takes its place.
struct PageReplacement {
  std::int32_t index;  // counted from the first page handed to `extend`
  PageId page;
};

enum class EvictMode : std::int8_t {
  kAny,        // least recently used first
  kCleanOnly,  // the same among pages that have a host copy: nothing is lost
};

struct RadixTreeOptions {
  PageAllocator* host = nullptr;     // pool of the host tier; none: one tier
  KvEventBuffer* events = nullptr;   // told of every change; none: no event and no hash is made
  bool external_store = false;       // keep track of host pages that the external store lacks
  bool adaptive_eviction = false;    // learn when pages are wanted again; needs advance_clock()
  PageAllocator* window = nullptr;   // pool of the layers that see a window; none: no such layer
  std::int32_t window_tokens = 0;    // the query's own token and those before it that such a layer sees
  PageAllocator* snapshots = nullptr;  // slots for states; none: no layer has a state
};

class RadixTree {
 public:
  RadixTree(PageAllocator& device, std::int32_t page_size, const RadixTreeOptions& options = {});
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;
  ~RadixTree();

  // Advances the logical clock that stamps unlocked nodes.
  void tick() noexcept { ++now_; }
  // The time of the log of events, the same on every rank; never backwards. Only adaptive eviction uses it.
  void advance_clock(std::int64_t now_us) noexcept {
    if (now_us <= now_us_) return;
    now_us_ = now_us;
    ++now_;  // one tick, one time: so the order by ticks is an order by time
  }

  // Looks for the longest cached prefix of `tokens`, at most `max_pages` pages. Changes nothing.
  PrefixProbe probe(std::span<const TokenId> tokens, std::int32_t max_pages, std::string_view salt = {}) const;
  // Locks that prefix as far as the device has it, or (kHost) as far as any tier has it; splits a node where the prefix ends inside.
  NodeRef lock_prefix(std::span<const TokenId> tokens, std::int32_t max_pages, std::string_view salt = {}, Tier through = Tier::kDevice);
  // Puts the first pages of `pages`, which hold `tokens`, behind `at` and moves `at` to their end. Where the tree has the same tokens
  // on the device, its own page stays, ours is given back, and `replaced` is told; where it has them on the host alone, it takes ours.
  // Stops before a page that a load-back is bringing. Returns how many pages it took; try again with the rest after the next commit.
  std::int32_t extend(NodeRef& at, std::span<const TokenId> tokens, OwnedPages& pages, std::vector<PageReplacement>& replaced);
  // The same for pages that nobody wants back: what is not taken goes.
  std::int32_t extend(NodeRef& at, std::span<const TokenId> tokens, OwnedPages&& pages, std::vector<PageReplacement>& replaced) {
    OwnedPages ours(std::move(pages));
    return extend(at, tokens, ours, replaced);
  }

  // The same in a tree with a window: `window` holds as many pages of that pool, for the same tokens.
  std::int32_t extend(NodeRef& at, std::span<const TokenId> tokens, OwnedPages& pages, std::vector<PageReplacement>& replaced,
                      OwnedPages& window, std::vector<PageReplacement>& window_replaced);

  // Lets go of a path that nobody will want again, as far as nobody else uses it: it goes before all others.
  void retire(NodeRef&& at);
  void retire(KeepRef&& at);

  // Gives back up to `max_pages` unlocked device pages, least recently used first. Returns how many. Host copies stay, and pages that
  // have one go in runs of some size: then it may be more than asked for.
  std::int32_t evict(std::int32_t max_pages, EvictMode mode = EvictMode::kAny);
  // Gives back host pages until `max_pages` are given back or none is left that may go: first copies of what the device has, most
  // recently used first, then what only the host has, least recently used first. Returns how many: whole copies go at once.
  std::int32_t evict_host(std::int32_t max_pages);
  // Drops everything that is not locked or kept, in both tiers. Returns the number of device pages.
  std::int32_t flush();

  // Gives back window pages that no window needs, first those that were left first. Returns how many: runs of some size go at once.
  std::int32_t evict_window(std::int32_t max_pages);
  // Gives back up to `max_slots` snapshots that nobody reads, least recently used first. Returns how many.
  std::int32_t evict_snapshots(std::int32_t max_slots);
  // Leaves the state after the last token of `at` in the tree; `at` must end at it. Where there is one already, ours is given back.
  void attach_snapshot(const NodeRef& at, OwnedPages&& slot);
  // The state at the end of `at`, or an empty handle when there is none.
  SnapshotRef borrow_snapshot(const NodeRef& at);

  // Transfers between the tiers. Each begin appends to `pairs` what is to be copied, or returns kNoTransfer and changes nothing. Until
  // complete() or fail() both sides are locked. Order of begin is order of ids.
  //
  // Writes what lies at the end of the path of `at` and has no copy on the host, without the node that still grows unless `finished`.
  TransferId begin_write_through(const NodeRef& at, bool finished, std::vector<PagePair>& pairs);
  // Writes up to `max_pages` pages of unlocked leaves, least recently used first, so that evicting them loses nothing.
  TransferId begin_write_back(std::int32_t max_pages, std::vector<PagePair>& pairs);
  // Writes all of the path of `at` that has no copy on the host, from the root as far as the host has room.
  TransferId begin_offload(const NodeRef& at, std::vector<PagePair>& pairs);
  // Brings the pages of the path of `at` that only the host has. Takes probe().num_load_pages free device pages; with fewer free it
  // does nothing. Pages that another load-back is bringing are left to it.
  TransferId begin_load_back(const NodeRef& at, std::vector<PagePair>& pairs);
  // Device pages that begin_load_back would take.
  std::int32_t num_load_pages(const NodeRef& at) const;
  // The copy is done, or will not be done. False when no such transfer is in flight. After a failed load-back its nodes are on the
  // host alone again; after a failed write-back they have no copy there.
  bool complete(TransferId id);
  bool fail(TransferId id);
  bool in_flight(TransferId id) const { return transfers_.contains(id); }
  std::int32_t num_transfers() const noexcept { return static_cast<std::int32_t>(transfers_.size()); }
  // The device has every page of the path, and no load-back of them is in flight.
  bool is_ready(const NodeRef& at) const;
  // A session's pin on the host. Empty when a page of the path has no host copy yet: offload first.
  KeepRef keep(const NodeRef& at);

  // The external store. Host pages for what it will bring: up to `count`, evicting for it.
  OwnedPages host_allocate(std::int32_t count);
  // Appends the hashes of the pages of `tokens` that no tier has, at most up to page `max_pages`. Returns the index of the first.
  std::int32_t missing_hashes(std::span<const TokenId> tokens, std::int32_t max_pages, std::string_view salt, std::vector<BlockHash>& out);
  // Puts host pages behind page `first_page` of a prefix; what the tree has already is given back. Returns how many pages it kept: 0
  // also when the pages before `first_page` have gone meanwhile.
  std::int32_t insert_host(std::span<const TokenId> tokens, std::int32_t first_page, OwnedPages&& host, std::string_view salt = {});
  // Up to about `max_pages` host pages (whole nodes) that the external store lacks, locked until complete() or fail().
  TransferId begin_store(std::int32_t max_pages, std::vector<StorePage>& pages);

  std::int32_t num_pages() const noexcept { return num_pages_; }  // on the device
  std::int32_t num_locked_pages() const noexcept { return num_locked_pages_; }
  std::int32_t num_evictable_pages() const noexcept { return num_pages_ - num_locked_pages_; }
  std::int32_t num_clean_evictable_pages() const noexcept { return num_clean_evictable_pages_; }  // those with a host copy
  std::int32_t num_host_pages() const noexcept { return num_host_pages_; }
  std::int32_t num_window_pages() const noexcept { return num_window_pages_; }
  std::int32_t num_evictable_window_pages() const noexcept { return num_window_pages_ - num_locked_window_pages_; }
  std::int32_t num_snapshots() const noexcept { return num_snapshots_; }
  std::int32_t num_evictable_snapshots() const noexcept { return static_cast<std::int32_t>(idle_snapshots_.size()); }
  std::int64_t num_nodes() const noexcept { return num_nodes_; }

  // Calls visit(node) for each node below the roots, parents first, siblings in token order.
  template <class Visit>
  void for_each_node(Visit visit) const {
    std::vector<const detail::RadixNode*> todo;
    for (auto root = roots_.rbegin(); root != roots_.rend(); ++root) todo.push_back(root->second.get());
    while (!todo.empty()) {
      const detail::RadixNode* node = todo.back();
      todo.pop_back();
      if (!node->is_root()) visit(*node);
      for (auto child = node->children.rbegin(); child != node->children.rend(); ++child) todo.push_back(child->get());
    }
  }

  // Throws InvariantError where counters, indexes, locks or pages disagree. Walks everything: for tests.
  void check() const;

 private:
  friend class NodeRef;
  friend class KeepRef;
  friend class SnapshotRef;
  // A node grows in place up to this size; then its continuation becomes a child. It bounds what growing ever copies: without it, the
  // first page that a request with a 32,768-token prompt decodes would copy the whole prompt's node, 80 us in one commit.
  static constexpr std::size_t kGrowingTokens = 256;

  using Node = detail::RadixNode;
  using Place = detail::EvictionPlace;
  using Kind = detail::TransferKind;
  using LruIndex = std::set<Node*, detail::LeastRecentlyUsedFirst>;

  // radix_tree.cpp
  const Node* find_root(std::string_view salt) const;
  Node& root_of(std::string_view salt);
  std::unique_ptr<Node> make_node(Node* parent);
  void drop_unused_root(Node& root);
  std::span<const TokenId> whole_pages(std::span<const TokenId> tokens, std::int32_t max_pages) const;
  std::int32_t pages_of(const Node& node) const noexcept { return static_cast<std::int32_t>(node.tokens.size() / page_size_); }
  // Pages of `node` that spell the beginning of `tokens`.
  std::int32_t common_pages(const Node& node, std::span<const TokenId> tokens) const;
  Node* find_child(const Node& node, std::span<const TokenId> tokens) const;
  Node& add_child(Node& parent, std::span<const TokenId> tokens);
  bool can_grow(const Node& node) const noexcept;
  // Cuts `node` after `num_pages` pages. The part before becomes a new parent; `node` keeps the end, and with it all references.
  Node& split(Node& node, std::int32_t num_pages);
  struct Use {
    std::uint64_t tick;
    std::int64_t time_us;
  };
  static constexpr Use kNoUse{0, 0};  // of a transfer
  Use use_now() const noexcept { return {now_, now_us_}; }
  void lock(Node* node, Use use) noexcept;
  void unlock(Node* node, Use use) noexcept;
  void touch(Node& node, Use use) noexcept;
  void retire_path(Node* node);
  void change_keeps(Node* node, std::int32_t by) noexcept;
  std::span<const TokenId> first_page(const Node& node) const { return std::span(node.tokens).first(page_size_); }
  static bool is_loading(const Node& node) noexcept { return node.transfer != nullptr && node.transfer->kind == Kind::kLoadBack; }
  static bool device_ready(const Node& node) noexcept { return node.on_device() && !is_loading(node); }
  static bool host_ready(const Node& node) noexcept {
    return !node.host_pages.empty() && !(node.transfer != nullptr && node.transfer->kind == Kind::kWriteBack);
  }
  std::int32_t extend_groups(NodeRef& at, std::span<const TokenId> tokens, OwnedPages& pages, std::vector<PageReplacement>& replaced,
                             OwnedPages* window, std::vector<PageReplacement>* window_replaced);
  void give_device_pages(Node& node, OwnedPages&& pages);
  void take_device_pages(Node& node);

  // eviction.cpp
  Place place_of(const Node& node) const noexcept;
  LruIndex* index_of(Place place) noexcept;
  // The first of an order that is not empty to go.
  Node* first_to_go(const LruIndex& index) const;
  bool goes_before(const Node& a, const Node& b) const;
  int rank_of(const Node& node) const noexcept { return return_times_.rank(ReturnTimes::class_of(now_us_ - node.last_use_us)); }
  Node* device_victim(EvictMode mode);
  // Brings the indexes and counters in line with what `node` is now.
  void reindex(Node& node);
  void leave_indexes(Node& node) noexcept;
  void remove_leaf(Node& node);
  void remove_descendants(Node& node);
  std::int32_t evict_clean(Node& node, std::int32_t max_pages);
  std::int32_t evict_dirty(Node& node, std::int32_t max_pages);
  std::int32_t evict_duplicate(Node& node);
  std::int32_t evict_host_leaf(Node& node, std::int32_t max_pages);
  void drop_end(Node& node, std::int32_t num_pages);
  // Makes `count` host pages free for `writer`, if what is worth less than it suffices: copies of device pages that were used later
  // (unless `spare_copies`), then pages that only the host has and that were used before it. No writer: whatever may go.
  bool make_host_room(std::int32_t count, const Node* writer, bool spare_copies);

  // groups.cpp
  bool has_groups() const noexcept { return window_ != nullptr || snapshots_ != nullptr; }
  // Pages of `tokens`, up to `max_pages`, behind which every group can go on.
  std::int32_t resumable_pages(std::span<const TokenId> tokens, std::int32_t max_pages, std::string_view salt) const;
  std::size_t lock_window(Node& node) noexcept;
  void unlock_window(Node* node, std::size_t tokens) noexcept;
  void give_window_pages(Node& node, OwnedPages&& pages);
  void reindex_groups(Node& node);
  void leave_group_indexes(Node& node) noexcept;
  void drop_snapshot(Node& node);
  void check_groups() const;

  // transfers.cpp
  detail::TransferRecord& open_transfer(Kind kind);
  void write_node(detail::TransferRecord& record, Node& node, std::vector<PagePair>& pairs);
  TransferId close_if_empty(detail::TransferRecord& record);
  bool end_transfer(TransferId id, bool ok);

  // external.cpp
  void ensure_hashes(Node& node);
  BlockHash hash_before(const Node& node) const;
  void tell_stored(Node& node, std::int32_t first, std::int32_t count, Tier tier);
  void tell_removed(Node& node, std::int32_t first, std::int32_t count, Tier tier);

  PageAllocator& device_;
  PageAllocator* host_;
  KvEventBuffer* events_;
  bool external_store_;
  PageAllocator* window_;
  PageAllocator* snapshots_;
  std::size_t window_before_;  // tokens before the next one that its window still sees
  std::size_t page_size_;
  std::map<std::string, std::unique_ptr<Node>, std::less<>> roots_;  // by salt; that of no salt is always there
  Node* default_root_;
  LruIndex dirty_leaves_;
  LruIndex clean_leaves_;
  LruIndex host_leaves_;
  LruIndex duplicates_;  // nodes with a host copy that the device makes redundant, locked ones too
  std::set<Node*, detail::ConstructedFirst> waiting_for_store_;
  std::set<Node*, detail::WindowLeftFirst> idle_windows_;
  std::set<Node*, detail::SnapshotLeastRecentlyUsedFirst> idle_snapshots_;
  std::map<TransferId, std::unique_ptr<detail::TransferRecord>> transfers_;
  TransferId next_transfer_ = 0;
  bool adaptive_;
  ReturnTimes return_times_;
  Node* victim_ = nullptr;  // the leaf that is being evicted piece by piece, while it stands among those that may go
  std::uint64_t now_ = 1;
  std::int64_t now_us_ = 0;
  std::uint64_t next_construction_number_ = 0;
  std::int32_t num_pages_ = 0;
  std::int32_t num_locked_pages_ = 0;
  std::int32_t num_clean_evictable_pages_ = 0;
  std::int32_t num_host_pages_ = 0;
  std::int32_t num_window_pages_ = 0;
  std::int32_t num_locked_window_pages_ = 0;
  std::int32_t num_snapshots_ = 0;
  std::int64_t num_nodes_ = 0;
};

}  // namespace tokenspeed
