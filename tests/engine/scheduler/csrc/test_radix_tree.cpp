#include <utility>
#include <vector>

#include "cache/radix_tree.h"
#include "check.h"

using namespace tokenspeed;

namespace {

constexpr std::int32_t kPageSize = 2;

std::vector<TokenId> tokens(std::initializer_list<TokenId> ids) { return ids; }

// Computes `sequence` like a request would: takes the cached prefix, then puts new pages behind it.
NodeRef insert(RadixTree& tree, PageAllocator& allocator, const std::vector<TokenId>& sequence) {
  const auto num_pages = static_cast<std::int32_t>(sequence.size()) / kPageSize;
  const PrefixProbe hit = tree.probe(sequence, num_pages);
  NodeRef at = tree.lock_prefix(sequence, num_pages);
  std::vector<PageReplacement> replaced;
  const auto rest = std::span(sequence).subspan(static_cast<std::size_t>(hit.num_pages * kPageSize));
  tree.extend(at, rest.first(static_cast<std::size_t>((num_pages - hit.num_pages) * kPageSize)),
              allocator.allocate(num_pages - hit.num_pages), replaced);
  CHECK(replaced.empty());
  return at;
}

std::vector<PageId> path(const NodeRef& ref) {
  std::vector<PageId> pages;
  ref.append_path_pages(pages);
  return pages;
}

}  // namespace

TEST(a_prefix_is_found_by_whole_pages) {
  PageAllocator allocator(8);
  RadixTree tree(allocator, kPageSize);
  { const NodeRef ref = insert(tree, allocator, tokens({1, 2, 3, 4, 5, 6})); }
  CHECK_EQ(tree.probe(tokens({1, 2, 3, 4, 5, 6}), 3).num_pages, 3);
  CHECK_EQ(tree.probe(tokens({1, 2, 3, 4, 5, 6}), 2).num_pages, 2);
  CHECK_EQ(tree.probe(tokens({1, 2, 3, 9}), 2).num_pages, 1);
  CHECK_EQ(tree.probe(tokens({1, 2, 3}), 9).num_pages, 1);
  CHECK_EQ(tree.probe(tokens({1}), 9).num_pages, 0);
  CHECK_EQ(tree.probe(tokens({2, 1}), 9).num_pages, 0);
  CHECK_EQ(tree.num_evictable_pages(), 3);
}

TEST(a_lock_reaches_to_the_root) {
  PageAllocator allocator(8);
  RadixTree tree(allocator, kPageSize);
  NodeRef shared = insert(tree, allocator, tokens({1, 2, 3, 4}));
  NodeRef left = insert(tree, allocator, tokens({1, 2, 3, 4, 5, 5}));
  NodeRef right = insert(tree, allocator, tokens({1, 2, 3, 4, 6, 6}));
  shared = NodeRef();
  left = NodeRef();
  CHECK_EQ(tree.num_locked_pages(), 3);  // the right branch keeps the common part
  CHECK_EQ(tree.evict(8), 1);
  CHECK_EQ(path(right).size(), 3U);
  right = NodeRef();
  CHECK_EQ(tree.num_locked_pages(), 0);
  CHECK_EQ(tree.evict(8), 3);
  CHECK_EQ(allocator.num_free(), 8);
  CHECK_EQ(tree.num_nodes(), 0);
}

TEST(references_survive_a_split_of_their_node) {
  PageAllocator allocator(8);
  RadixTree tree(allocator, kPageSize);
  NodeRef longer = insert(tree, allocator, tokens({1, 1, 2, 2, 3, 3}));
  const std::vector<PageId> before = path(longer);
  const NodeRef fork = insert(tree, allocator, tokens({1, 1, 2, 2, 4, 4}));
  CHECK(path(longer) == before);
  CHECK_EQ(path(fork)[0], before[0]);
  CHECK_EQ(path(fork)[1], before[1]);
  CHECK_EQ(tree.num_locked_pages(), 4);
  longer = NodeRef();
  CHECK_EQ(tree.num_locked_pages(), 3);
}

TEST(the_end_of_the_least_recently_used_leaf_goes_first) {
  PageAllocator allocator(12);
  RadixTree tree(allocator, kPageSize);
  tree.tick();
  { const NodeRef ref = insert(tree, allocator, tokens({1, 1, 2, 2, 3, 3})); }
  tree.tick();
  { const NodeRef ref = insert(tree, allocator, tokens({7, 7, 8, 8})); }
  CHECK_EQ(tree.evict(1), 1);
  CHECK_EQ(tree.probe(tokens({1, 1, 2, 2, 3, 3}), 3).num_pages, 2);
  tree.tick();
  { const NodeRef used = tree.lock_prefix(tokens({1, 1, 2, 2}), 2); }  // now the other one is older
  CHECK_EQ(tree.evict(2), 2);
  CHECK_EQ(tree.probe(tokens({7, 7}), 1).num_pages, 0);
  CHECK_EQ(tree.probe(tokens({1, 1, 2, 2}), 2).num_pages, 2);
}

TEST(equal_times_go_by_construction_number) {
  PageAllocator allocator(12);
  RadixTree tree(allocator, kPageSize);
  { const NodeRef second_in_token_order = insert(tree, allocator, tokens({9, 9})); }
  { const NodeRef first_in_token_order = insert(tree, allocator, tokens({1, 1})); }
  CHECK_EQ(tree.evict(1), 1);
  CHECK_EQ(tree.probe(tokens({9, 9}), 1).num_pages, 0);
  CHECK_EQ(tree.probe(tokens({1, 1}), 1).num_pages, 1);
}

TEST(a_duplicate_is_replaced_and_given_back) {
  PageAllocator allocator(8);
  RadixTree tree(allocator, kPageSize);
  // Two requests compute the same two pages before either commits; the second goes on with a page of its own.
  NodeRef first = tree.lock_prefix({}, 0);
  NodeRef second = tree.lock_prefix({}, 0);
  std::vector<PageReplacement> replaced;
  const std::vector<TokenId> same = tokens({1, 1, 2, 2});
  OwnedPages mine = allocator.allocate(2);
  OwnedPages copy = allocator.allocate(3);
  tree.extend(first, same, std::move(mine), replaced);
  CHECK(replaced.empty());
  const std::vector<TokenId> longer = tokens({1, 1, 2, 2, 3, 3});
  tree.extend(second, longer, std::move(copy), replaced);
  CHECK_EQ(replaced.size(), 2U);
  CHECK_EQ(replaced[0].index, 0);
  CHECK_EQ(replaced[0].page, path(first)[0]);
  CHECK_EQ(replaced[1].page, path(first)[1]);
  CHECK_EQ(path(second).size(), 3U);
  CHECK_EQ(path(second)[0], path(first)[0]);
  CHECK_EQ(tree.num_pages(), 3);
  CHECK_EQ(allocator.num_free(), 5);
}

TEST(a_duplicate_may_end_inside_a_node_and_lie_on_an_unlocked_path) {
  PageAllocator allocator(8);
  RadixTree tree(allocator, kPageSize);
  NodeRef late = tree.lock_prefix({}, 0);
  { const NodeRef ref = insert(tree, allocator, tokens({1, 1, 2, 2, 3, 3})); }
  std::vector<PageReplacement> replaced;
  tree.extend(late, tokens({1, 1, 2, 2, 9, 9}), allocator.allocate(3), replaced);
  CHECK_EQ(replaced.size(), 2U);
  CHECK_EQ(tree.num_locked_pages(), 3);
  CHECK_EQ(tree.num_pages(), 4);
  CHECK_EQ(tree.evict(8), 1);
  CHECK_EQ(path(late).size(), 3U);
}

TEST(a_node_grows_in_place_only_for_its_only_user) {
  PageAllocator allocator(8);
  RadixTree tree(allocator, kPageSize);
  std::vector<PageReplacement> replaced;
  NodeRef writer = insert(tree, allocator, tokens({1, 1}));
  tree.extend(writer, tokens({2, 2}), allocator.allocate(1), replaced);
  CHECK_EQ(tree.num_nodes(), 1);
  const NodeRef reader = tree.lock_prefix(tokens({1, 1, 2, 2}), 2);
  tree.extend(writer, tokens({3, 3}), allocator.allocate(1), replaced);
  CHECK_EQ(tree.num_nodes(), 2);
  CHECK_EQ(path(reader).size(), 2U);
  CHECK_EQ(path(writer).size(), 3U);
}

TEST(a_deep_tree_is_taken_apart_without_recursion) {
  constexpr std::int32_t kDepth = 40'000;
  constexpr std::int32_t kLongPage = 256;  // too long to grow in place: each page is a node below the one before
  PageAllocator allocator(kDepth);
  RadixTree tree(allocator, kLongPage);
  const std::vector<TokenId> page(kLongPage, 1);
  std::vector<PageReplacement> replaced;
  NodeRef at = tree.lock_prefix({}, 0);
  for (std::int32_t i = 0; i < kDepth; ++i) tree.extend(at, page, allocator.allocate(1), replaced);
  CHECK_EQ(tree.num_nodes(), kDepth);
}
