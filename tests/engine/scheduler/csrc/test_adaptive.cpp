// Adaptive eviction: what is learnt, and what it gives on sessions that come back.
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "cache/radix_tree.h"
#include "check.h"

using namespace tokenspeed;

namespace {

constexpr std::int64_t kSecond = 1'000'000;

// Sessions of one growing conversation each, in a tree of one-token pages that holds half of them, half of it on the host.
struct Sessions {
  Sessions(bool adaptive, std::function<std::int64_t(std::mt19937&)> gap_us, bool tells_end = false)
      : device(kNumSessions * kPages / 4),
        host(kNumSessions * kPages / 4),
        tree(device, 1, options(adaptive)),
        draw(std::move(gap_us)),
        retires(tells_end) {}
  Sessions(const Sessions&) = delete;

  static constexpr std::int32_t kNumSessions = 32, kPages = 60;

  RadixTreeOptions options(bool adaptive) {
    RadixTreeOptions made;
    made.host = &host;
    made.adaptive_eviction = adaptive;
    return made;
  }

  // Share of the prompts' pages that either tier had.
  double hit_rate(std::int32_t num_turns) {
    struct Session {
      TokenId name;
      std::int32_t turn = 0;
    };
    std::mt19937 random(7);
    std::multimap<std::int64_t, Session> arrivals;
    TokenId next_name = 0;
    for (; next_name < kNumSessions; ++next_name) arrivals.emplace(draw(random), Session{next_name});
    std::int64_t hits = 0, prompts = 0;
    for (std::int32_t i = 0; i < num_turns; ++i) {
      const std::int64_t now = arrivals.begin()->first;
      Session session = arrivals.begin()->second;
      arrivals.erase(arrivals.begin());
      tree.advance_clock(now);
      std::vector<TokenId> tokens;
      for (std::int32_t page = 0; page < kPages - 12 + session.turn; ++page) tokens.push_back(session.name * 1000 + page);
      const auto num_pages = static_cast<std::int32_t>(tokens.size());
      NodeRef at = tree.lock_prefix(tokens, num_pages - 1, {}, Tier::kHost);
      make_room(tree.num_load_pages(at));
      std::vector<PagePair> pairs;
      if (const TransferId id = tree.begin_load_back(at, pairs); id != kNoTransfer) CHECK(tree.complete(id));
      std::vector<PageId> path;
      at.append_path_pages(path);
      const auto hit = static_cast<std::int32_t>(path.size());
      if (session.turn > 0) {
        hits += hit;
        prompts += num_pages;
      }
      make_room(num_pages - hit);
      OwnedPages pages = device.allocate(num_pages - hit);
      std::vector<PageReplacement> replaced;
      CHECK_EQ(tree.extend(at, std::span(tokens).subspan(static_cast<std::size_t>(hit)), pages, replaced), num_pages - hit);
      if (++session.turn == 12) {
        if (retires) tree.retire(std::move(at));
        session = Session{next_name++};
      }
      at = NodeRef();
      arrivals.emplace(now + draw(random), session);
      if (i % 50 == 0) tree.check();
    }
    return static_cast<double>(hits) / static_cast<double>(prompts);
  }

  // Write-back: what leaves the device goes to the host when it is worth more than what is there.
  void make_room(std::int32_t count) {
    while (device.num_free() < count) {
      std::vector<PagePair> pairs;
      if (const TransferId id = tree.begin_write_back(count - device.num_free(), pairs); id != kNoTransfer) CHECK(tree.complete(id));
      CHECK(tree.evict(count - device.num_free()) > 0);
    }
  }

  PageAllocator device, host;
  RadixTree tree;
  std::function<std::int64_t(std::mt19937&)> draw;
  bool retires;
};

// Numbers of std::mt19937 are the same everywhere; the distributions of the library are not.
double uniform(std::mt19937& random) { return (static_cast<double>(random() >> 5) + 0.5) / 134217728.0; }

std::int64_t about_the_same(std::mt19937& random) { return static_cast<std::int64_t>((10 + 10 * uniform(random)) * kSecond); }

// Most come back from a tool within seconds, some from a human after minutes.
std::int64_t tools_and_humans(std::mt19937& random) {
  const bool tool = uniform(random) < 0.8;
  const double u = uniform(random);
  return static_cast<std::int64_t>((tool ? 1 + 6 * u * u : 60 + 240 * u) * kSecond);
}

}  // namespace

TEST(classes_of_idle_time_have_no_gap) {
  CHECK_EQ(ReturnTimes::class_of(0), 0);
  CHECK_EQ(ReturnTimes::class_of(1023), 0);
  CHECK_EQ(ReturnTimes::class_of(1024), 1);
  for (int i = 1; i < ReturnTimes::kNumClasses; ++i) {
    CHECK_EQ(ReturnTimes::class_of(ReturnTimes::shortest_us(i)), i);
    CHECK_EQ(ReturnTimes::class_of(ReturnTimes::shortest_us(i) - 1), i - 1);
  }
  CHECK_EQ(ReturnTimes::class_of(std::int64_t{1} << 62), ReturnTimes::kNumClasses - 1);
}

TEST(the_longest_idle_goes_first_until_something_is_known) {
  ReturnTimes times;
  CHECK(!times.is_known());
  CHECK_EQ(times.order()[0], ReturnTimes::kNumClasses - 1);
  CHECK(times.rank(10) < times.rank(9));
}

TEST(who_has_just_left_goes_first_when_all_stay_away_equally_long) {
  ReturnTimes times;
  for (int i = 0; i < 128; ++i) times.returned(20 * kSecond);
  CHECK(times.is_known());
  CHECK(times.rank(ReturnTimes::class_of(2 * kSecond)) < times.rank(ReturnTimes::class_of(15 * kSecond)));
  // Whoever is away for longer than anybody ever was is not waited for.
  CHECK(times.rank(ReturnTimes::class_of(60 * kSecond)) < times.rank(ReturnTimes::class_of(2 * kSecond)));
}

TEST(the_longest_idle_goes_first_when_most_return_at_once) {
  ReturnTimes times;
  for (int i = 0; i < 256; ++i) {
    times.returned(kSecond / 2);
    if (i % 4 == 0) times.returned(kSecond * (20 + i));
  }
  CHECK(times.rank(ReturnTimes::class_of(20 * kSecond)) < times.rank(ReturnTimes::class_of(kSecond / 4)));
}

TEST(what_was_given_up_is_not_taken_for_a_short_absence) {
  // Half is evicted after a second, so only the quick returns of the rest are seen early: the later ones still count.
  ReturnTimes times;
  for (int i = 0; i < 256; ++i) {
    times.given_up(kSecond);
    times.returned(10 * kSecond);
  }
  CHECK(times.rank(ReturnTimes::class_of(2 * kSecond)) < times.rank(ReturnTimes::class_of(8 * kSecond)));
}

TEST(sessions_that_return_after_about_the_same_time_are_found_again) {
  const double lru = Sessions(false, about_the_same).hit_rate(4000);
  const double adaptive = Sessions(true, about_the_same).hit_rate(4000);
  const double told = Sessions(true, about_the_same, true).hit_rate(4000);
  CHECK(lru < 0.25);
  CHECK(adaptive > 2 * lru);
  CHECK(told > adaptive);
}

TEST(sessions_of_tools_and_humans_are_found_at_least_as_often) {
  const double lru = Sessions(false, tools_and_humans).hit_rate(4000);
  const double adaptive = Sessions(true, tools_and_humans).hit_rate(4000);
  CHECK(lru > 0.5);
  CHECK(adaptive > lru);
}

TEST(a_retired_path_goes_before_older_ones) {
  PageAllocator device(20), host(20);
  RadixTree tree(device, 1, {&host});
  const auto compute = [&](TokenId name, std::int32_t num_pages) {
    tree.tick();
    std::vector<TokenId> tokens{1, 2};
    while (static_cast<std::int32_t>(tokens.size()) < num_pages) tokens.push_back(name);
    NodeRef at = tree.lock_prefix(tokens, num_pages);
    std::vector<PageReplacement> replaced;
    const std::int32_t hit = tree.probe(tokens, num_pages).num_pages;
    tree.extend(at, std::span(tokens).subspan(static_cast<std::size_t>(hit)), device.allocate(num_pages - hit), replaced);
    return std::make_pair(std::move(at), tokens);
  };
  auto [first, first_tokens] = compute(7, 6);
  first = NodeRef();
  auto [second, second_tokens] = compute(8, 6);
  tree.retire(std::move(second));
  tree.check();
  CHECK_EQ(tree.evict(4), 4);
  CHECK_EQ(tree.probe(first_tokens, 9).num_pages, 6);
  CHECK_EQ(tree.probe(second_tokens, 9).num_pages, 2);  // what both share stays
  tree.retire(NodeRef());
}
