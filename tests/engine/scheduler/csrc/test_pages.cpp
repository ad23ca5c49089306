#include <utility>
#include <vector>

#include "cache/page_allocator.h"
#include "cache/row_pool.h"
#include "check.h"

using namespace tokenspeed;

TEST(pages_return_when_their_handle_goes) {
  PageAllocator allocator(4);
  {
    OwnedPages pages = allocator.allocate(3);
    CHECK_EQ(pages.size(), 3);
    CHECK_EQ(allocator.num_free(), 1);
  }
  CHECK_EQ(allocator.num_free(), 4);
}

TEST(pages_come_out_in_the_same_order_again) {
  PageAllocator allocator(5);
  const auto ids = [&] {
    const OwnedPages pages = allocator.allocate(5);
    return std::vector<PageId>(pages.ids().begin(), pages.ids().end());
  };
  const std::vector<PageId> first = ids();
  CHECK(first == (std::vector<PageId>{0, 1, 2, 3, 4}));
  CHECK(first == ids());
}

TEST(a_moved_handle_returns_its_pages_once) {
  PageAllocator allocator(4);
  {
    OwnedPages a = allocator.allocate(2);
    OwnedPages b = std::move(a);
    OwnedPages c = allocator.allocate(1);
    c = std::move(b);  // gives c's own page back
    CHECK_EQ(allocator.num_free(), 2);
    CHECK_EQ(c.size(), 2);
  }
  CHECK_EQ(allocator.num_free(), 4);
}

TEST(using_a_moved_handle_is_an_invariant_error) {
  PageAllocator allocator(4);
  OwnedPages a = allocator.allocate(2);
  const OwnedPages b = std::move(a);
  CHECK_THROWS(InvariantError, a.take_front(0));  // NOLINT(bugprone-use-after-move): that is the test
  CHECK_THROWS(InvariantError, allocator.allocate_into(a, 1));
  CHECK_EQ(allocator.num_free(), 2);
}

TEST(front_and_back_split_off) {
  PageAllocator allocator(6);
  OwnedPages pages = allocator.allocate(6);
  OwnedPages front = pages.take_front(2);
  const OwnedPages back = pages.take_back(1);
  CHECK_EQ(front.ids()[0], 0);
  CHECK_EQ(front.ids()[1], 1);
  CHECK_EQ(back.ids()[0], 5);
  CHECK_EQ(pages.size(), 3);
  front.append(std::move(pages));
  CHECK_EQ(front.size(), 5);
  CHECK_EQ(front.ids()[4], 4);
  CHECK_EQ(allocator.num_free(), 0);
}

TEST(more_pages_than_free_is_an_invariant_error) {
  PageAllocator allocator(2);
  CHECK_THROWS(InvariantError, allocator.allocate(3));
  CHECK_EQ(allocator.num_free(), 2);
}

TEST(rows_return_once) {
  RowPool rows(2);
  {
    RowLease a = rows.lease();
    RowLease b = std::move(a);
    CHECK_EQ(b.row(), 0);
    CHECK_EQ(rows.num_free(), 1);
    CHECK_THROWS(InvariantError, a.row());  // NOLINT(bugprone-use-after-move): that is the test
    b = rows.lease();
    CHECK_EQ(b.row(), 1);
    CHECK_EQ(rows.num_free(), 1);
  }
  CHECK_EQ(rows.num_free(), 2);
}
