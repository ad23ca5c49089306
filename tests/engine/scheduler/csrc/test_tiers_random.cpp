// Random lives of the two-tier tree, held against a model in which a page's contents are the hash of all tokens up to its end.
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cache/radix_tree.h"
#include "check.h"

using namespace tokenspeed;

namespace {

constexpr BlockHash kGarbage{};
const std::string kSalts[] = {"", "a", "b"};

struct Request {
  std::string salt;
  std::vector<TokenId> tokens;  // all that it will compute
  std::int32_t done = 0;        // pages of them in the tree
  NodeRef at;
  bool waits = false;
};

struct Copy {
  TransferId id;
  bool to_host;
  std::vector<PagePair> pairs;
};

struct World {
  explicit World(std::uint32_t seed)
      : random(seed),
        page_size(1 + pick(3)),
        device(6 + pick(30)),
        host(1 + pick(40)),
        events(1'000'000),
        tree(device, page_size, {&host, pick(4) == 0 ? nullptr : &events, pick(2) == 0, pick(2) == 0}),
            device_data(static_cast<std::size_t>(device.num_pages()), kGarbage),
        host_data(static_cast<std::size_t>(host.num_pages()), kGarbage) {
    random.seed(seed);
    requests.resize(4);
  }

  std::int32_t pick(std::int32_t below) { return static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(below)); }
  std::vector<BlockHash> hashes(const Request& r) const { return hash_pages(r.tokens, page_size, r.salt); }
  BlockHash& on_device(PageId page) { return device_data.at(static_cast<std::size_t>(page)); }
  BlockHash& on_host(PageId page) { return host_data.at(static_cast<std::size_t>(page)); }
  std::span<const TokenId> slice(const Request& r, std::int32_t first, std::int32_t count) const {
    return std::span(r.tokens).subspan(static_cast<std::size_t>(first * page_size), static_cast<std::size_t>(count * page_size));
  }

  std::vector<TokenId> sequence() {
    std::vector<TokenId> tokens;
    const std::int32_t base = pick(2);
    const std::int32_t rarely = 8 + pick(40);
    for (std::int32_t i = 0; i < page_size * (1 + pick(10)); ++i) tokens.push_back(pick(rarely) == 0 ? pick(3) : base + i / 4);
    tokens.resize(tokens.size() / static_cast<std::size_t>(page_size) * static_cast<std::size_t>(page_size));
    return tokens;
  }

  void start(Request& r) {
    r = Request();
    r.salt = kSalts[static_cast<std::size_t>(pick(5) % 3 % 2 + pick(9) / 8)];
    r.tokens = sequence();
    const auto num_pages = static_cast<std::int32_t>(r.tokens.size()) / page_size;
    const std::int32_t limit = pick(3) == 0 ? pick(num_pages + 1) : num_pages;
    const PrefixProbe hit = tree.probe(r.tokens, limit, r.salt);
    const bool loads = pick(2) == 0;
    r.at = tree.lock_prefix(r.tokens, limit, r.salt, loads ? Tier::kHost : Tier::kDevice);
    const PrefixProbe after = tree.probe(r.tokens, limit, r.salt);
    CHECK_EQ(hit.num_pages, after.num_pages);
    CHECK_EQ(hit.num_pages, after.num_locked_pages);
    CHECK_EQ(hit.num_host_pages, after.num_host_pages);
    CHECK_EQ(hit.num_loading_pages, after.num_loading_pages);
    r.done = hit.num_pages;
    if (!loads) {
      CHECK(tree.is_ready(r.at));
    } else {
      r.done += hit.num_loading_pages + hit.num_host_pages;
      CHECK_EQ(tree.num_load_pages(r.at), hit.num_load_pages);
      if (device.num_free() < hit.num_load_pages) tree.evict(hit.num_load_pages - device.num_free());
      Copy copy{0, false, {}};
      copy.id = tree.begin_load_back(r.at, copy.pairs);
      if (copy.id != kNoTransfer) {
        CHECK_EQ(copy.pairs.size(), static_cast<std::size_t>(hit.num_load_pages));
        loads_begun += hit.num_load_pages;
        copies.push_back(std::move(copy));
      } else if (hit.num_load_pages > 0) {  // no room: it goes without
        r.at = tree.lock_prefix(r.tokens, limit, r.salt);
        r.done = hit.num_pages;
      }
      r.waits = !tree.is_ready(r.at);
      if (!r.waits) read(r);
    }
  }

  // What a request finds must be what it would have computed.
  void read(const Request& r) {
    std::vector<PageId> path;
    r.at.append_path_pages(path);
    CHECK_EQ(static_cast<std::int32_t>(path.size()), r.done);
    const std::vector<BlockHash> expected = hashes(r);
    for (std::size_t i = 0; i < path.size(); ++i) CHECK(on_device(path[i]) == expected[i]);
  }

  void grow(Request& r) {
    if (r.at.empty()) return start(r);
    if (r.waits) {
      if (tree.is_ready(r.at)) {
        r.waits = false;
        read(r);
      } else if (tree.num_load_pages(r.at) > 0) {  // its load-back failed
        r = Request();
      }
      return;
    }
    const auto num_pages = static_cast<std::int32_t>(r.tokens.size()) / page_size;
    if (r.done == num_pages || pick(8) == 0) {
      if (pick(2) == 0) begin(tree_write_through(r, true));
      if (pick(4) == 0) sessions.emplace_back(tree.keep(r.at), r.salt, std::vector<TokenId>(slice(r, 0, r.done).begin(), slice(r, 0, r.done).end()));
      r = Request();
      return;
    }
    const std::int32_t count = 1 + pick(num_pages - r.done);
    if (device.num_free() < count) tree.evict(count - device.num_free());
    if (device.num_free() < count) return;
    OwnedPages pages = device.allocate(count);
    const std::vector<BlockHash> expected = hashes(r);
    for (std::int32_t i = 0; i < count; ++i) on_device(pages.ids()[static_cast<std::size_t>(i)]) = expected[static_cast<std::size_t>(r.done + i)];
    std::vector<PageReplacement> replaced;
    const std::int32_t taken = tree.extend(r.at, slice(r, r.done, count), pages, replaced);
    CHECK_EQ(pages.size(), count - taken);
    for (const PageReplacement& replacement : replaced) {
      CHECK(on_device(replacement.page) == expected[static_cast<std::size_t>(r.done + replacement.index)]);
    }
    blocked += taken < count ? 1 : 0;
    r.done += taken;
    read(r);
    if (pick(3) == 0) begin(tree_write_through(r, false));
  }

  Copy tree_write_through(Request& r, bool finished) {
    Copy copy{0, true, {}};
    copy.id = tree.begin_write_through(r.at, finished, copy.pairs);
    return copy;
  }

  void begin(Copy&& copy) {
    CHECK_EQ(copy.id == kNoTransfer, copy.pairs.empty());
    if (copy.id != kNoTransfer) copies.push_back(std::move(copy));
  }

  // Copies end in any order; each reads its source only now, so a source that was given away shows.
  void end_copy() {
    if (copies.empty()) return;
    const auto at = copies.begin() + pick(static_cast<std::int32_t>(copies.size()));
    const Copy copy = std::move(*at);
    copies.erase(at);
    CHECK(tree.in_flight(copy.id));
    if (pick(6) == 0) {
      for (const PagePair& pair : copy.pairs) (copy.to_host ? on_host(pair.to) : on_device(pair.to)) = kGarbage;
      CHECK(tree.fail(copy.id));
      return;
    }
    for (const PagePair& pair : copy.pairs) {
      if (copy.to_host) {
        on_host(pair.to) = on_device(pair.from);
      } else {
        on_device(pair.to) = on_host(pair.from);
      }
    }
    CHECK(tree.complete(copy.id));
  }

  void fetch() {
    Request r;
    r.salt = kSalts[static_cast<std::size_t>(pick(5) % 3 % 2 + pick(9) / 8)];
    r.tokens = sequence();
    const auto num_pages = static_cast<std::int32_t>(r.tokens.size()) / page_size;
    std::vector<BlockHash> missing;
    const std::int32_t first = tree.missing_hashes(r.tokens, num_pages, r.salt, missing);
    const PrefixProbe hit = tree.probe(r.tokens, num_pages, r.salt);
    CHECK_EQ(first, hit.num_pages + hit.num_loading_pages + hit.num_host_pages);
    CHECK_EQ(static_cast<std::int32_t>(missing.size()), num_pages - first);
    const std::vector<BlockHash> expected = hashes(r);
    CHECK(std::equal(missing.begin(), missing.end(), expected.begin() + first));
    OwnedPages pages = tree.host_allocate(num_pages - first);
    for (std::size_t i = 0; i < static_cast<std::size_t>(pages.size()); ++i) on_host(pages.ids()[i]) = missing[i];
    tree.check();
    if (pick(2) == 0) grow(requests[0]);  // something happens before they arrive
    fetched += tree.insert_host(r.tokens, first, std::move(pages), r.salt);
  }

  void store() {
    std::vector<StorePage> pages;
    const TransferId id = tree.begin_store(1 + pick(8), pages);
    CHECK_EQ(id == kNoTransfer, pages.empty());
    for (const StorePage& page : pages) CHECK(on_host(page.page) == page.hash);
    if (id != kNoTransfer) stores.push_back(id);
  }

  void check() {
    tree.check();
    // Each page of both pools has one owner.
    std::vector<std::int32_t> device_owners(device_data.size()), host_owners(host_data.size());
    for (const PageId page : device.free_pages()) ++device_owners[static_cast<std::size_t>(page)];
    for (const PageId page : host.free_pages()) ++host_owners[static_cast<std::size_t>(page)];
    std::set<std::pair<Tier, BlockHash>> present;
    tree.for_each_node([&](const detail::RadixNode& node) {
      std::vector<const detail::RadixNode*> path;
      for (const detail::RadixNode* n = &node; n != nullptr; n = n->parent) path.push_back(n);
      std::vector<TokenId> tokens;
      for (auto n = path.rbegin(); n != path.rend(); ++n) tokens.insert(tokens.end(), (*n)->tokens.begin(), (*n)->tokens.end());
      const std::vector<BlockHash> expected = hash_pages(tokens, page_size, path.back()->salt);
      const std::size_t before = expected.size() - node.tokens.size() / static_cast<std::size_t>(page_size);
      const bool loading = node.transfer != nullptr && node.transfer->kind == detail::TransferKind::kLoadBack;
      const bool writing = node.transfer != nullptr && node.transfer->kind == detail::TransferKind::kWriteBack;
      for (std::size_t i = 0; i < node.pages.ids().size(); ++i) {
        ++device_owners[static_cast<std::size_t>(node.pages.ids()[i])];
        if (loading) continue;
        CHECK(on_device(node.pages.ids()[i]) == expected[before + i]);
        present.emplace(Tier::kDevice, expected[before + i]);
      }
      for (std::size_t i = 0; i < node.host_pages.ids().size(); ++i) {
        ++host_owners[static_cast<std::size_t>(node.host_pages.ids()[i])];
        if (writing) continue;
        CHECK(on_host(node.host_pages.ids()[i]) == expected[before + i]);
        present.emplace(Tier::kHost, expected[before + i]);
      }
    });
    for (const std::int32_t count : device_owners) CHECK_EQ(count, 1);
    for (const std::int32_t count : host_owners) CHECK_EQ(count, 1);
    for (KvEvent& event : events.drain()) {
      told = true;
      if (event.kind == KvEventKind::kCleared) heard.clear();
      BlockHash before = event.parent;
      for (std::size_t i = 0; i < event.hashes.size(); ++i) {
        const auto entry = std::make_pair(event.tier, event.hashes[i]);
        if (event.kind == KvEventKind::kStored) {
          const auto page = std::span(event.tokens).subspan(i * static_cast<std::size_t>(page_size), static_cast<std::size_t>(page_size));
          CHECK(chain_hash(before, page) == event.hashes[i]);
          CHECK(heard.insert(entry).second);
        } else {
          CHECK_EQ(heard.erase(entry), 1U);
        }
        before = event.hashes[i];
      }
    }
    if (told) CHECK(heard == present);
    for (const auto& [ref, salt, tokens] : sessions) {
      if (ref.empty()) continue;
      const PrefixProbe hit = tree.probe(tokens, 1000, salt);
      CHECK_EQ(hit.num_pages + hit.num_loading_pages + hit.num_host_pages, static_cast<std::int32_t>(tokens.size()) / page_size);
    }
  }

  void step() {
    now_us += pick(2) == 0 ? pick(50'000'000) : 0;
    tree.advance_clock(now_us);
    tree.tick();
    Request& r = requests[static_cast<std::size_t>(pick(4))];
    switch (pick(24)) {
      case 0: tree.evict(1 + pick(6)); break;
      case 1: tree.evict(1 + pick(6), EvictMode::kCleanOnly); break;
      case 2: tree.evict_host(1 + pick(4)); break;
      case 3: {
        Copy copy{0, true, {}};
        copy.id = tree.begin_write_back(1 + pick(8), copy.pairs);
        begin(std::move(copy));
        break;
      }
      case 4:
        if (!r.at.empty() && !r.waits) {
          Copy copy{0, true, {}};
          copy.id = tree.begin_offload(r.at, copy.pairs);
          offloads += copy.id != kNoTransfer ? 1 : 0;
          begin(std::move(copy));
        }
        break;
      case 5:
        if (!sessions.empty()) sessions.erase(sessions.begin() + pick(static_cast<std::int32_t>(sessions.size())));
        break;
      case 6: fetch(); break;
      case 7: store(); break;
      case 8:
        if (!stores.empty()) {
          CHECK(pick(3) == 0 ? tree.fail(stores.back()) : tree.complete(stores.back()));
          stores.pop_back();
        }
        break;
      case 9:
        if (pick(20) == 0) tree.flush();
        break;
      case 10:
        if (pick(3) == 0 && !r.waits) tree.retire(std::move(r.at));
        r = Request();
        break;
      case 11:
      case 12: end_copy(); break;
      default: grow(r);
    }
    check();
  }

  struct Session {
    KeepRef ref;
    std::string salt;
    std::vector<TokenId> tokens;
    Session(KeepRef&& r, std::string s, std::vector<TokenId> t) : ref(std::move(r)), salt(std::move(s)), tokens(std::move(t)) {}
  };

  std::mt19937 random;
  std::int32_t page_size;
  PageAllocator device, host;
  KvEventBuffer events;
  RadixTree tree;
  bool told = false;
  std::vector<BlockHash> device_data, host_data;
  std::vector<Request> requests;
  std::vector<Session> sessions;
  std::vector<Copy> copies;
  std::vector<TransferId> stores;
  std::set<std::pair<Tier, BlockHash>> heard;
  std::int64_t now_us = 0;
  std::int64_t loads_begun = 0, fetched = 0, blocked = 0, offloads = 0;
};

}  // namespace

TEST(random_lives_of_two_tiers_find_what_they_would_have_computed) {
  std::int64_t loads = 0, fetched = 0, blocked = 0, offloads = 0;
  for (std::uint32_t seed = 0; seed < 150; ++seed) {
    World world(seed);
    for (int i = 0; i < 400; ++i) world.step();
    loads += world.loads_begun;
    fetched += world.fetched;
    blocked += world.blocked;
    offloads += world.offloads;
    if (seed % 5 == 0) continue;  // some are destroyed in the middle
    world.requests.clear();
    world.sessions.clear();
    while (!world.copies.empty()) world.end_copy();
    for (const TransferId id : world.stores) CHECK(world.tree.complete(id));
    world.check();
    CHECK_EQ(world.tree.num_locked_pages(), 0);
    world.tree.flush();
    CHECK_EQ(world.tree.num_nodes(), 0);
    CHECK_EQ(world.device.num_free(), world.device.num_pages());
    CHECK_EQ(world.host.num_free(), world.host.num_pages());
  }
  CHECK(loads > 500);
  CHECK(fetched > 1000);
  CHECK(blocked > 100);
  CHECK(offloads > 100);
}
