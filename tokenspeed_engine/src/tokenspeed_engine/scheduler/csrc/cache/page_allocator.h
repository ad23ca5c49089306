// The page pool and the only kind of handle that can hold a page of it.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace tokenspeed {

using PageId = std::int32_t;

class OwnedPages;

// Free pages of the pool, last in first out. The order depends on the calls alone, so that every rank hands out the same pages.
class PageAllocator {
 public:
  explicit PageAllocator(std::int32_t num_pages);
  PageAllocator(const PageAllocator&) = delete;
  PageAllocator& operator=(const PageAllocator&) = delete;

  std::int32_t num_pages() const noexcept { return num_pages_; }
  std::int32_t num_free() const noexcept { return static_cast<std::int32_t>(free_.size()); }
  std::span<const PageId> free_pages() const noexcept { return free_; }

  // Moves `count` free pages into a new handle. Requires count <= num_free().
  OwnedPages allocate(std::int32_t count);
  // The same, onto the end of a handle that exists.
  void allocate_into(OwnedPages& pages, std::int32_t count);

 private:
  friend class OwnedPages;
  void give_back(std::span<const PageId> pages) noexcept;

  std::int32_t num_pages_;
  std::vector<PageId> free_;  // capacity is num_pages from the start: giving back never allocates, so it cannot fail
};

// Pages that belong to whoever holds this object: a request's state or a node of the prefix cache. Move-only; the destructor
// gives the pages back, once.
class OwnedPages {
 public:
  explicit OwnedPages(PageAllocator& allocator) noexcept : allocator_(&allocator) {}
  OwnedPages(OwnedPages&& other) noexcept;
  OwnedPages& operator=(OwnedPages&& other) noexcept;
  OwnedPages(const OwnedPages&) = delete;
  OwnedPages& operator=(const OwnedPages&) = delete;
  ~OwnedPages() { release(); }

  std::int32_t size() const noexcept { return static_cast<std::int32_t>(ids_.size()); }
  bool empty() const noexcept { return ids_.empty(); }
  std::span<const PageId> ids() const noexcept { return ids_; }

  // Adds the pages of `more` behind these.
  void append(OwnedPages&& more);
  // Splits off the first or the last `count` pages.
  OwnedPages take_front(std::int32_t count);
  OwnedPages take_back(std::int32_t count);
  // Gives all pages back now; the handle stays usable.
  void release() noexcept;

 private:
  friend class PageAllocator;
  PageAllocator* allocator_;  // null after a move: use after move is an InvariantError
  std::vector<PageId> ids_;
};

}  // namespace tokenspeed
