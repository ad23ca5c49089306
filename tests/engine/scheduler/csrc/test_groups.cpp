// Windows and snapshots: what is held, and from where a model with such layers can go on.
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cache/radix_tree.h"
#include "check.h"

using namespace tokenspeed;

namespace {

constexpr BlockHash kGarbage{};

std::vector<TokenId> run(TokenId first, std::int32_t num_tokens) {
  std::vector<TokenId> tokens;
  for (std::int32_t i = 0; i < num_tokens; ++i) tokens.push_back(first + i);
  return tokens;
}

struct Pools {
  Pools(std::int32_t num_pages, std::int32_t num_window, std::int32_t num_slots, std::int32_t page_size, std::int32_t window_tokens)
      : pages(num_pages),
        window(std::max(num_window, 1)),
        slots(std::max(num_slots, 1)),
        page_size_(page_size),
        tree(pages, page_size, options(num_window > 0, num_slots > 0, window_tokens)) {}
  Pools(const Pools&) = delete;

  RadixTreeOptions options(bool has_window, bool has_snapshots, std::int32_t window_tokens) {
    RadixTreeOptions made;
    if (has_window) {
      made.window = &window;
      made.window_tokens = window_tokens;
    }
    if (has_snapshots) made.snapshots = &slots;
    return made;
  }

  std::int32_t hit(const std::vector<TokenId>& tokens) const { return tree.probe(tokens, 1000).num_pages; }

  // Computes `tokens` from the hit on, in chunks of `chunk` pages.
  NodeRef compute(const std::vector<TokenId>& tokens, std::int32_t chunk, bool with_window) {
    tree.tick();
    const auto num_pages = static_cast<std::int32_t>(tokens.size()) / page_size_;
    NodeRef at = tree.lock_prefix(tokens, num_pages);
    std::vector<PageReplacement> replaced;
    for (std::int32_t done = hit(tokens); done < num_pages;) {
      const std::int32_t count = std::min(chunk, num_pages - done);
      const auto part = std::span(tokens).subspan(static_cast<std::size_t>(done * page_size_), static_cast<std::size_t>(count * page_size_));
      OwnedPages ours = pages.allocate(count);
      if (with_window) {
        if (window.num_free() < count) tree.evict_window(count - window.num_free());
        OwnedPages our_window = window.allocate(count);
        tree.extend(at, part, ours, replaced, our_window, replaced);
      } else {
        tree.extend(at, part, ours, replaced);
      }
      done += count;
      tree.check();
    }
    return at;
  }

  PageAllocator pages, window, slots;
  std::int32_t page_size_;
  RadixTree tree;
};

}  // namespace

TEST(only_the_window_is_held_as_a_request_runs_on) {
  Pools pools(2000, 100, 0, 16, 256);
  const NodeRef at = pools.compute(run(0, 16 * 1500), 10, true);  // 24,000 tokens through 100 window pages
  const std::int32_t held = pools.tree.num_window_pages() - pools.tree.num_evictable_window_pages();
  CHECK(held >= 16);
  CHECK(held <= 16 + 2 * 16);  // window and slack
  std::vector<PageId> table;
  at.append_window_pages(table);
  CHECK_EQ(table.size(), 1500U);
  CHECK_EQ(table[0], -1);
  for (std::size_t i = 1500 - 16; i < 1500; ++i) CHECK(table[i] >= 0);
}

TEST(a_moved_reference_lets_go_of_its_window_once) {
  Pools pools(100, 100, 0, 2, 9);
  {
    NodeRef at = pools.compute(run(0, 40), 20, true);
    NodeRef moved(std::move(at));
    std::vector<PageId> table;
    moved.append_window_pages(table);
    CHECK(table.back() >= 0);
    at = std::move(moved);
    CHECK(pools.tree.num_evictable_window_pages() < 20);
  }
  CHECK_EQ(pools.tree.num_evictable_window_pages(), 20);
  pools.tree.check();
}

TEST(one_long_chunk_is_cut_where_the_window_begins) {
  Pools pools(600, 600, 0, 16, 128);
  const NodeRef at = pools.compute(run(0, 16 * 512), 512, true);
  CHECK_EQ(pools.tree.num_window_pages(), 512);
  CHECK_EQ(pools.tree.num_evictable_window_pages(), 512 - 8);
  CHECK_EQ(pools.tree.evict_window(600), 504);
  CHECK_EQ(pools.tree.num_locked_pages(), 512);
  pools.tree.check();
}

TEST(a_hit_needs_the_last_window_only) {
  Pools pools(400, 400, 0, 2, 5);  // sees four tokens before its own: two pages
  const std::vector<TokenId> tokens = run(0, 400);
  { const NodeRef at = pools.compute(tokens, 200, true); }
  CHECK_EQ(pools.hit(tokens), 200);
  CHECK_EQ(pools.tree.evict_window(1), 128);  // the front
  CHECK_EQ(pools.hit(tokens), 200);
  CHECK_EQ(pools.tree.probe(tokens, 130).num_pages, 130);
  CHECK_EQ(pools.tree.probe(tokens, 129).num_pages, 0);  // its window lacks a page
  CHECK_EQ(pools.tree.probe(tokens, 128).num_pages, 0);
  const NodeRef at = pools.tree.lock_prefix(tokens, 150);
  std::vector<PageId> table;
  at.append_window_pages(table);
  CHECK_EQ(table.size(), 150U);
  CHECK(table[148] >= 0 && table[149] >= 0);
  CHECK_EQ(table[0], -1);
  pools.tree.check();
}

TEST(a_request_that_computes_again_mends_the_window) {
  Pools pools(100, 100, 0, 2, 5);
  const std::vector<TokenId> tokens = run(0, 60);
  { const NodeRef at = pools.compute(tokens, 30, true); }
  pools.tree.evict_window(1000);
  CHECK_EQ(pools.hit(tokens), 0);
  CHECK_EQ(pools.tree.num_window_pages(), 0);
  { const NodeRef at = pools.compute(tokens, 7, true); }
  CHECK_EQ(pools.hit(tokens), 30);
  CHECK_EQ(pools.tree.num_pages(), 30);
  CHECK_EQ(pools.pages.num_free(), 70);
}

TEST(a_model_with_a_state_goes_on_from_a_snapshot) {
  Pools pools(100, 0, 4, 2, 0);
  const std::vector<TokenId> tokens = run(0, 20);
  {
    NodeRef at = pools.compute(run(0, 8), 4, false);
    pools.tree.attach_snapshot(at, pools.slots.allocate(1));
    pools.tree.attach_snapshot(at, pools.slots.allocate(1));  // there is one: ours goes back
    CHECK_EQ(pools.slots.num_free(), 3);
    std::vector<PageReplacement> replaced;
    OwnedPages rest = pools.pages.allocate(6);
    pools.tree.extend(at, std::span(tokens).subspan(8), rest, replaced);
    CHECK_EQ(pools.tree.num_nodes(), 2);  // a node with a snapshot does not grow
    CHECK_EQ(pools.hit(tokens), 4);       // the pages behind it do not help
  }
  NodeRef at = pools.tree.lock_prefix(tokens, 10);
  SnapshotRef state = pools.tree.borrow_snapshot(at);
  CHECK(!state.empty());
  const PageId slot = state.slot();
  CHECK_EQ(pools.tree.evict_snapshots(4), 0);  // it is being read
  // A fork inside the node cuts it; the snapshot stays at its end and the reader keeps its slot.
  std::vector<TokenId> fork = run(0, 4);
  for (TokenId token = 90; token < 94; ++token) fork.push_back(token);
  {
    NodeRef other = pools.compute(fork, 2, false);
    CHECK_EQ(pools.hit(fork), 0);
    pools.tree.attach_snapshot(other, pools.slots.allocate(1));
  }
  CHECK_EQ(pools.hit(fork), 4);
  CHECK_EQ(state.slot(), slot);
  CHECK_EQ(pools.hit(tokens), 4);
  at = NodeRef();
  CHECK_EQ(pools.tree.evict(100), 8);  // the path of the reader stays
  CHECK_EQ(state.slot(), slot);
  state = SnapshotRef();
  CHECK_EQ(pools.tree.evict_snapshots(4), 1);
  CHECK_EQ(pools.hit(tokens), 0);
  CHECK_EQ(pools.slots.num_free(), 4);
  pools.tree.check();
}

TEST(the_snapshot_that_was_read_last_goes_last) {
  Pools pools(100, 0, 4, 2, 0);
  for (TokenId first : {0, 100, 200}) {
    const NodeRef at = pools.compute(run(first, 4), 2, false);
    pools.tree.attach_snapshot(at, pools.slots.allocate(1));
  }
  pools.tree.tick();
  {
    const NodeRef at = pools.tree.lock_prefix(run(0, 4), 2);
    const SnapshotRef state = pools.tree.borrow_snapshot(at);
  }
  CHECK_EQ(pools.tree.evict_snapshots(2), 2);
  CHECK_EQ(pools.hit(run(0, 4)), 2);
  CHECK_EQ(pools.hit(run(100, 4)), 0);
}

TEST(an_end_that_is_evicted_takes_its_snapshot_along) {
  Pools pools(100, 0, 4, 2, 0);
  {
    const NodeRef at = pools.compute(run(0, 8), 4, false);
    pools.tree.attach_snapshot(at, pools.slots.allocate(1));
  }
  CHECK_EQ(pools.tree.evict(1), 1);
  CHECK_EQ(pools.tree.num_snapshots(), 0);
  CHECK_EQ(pools.hit(run(0, 8)), 0);
  CHECK_EQ(pools.slots.num_free(), 4);
  pools.tree.check();
}

namespace {

// Random lives with both groups. Contents of a page are the hash of all tokens up to its end; so are those of a snapshot.
struct World {
  explicit World(std::uint32_t seed)
      : random(seed),
        page_size(1 + pick(3)),
        window_tokens(1 + pick(7)),
        has_window(pick(4) != 0),
        has_state(pick(2) == 0),
        pools(20 + pick(60), has_window ? 16 + pick(40) : 0, has_state ? 3 + pick(6) : 0, page_size, window_tokens),
        page_data(static_cast<std::size_t>(pools.pages.num_pages()), kGarbage),
        window_data(static_cast<std::size_t>(pools.window.num_pages()), kGarbage),
        slot_data(static_cast<std::size_t>(pools.slots.num_pages()), kGarbage),
        requests(3) {}

  struct Request {
    std::vector<TokenId> tokens;
    std::int32_t done = 0;
    NodeRef at;
    SnapshotRef state;
  };

  std::int32_t pick(std::int32_t below) { return static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(below)); }

  void start(Request& r) {
    r = Request();
    const std::int32_t rarely = 10 + pick(60);
    const std::int32_t base = pick(2);
    for (std::int32_t i = 0; i < page_size * (1 + pick(14)); ++i) r.tokens.push_back(pick(rarely) == 0 ? pick(3) : base + i / 4);
    r.tokens.resize(r.tokens.size() / static_cast<std::size_t>(page_size) * static_cast<std::size_t>(page_size));
    const auto num_pages = static_cast<std::int32_t>(r.tokens.size()) / page_size;
    const PrefixProbe hit = pools.tree.probe(r.tokens, num_pages);
    r.at = pools.tree.lock_prefix(r.tokens, num_pages);
    r.done = hit.num_pages;
    hits += r.done;
    if (has_state && r.done > 0) {
      r.state = pools.tree.borrow_snapshot(r.at);
      CHECK(!r.state.empty());
      CHECK(slot_data.at(static_cast<std::size_t>(r.state.slot())) == hash_pages(r.tokens, page_size, {}).at(static_cast<std::size_t>(r.done - 1)));
    }
    read(r);
  }

  void read(const Request& r) {
    const std::vector<BlockHash> expected = hash_pages(r.tokens, page_size, {});
    std::vector<PageId> path, window_path;
    r.at.append_path_pages(path);
    CHECK_EQ(static_cast<std::int32_t>(path.size()), r.done);
    for (std::size_t i = 0; i < path.size(); ++i) CHECK(page_data.at(static_cast<std::size_t>(path[i])) == expected[i]);
    if (!has_window) return;
    r.at.append_window_pages(window_path);
    CHECK_EQ(window_path.size(), path.size());
    for (std::size_t i = 0; i < window_path.size(); ++i) {
      const auto end = static_cast<std::int32_t>(i + 1) * page_size;
      const bool is_seen = end > r.done * page_size - (window_tokens - 1);
      CHECK(!is_seen || window_path[i] >= 0);
      if (window_path[i] >= 0) CHECK(window_data.at(static_cast<std::size_t>(window_path[i])) == expected[i]);
    }
  }

  void grow(Request& r) {
    const auto num_pages = static_cast<std::int32_t>(r.tokens.size()) / page_size;
    if (r.at.empty() || r.done == num_pages) return start(r);
    const std::int32_t count = 1 + pick(num_pages - r.done);
    if (pools.pages.num_free() < count) pools.tree.evict(count - pools.pages.num_free());
    if (has_window && pools.window.num_free() < count) pools.tree.evict_window(count - pools.window.num_free());
    if (pools.pages.num_free() < count || (has_window && pools.window.num_free() < count)) return;
    const std::vector<BlockHash> expected = hash_pages(r.tokens, page_size, {});
    const auto tokens = std::span(r.tokens).subspan(static_cast<std::size_t>(r.done * page_size), static_cast<std::size_t>(count * page_size));
    OwnedPages pages = pools.pages.allocate(count);
    std::vector<PageReplacement> replaced, window_replaced;
    const auto write = [&](std::vector<BlockHash>& data, const OwnedPages& to) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) data.at(static_cast<std::size_t>(to.ids()[i])) = expected.at(static_cast<std::size_t>(r.done) + i);
    };
    write(page_data, pages);
    if (has_window) {
      OwnedPages window = pools.window.allocate(count);
      write(window_data, window);
      CHECK_EQ(pools.tree.extend(r.at, tokens, pages, replaced, window, window_replaced), count);
      CHECK_EQ(window.size(), 0);
    } else {
      CHECK_EQ(pools.tree.extend(r.at, tokens, pages, replaced), count);
    }
    for (const PageReplacement& one : replaced) CHECK(page_data.at(static_cast<std::size_t>(one.page)) == expected.at(static_cast<std::size_t>(r.done + one.index)));
    for (const PageReplacement& one : window_replaced) CHECK(window_data.at(static_cast<std::size_t>(one.page)) == expected.at(static_cast<std::size_t>(r.done + one.index)));
    r.done += count;
    if (has_state && pick(2) == 0) {
      if (pools.slots.num_free() == 0) pools.tree.evict_snapshots(1);
      if (pools.slots.num_free() > 0) {
        OwnedPages slot = pools.slots.allocate(1);
        slot_data.at(static_cast<std::size_t>(slot.ids()[0])) = expected.at(static_cast<std::size_t>(r.done - 1));
        pools.tree.attach_snapshot(r.at, std::move(slot));
      }
    }
    read(r);
  }

  void step() {
    pools.tree.tick();
    Request& r = requests[static_cast<std::size_t>(pick(3))];
    switch (pick(12)) {
      case 0: pools.tree.evict(1 + pick(6)); break;
      case 1: pools.tree.evict_window(1 + pick(6)); break;
      case 2: pools.tree.evict_snapshots(1); break;
      case 3: r = Request(); break;
      case 4: r.state = SnapshotRef(); break;
      default: grow(r);
    }
    check();
  }

  void check() {
    pools.tree.check();
    std::vector<std::int32_t> pages(page_data.size()), window(window_data.size()), slots(slot_data.size());
    const auto count = [](std::vector<std::int32_t>& owners, std::span<const PageId> ids) {
      for (const PageId id : ids) ++owners.at(static_cast<std::size_t>(id));
    };
    count(pages, pools.pages.free_pages());
    count(window, pools.window.free_pages());
    count(slots, pools.slots.free_pages());
    pools.tree.for_each_node([&](const detail::RadixNode& node) {
      count(pages, node.pages.ids());
      count(window, node.window_pages.ids());
      count(slots, node.snapshot.ids());
    });
    for (const auto* owners : {&pages, &window, &slots}) {
      for (const std::int32_t owner : *owners) CHECK_EQ(owner, 1);
    }
    for (const Request& r : requests) {
      if (!r.at.empty()) read(r);
      if (!r.state.empty()) CHECK(slot_data.at(static_cast<std::size_t>(r.state.slot())) != kGarbage);
    }
  }

  std::mt19937 random;
  std::int32_t page_size, window_tokens;
  bool has_window, has_state;
  Pools pools;
  std::vector<BlockHash> page_data, window_data, slot_data;
  std::vector<Request> requests;
  std::int64_t hits = 0;
};

}  // namespace

TEST(random_lives_with_groups_go_on_only_where_every_group_can) {
  std::int64_t hits = 0;
  for (std::uint32_t seed = 0; seed < 150; ++seed) {
    World world(seed);
    for (int i = 0; i < 200; ++i) world.step();
    hits += world.hits;
    if (seed % 5 == 0) continue;
    world.requests.clear();
    world.check();
    CHECK_EQ(world.pools.tree.num_locked_pages(), 0);
    world.pools.tree.flush();
    CHECK_EQ(world.pools.tree.num_nodes(), 0);
    CHECK_EQ(world.pools.window.num_free(), world.pools.window.num_pages());
    CHECK_EQ(world.pools.slots.num_free(), world.pools.slots.num_pages());
  }
  CHECK(hits > 1000);
}
