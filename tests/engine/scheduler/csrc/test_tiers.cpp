// The two tiers: what goes where, what is found, and what a transfer holds while it runs.
#include <utility>
#include <vector>

#include "cache/radix_tree.h"
#include "check.h"

using namespace tokenspeed;

namespace {

constexpr std::int32_t kPageSize = 2;

// Page i of a sequence holds tokens (first + i, first + i).
std::vector<TokenId> run(TokenId first, std::int32_t num_pages) {
  std::vector<TokenId> tokens;
  for (std::int32_t i = 0; i < num_pages * kPageSize; ++i) tokens.push_back(first + i / kPageSize);
  return tokens;
}

std::vector<TokenId> joined(std::vector<TokenId> a, const std::vector<TokenId>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct World {
  explicit World(std::int32_t num_device, std::int32_t num_host)
      : device(num_device), host(num_host), tree(device, kPageSize, {&host, nullptr, true}) {}
  World(const World&) = delete;

  NodeRef compute(const std::vector<TokenId>& tokens, std::string_view salt = {}) {
    tree.tick();
    const auto num_pages = static_cast<std::int32_t>(tokens.size()) / kPageSize;
    const PrefixProbe hit = tree.probe(tokens, num_pages, salt);
    NodeRef at = tree.lock_prefix(tokens, num_pages, salt);
    std::vector<PageReplacement> replaced;
    const auto rest = std::span(tokens).subspan(static_cast<std::size_t>(hit.num_pages * kPageSize));
    CHECK_EQ(tree.extend(at, rest, device.allocate(num_pages - hit.num_pages), replaced), num_pages - hit.num_pages);
    tree.check();
    return at;
  }
  // Writes all that is unlocked and has no copy.
  void write_all() {
    for (TransferId id; (id = tree.begin_write_back(1000, pairs)) != kNoTransfer;) CHECK(tree.complete(id));
    tree.check();
  }
  PrefixProbe probe(const std::vector<TokenId>& tokens, std::string_view salt = {}) const { return tree.probe(tokens, 1000, salt); }

  PageAllocator device, host;
  RadixTree tree;
  std::vector<PagePair> pairs;
};

}  // namespace

TEST(eviction_of_a_device_copy_keeps_the_host_copy) {
  World world(8, 8);
  const std::vector<TokenId> tokens = run(1, 3);
  { const NodeRef ref = world.compute(tokens); }
  world.write_all();
  CHECK_EQ(world.pairs.size(), 3U);
  CHECK_EQ(world.tree.num_clean_evictable_pages(), 3);
  CHECK_EQ(world.tree.evict(8), 3);
  CHECK_EQ(world.device.num_free(), 8);
  CHECK_EQ(world.probe(tokens).num_pages, 0);
  CHECK_EQ(world.probe(tokens).num_host_pages, 3);
  CHECK_EQ(world.probe(tokens).num_load_pages, 3);
  world.tree.check();
  CHECK_EQ(world.tree.evict_host(8), 3);
  CHECK_EQ(world.tree.num_nodes(), 0);
  CHECK_EQ(world.host.num_free(), 8);
}

TEST(one_walk_gives_the_device_hit_and_the_host_hit_behind_it) {
  World world(8, 8);
  const std::vector<TokenId> tokens = run(1, 4);
  { const NodeRef whole = world.compute(tokens); }
  world.write_all();
  const NodeRef front = world.tree.lock_prefix(tokens, 2);
  CHECK_EQ(world.tree.evict(8), 2);
  CHECK_EQ(world.probe(tokens).num_pages, 2);
  CHECK_EQ(world.probe(tokens).num_locked_pages, 2);
  CHECK_EQ(world.probe(tokens).num_host_pages, 2);
  CHECK_EQ(world.tree.probe(tokens, 3).num_host_pages, 1);
  world.tree.check();
}

TEST(a_load_back_brings_the_pages_and_two_requests_share_it) {
  World world(8, 8);
  const std::vector<TokenId> tokens = run(1, 3);
  { const NodeRef ref = world.compute(tokens); }
  world.write_all();
  world.tree.evict(8);
  NodeRef first = world.tree.lock_prefix(tokens, 3, {}, Tier::kHost);
  CHECK(!world.tree.is_ready(first));
  CHECK_EQ(world.tree.num_load_pages(first), 3);
  std::vector<PagePair> pairs;
  const TransferId id = world.tree.begin_load_back(first, pairs);
  CHECK(id != kNoTransfer);
  CHECK_EQ(pairs.size(), 3U);
  CHECK_EQ(world.probe(tokens).num_loading_pages, 3);
  CHECK_EQ(world.probe(tokens).num_load_pages, 0);
  const NodeRef second = world.tree.lock_prefix(tokens, 3, {}, Tier::kHost);
  CHECK_EQ(world.tree.begin_load_back(second, pairs), kNoTransfer);
  first = NodeRef();  // its abort does not disturb the other
  CHECK(!world.tree.is_ready(second));
  CHECK(world.tree.complete(id));
  CHECK(!world.tree.complete(id));
  CHECK(world.tree.is_ready(second));
  std::vector<PageId> path;
  second.append_path_pages(path);
  CHECK_EQ(path[1], pairs[1].to);
  world.tree.check();
}

TEST(a_load_back_without_its_pages_changes_nothing) {
  World world(4, 8);
  const std::vector<TokenId> tokens = run(1, 3);
  { const NodeRef ref = world.compute(tokens); }
  world.write_all();
  world.tree.evict(8);
  const OwnedPages others = world.device.allocate(2);
  const NodeRef ref = world.tree.lock_prefix(tokens, 3, {}, Tier::kHost);
  std::vector<PagePair> pairs;
  CHECK_EQ(world.tree.begin_load_back(ref, pairs), kNoTransfer);
  CHECK(pairs.empty());
  CHECK_EQ(world.device.num_free(), 2);
  world.tree.check();
}

TEST(a_failed_load_back_leaves_the_host_copy_and_the_request_may_compute) {
  World world(8, 8);
  const std::vector<TokenId> tokens = run(1, 3);
  { const NodeRef ref = world.compute(tokens); }
  world.write_all();
  world.tree.evict(8);
  NodeRef ref = world.tree.lock_prefix(tokens, 3, {}, Tier::kHost);
  std::vector<PagePair> pairs;
  const TransferId id = world.tree.begin_load_back(ref, pairs);
  CHECK(world.tree.fail(id));
  world.tree.check();
  CHECK_EQ(world.device.num_free(), 8);
  CHECK_EQ(world.probe(tokens).num_host_pages, 3);
  ref = world.compute(tokens);  // its own pages take the place on the device
  CHECK_EQ(world.probe(tokens).num_pages, 3);
  CHECK(world.tree.is_ready(ref));
  CHECK_EQ(world.tree.num_host_pages(), 3);
  world.tree.check();
}

TEST(nothing_is_published_over_a_page_that_is_loading) {
  World world(8, 8);
  const std::vector<TokenId> tokens = run(1, 3);
  { const NodeRef ref = world.compute(tokens); }
  world.write_all();
  world.tree.evict(8);
  NodeRef slow = world.tree.lock_prefix(tokens, 0);  // computes the same by itself
  const NodeRef loader = world.tree.lock_prefix(tokens, 2, {}, Tier::kHost);
  std::vector<PagePair> pairs;
  const TransferId id = world.tree.begin_load_back(loader, pairs);
  std::vector<PageReplacement> replaced;
  OwnedPages mine = world.device.allocate(3);
  CHECK_EQ(world.tree.extend(slow, tokens, mine, replaced), 0);
  CHECK_EQ(mine.size(), 3);
  world.tree.complete(id);
  CHECK_EQ(world.tree.extend(slow, tokens, mine, replaced), 3);
  CHECK_EQ(replaced.size(), 2U);
  CHECK_EQ(replaced[0].page, pairs[0].to);
  CHECK_EQ(mine.size(), 0);
  CHECK(world.tree.is_ready(slow));
  world.tree.check();
}

TEST(a_split_during_a_write_back_loses_no_page_of_it) {
  World world(8, 8);
  const std::vector<TokenId> tokens = run(1, 4);
  { const NodeRef ref = world.compute(tokens); }
  const TransferId id = world.tree.begin_write_back(8, world.pairs);
  CHECK_EQ(world.tree.evict(8), 0);  // locked
  const NodeRef fork = world.compute(joined(run(1, 1), run(70, 1)));
  CHECK_EQ(world.tree.num_nodes(), 3);
  CHECK(world.tree.complete(id));
  world.tree.check();
  CHECK_EQ(world.tree.evict(8), 3);
  CHECK_EQ(world.probe(tokens).num_pages, 1);
  CHECK_EQ(world.probe(tokens).num_host_pages, 3);
}

TEST(a_failed_write_back_gives_the_host_pages_back_from_both_halves) {
  World world(8, 8);
  const std::vector<TokenId> tokens = run(1, 4);
  { const NodeRef ref = world.compute(tokens); }
  const TransferId id = world.tree.begin_write_back(8, world.pairs);
  { const NodeRef part = world.tree.lock_prefix(tokens, 1); }
  CHECK_EQ(world.host.num_free(), 4);
  CHECK(world.tree.fail(id));
  CHECK_EQ(world.host.num_free(), 8);
  world.tree.check();
  CHECK_EQ(world.tree.evict(8), 4);  // no copy anywhere: it is lost
  CHECK_EQ(world.tree.num_nodes(), 0);
}

TEST(a_transfer_is_no_use) {
  World world(8, 8);
  { const NodeRef ref = world.compute(run(1, 2)); }
  { const NodeRef ref = world.compute(run(50, 2)); }
  world.tree.tick();
  const TransferId id = world.tree.begin_write_back(2, world.pairs);  // the older one
  world.tree.tick();
  world.tree.complete(id);
  CHECK_EQ(world.tree.evict(1), 2);
  CHECK_EQ(world.probe(run(1, 2)).num_host_pages, 2);  // it stayed the older one
  CHECK_EQ(world.probe(run(50, 2)).num_pages, 2);
}

TEST(write_back_follows_a_conversation_from_its_end) {
  World world(16, 16);
  std::vector<TokenId> tokens = run(1, 2);
  NodeRef ref = world.compute(tokens);
  for (TokenId turn = 0; turn < 3; ++turn) {
    const NodeRef other = world.tree.lock_prefix(tokens, 100);  // somebody else's lock keeps the node from growing
    tokens = joined(tokens, run(100 * (turn + 1), 2));
    ref = world.compute(tokens);
  }
  world.tree.tick();
  ref = NodeRef();
  CHECK_EQ(world.tree.num_nodes(), 4);
  const TransferId id = world.tree.begin_write_back(5, world.pairs);
  CHECK_EQ(world.pairs.size(), 5U);
  CHECK(world.tree.complete(id));
  CHECK_EQ(world.tree.evict(100, EvictMode::kCleanOnly), 5);
  CHECK_EQ(world.probe(tokens).num_pages, 3);
  CHECK_EQ(world.probe(tokens).num_host_pages, 5);
  CHECK_EQ(world.tree.evict(100, EvictMode::kCleanOnly), 0);
  world.tree.check();
}

TEST(a_page_that_gives_way_for_another_is_older) {
  World world(8, 2);
  { const NodeRef ref = world.compute(run(1, 2)); }
  world.write_all();
  world.tree.evict(8);
  { const NodeRef ref = world.compute(run(50, 2)); }
  world.write_all();  // newer: it takes the host's place
  CHECK_EQ(world.probe(run(1, 2)).num_host_pages, 0);
  world.tree.evict(8);
  CHECK_EQ(world.probe(run(50, 2)).num_host_pages, 2);
  { const NodeRef ref = world.compute(run(80, 2)); }
  world.tree.tick();
  { const NodeRef used = world.tree.lock_prefix(run(50, 2), 2, {}, Tier::kHost); }  // used, so it is the newer one
  std::vector<PagePair> pairs;
  CHECK_EQ(world.tree.begin_write_back(8, pairs), kNoTransfer);
  CHECK_EQ(world.probe(run(50, 2)).num_host_pages, 2);
  world.tree.check();
}

TEST(copies_of_what_the_device_has_give_way_first) {
  World world(8, 4);
  { const NodeRef ref = world.compute(run(1, 2)); }
  world.write_all();
  world.tree.evict(8);
  { const NodeRef ref = world.compute(run(50, 2)); }
  world.write_all();
  CHECK_EQ(world.tree.evict_host(1), 2);
  CHECK_EQ(world.probe(run(1, 2)).num_host_pages, 2);  // what only the host has stays
  CHECK_EQ(world.probe(run(50, 2)).num_pages, 2);
  CHECK_EQ(world.tree.num_clean_evictable_pages(), 0);
  world.tree.check();
}

TEST(write_through_copies_what_has_stopped_growing) {
  World world(600, 600);
  std::vector<TokenId> tokens = run(1, 100);
  NodeRef ref = world.compute(tokens);
  CHECK_EQ(world.tree.begin_write_through(ref, false, world.pairs), kNoTransfer);  // 200 tokens: it still grows
  std::vector<PageReplacement> replaced;
  const std::vector<TokenId> more = run(1000, 60);
  world.tree.extend(ref, more, world.device.allocate(60), replaced);
  const TransferId id = world.tree.begin_write_through(ref, false, world.pairs);
  CHECK_EQ(world.pairs.size(), 100U);
  CHECK_EQ(world.tree.begin_write_through(ref, false, world.pairs), kNoTransfer);
  CHECK(world.tree.complete(id));
  const TransferId last = world.tree.begin_write_through(ref, true, world.pairs);
  CHECK_EQ(world.pairs.size(), 160U);
  CHECK(world.tree.complete(last));
  ref = NodeRef();
  CHECK_EQ(world.tree.num_clean_evictable_pages(), 160);
  world.tree.check();
}

TEST(a_session_keeps_its_pages_on_the_host) {
  World world(8, 8);
  const std::vector<TokenId> tokens = run(1, 4);
  NodeRef ref = world.compute(tokens);
  CHECK(world.tree.keep(ref).empty());  // not on the host yet
  const TransferId id = world.tree.begin_offload(ref, world.pairs);
  CHECK_EQ(world.tree.begin_offload(ref, world.pairs), kNoTransfer);
  CHECK(world.tree.keep(ref).empty());  // on its way
  world.tree.complete(id);
  KeepRef session = world.tree.keep(ref);
  CHECK(!session.empty());
  ref = NodeRef();
  CHECK_EQ(world.tree.evict_host(8), 0);
  CHECK_EQ(world.tree.evict(8), 4);
  CHECK_EQ(world.tree.evict_host(8), 0);
  CHECK_EQ(world.probe(tokens).num_host_pages, 4);
  world.tree.check();
  { const NodeRef fork = world.tree.lock_prefix(tokens, 2, {}, Tier::kHost); }  // splits it
  world.tree.check();
  session = KeepRef();
  CHECK_EQ(world.tree.evict_host(8), 4);
  world.tree.check();
}

TEST(an_offload_makes_room_without_the_copies_of_its_own_path) {
  World world(12, 6);
  const std::vector<TokenId> base = run(1, 3);
  { const NodeRef ref = world.compute(base); }
  world.write_all();
  { const NodeRef ref = world.compute(run(50, 3)); }
  world.write_all();
  const NodeRef ref = world.compute(joined(base, run(80, 3)));
  const TransferId id = world.tree.begin_offload(ref, world.pairs);
  CHECK(id != kNoTransfer);
  world.tree.complete(id);
  CHECK(!world.tree.keep(ref).empty());
  CHECK_EQ(world.tree.num_host_pages(), 6);
  world.tree.check();
}

TEST(salts_are_worlds_of_their_own_with_one_order_of_eviction) {
  World world(8, 8);
  const std::vector<TokenId> tokens = run(1, 2);
  { const NodeRef ref = world.compute(tokens, "seven"); }
  CHECK_EQ(world.probe(tokens).num_pages, 0);
  CHECK_EQ(world.probe(tokens, "eight").num_pages, 0);
  CHECK_EQ(world.probe(tokens, "seven").num_pages, 2);
  { const NodeRef ref = world.compute(tokens); }
  { const NodeRef ref = world.compute(tokens, "eight"); }
  CHECK_EQ(world.tree.num_pages(), 6);
  CHECK_EQ(world.tree.evict(3), 3);
  CHECK_EQ(world.probe(tokens, "seven").num_pages, 0);
  CHECK_EQ(world.probe(tokens).num_pages, 1);
  CHECK_EQ(world.probe(tokens, "eight").num_pages, 2);
  { const NodeRef nothing = world.tree.lock_prefix(tokens, 2, "nine"); }
  CHECK_EQ(world.tree.flush(), 3);
  world.tree.check();
}

TEST(pages_of_the_external_store_go_behind_what_the_tree_has) {
  World world(8, 8);
  const std::vector<TokenId> tokens = run(1, 5);
  { const NodeRef ref = world.compute(run(1, 2)); }
  std::vector<BlockHash> missing;
  CHECK_EQ(world.tree.missing_hashes(tokens, 5, {}, missing), 2);
  const std::vector<BlockHash> all = hash_pages(tokens, kPageSize, {});
  CHECK(missing == std::vector<BlockHash>(all.begin() + 2, all.end()));
  // Meanwhile somebody computes page 2: the fetched one goes back.
  { const NodeRef ref = world.compute(run(1, 3)); }
  CHECK_EQ(world.tree.insert_host(tokens, 2, world.tree.host_allocate(3)), 2);
  CHECK_EQ(world.host.num_free(), 6);
  CHECK_EQ(world.probe(tokens).num_pages, 3);
  CHECK_EQ(world.probe(tokens).num_host_pages, 2);
  world.tree.check();
  // The pages before them have gone: nothing leads there.
  world.tree.flush();
  CHECK_EQ(world.tree.insert_host(tokens, 2, world.tree.host_allocate(3)), 0);
  CHECK_EQ(world.tree.insert_host(tokens, 2, world.tree.host_allocate(3), "five"), 0);
  CHECK_EQ(world.host.num_free(), 8);
  CHECK_EQ(world.tree.insert_host(tokens, 0, world.tree.host_allocate(5), "five"), 5);
  CHECK_EQ(world.probe(tokens, "five").num_host_pages, 5);
  world.tree.check();
}

TEST(what_is_stored_once_is_not_stored_again) {
  World world(8, 8);
  const std::vector<TokenId> tokens = run(1, 3);
  { const NodeRef ref = world.compute(tokens); }
  std::vector<StorePage> pages;
  CHECK_EQ(world.tree.begin_store(8, pages), kNoTransfer);
  world.write_all();
  const TransferId failing = world.tree.begin_store(8, pages);
  CHECK_EQ(pages.size(), 3U);
  CHECK(pages[2].hash == hash_pages(tokens, kPageSize, {})[2]);
  CHECK_EQ(world.tree.evict(8), 0);
  CHECK(world.tree.fail(failing));
  const TransferId again = world.tree.begin_store(8, pages);
  CHECK(again != kNoTransfer);
  { const NodeRef part = world.tree.lock_prefix(tokens, 1); }
  CHECK(world.tree.complete(again));
  CHECK_EQ(world.tree.begin_store(8, pages), kNoTransfer);
  CHECK_EQ(world.tree.evict(8), 3);
  world.tree.check();
}

TEST(a_long_prompt_leaves_the_device_in_runs) {
  World world(1024, 1024);
  { const NodeRef ref = world.compute(run(1, 1000)); }
  world.write_all();
  CHECK_EQ(world.tree.evict(1), 128);  // 256 tokens
  CHECK_EQ(world.tree.num_nodes(), 2);
  CHECK_EQ(world.probe(run(1, 1000)).num_pages, 872);
  CHECK_EQ(world.probe(run(1, 1000)).num_host_pages, 128);
  world.tree.check();
}
