#include "page_allocator.h"

#include <utility>

#include "../invariant.h"

namespace tokenspeed {

PageAllocator::PageAllocator(std::int32_t num_pages) : num_pages_(num_pages) {
  TOKENSPEED_INVARIANT(num_pages > 0);
  free_.reserve(static_cast<std::size_t>(num_pages));
  for (PageId page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

OwnedPages PageAllocator::allocate(std::int32_t count) {
  OwnedPages pages(*this);
  allocate_into(pages, count);
  return pages;
}

void PageAllocator::allocate_into(OwnedPages& pages, std::int32_t count) {
  TOKENSPEED_INVARIANT(pages.allocator_ == this);
  TOKENSPEED_INVARIANT(count >= 0 && count <= num_free());
  pages.ids_.insert(pages.ids_.end(), free_.rbegin(), free_.rbegin() + count);
  free_.resize(free_.size() - static_cast<std::size_t>(count));
}

void PageAllocator::give_back(std::span<const PageId> pages) noexcept {
  // Last first, so that the same pages come out again in the same order.
  free_.insert(free_.end(), pages.rbegin(), pages.rend());
}

OwnedPages::OwnedPages(OwnedPages&& other) noexcept
    : allocator_(std::exchange(other.allocator_, nullptr)), ids_(std::move(other.ids_)) {
  other.ids_.clear();
}

OwnedPages& OwnedPages::operator=(OwnedPages&& other) noexcept {
  if (this != &other) {
    release();
    allocator_ = std::exchange(other.allocator_, nullptr);
    ids_ = std::move(other.ids_);
    other.ids_.clear();
  }
  return *this;
}

void OwnedPages::append(OwnedPages&& more) {
  TOKENSPEED_INVARIANT(allocator_ != nullptr && allocator_ == more.allocator_);
  ids_.insert(ids_.end(), more.ids_.begin(), more.ids_.end());
  more.ids_.clear();
}

OwnedPages OwnedPages::take_front(std::int32_t count) {
  TOKENSPEED_INVARIANT(allocator_ != nullptr && count >= 0 && count <= size());
  OwnedPages front(*allocator_);
  if (count == size()) {
    front.ids_.swap(ids_);
    return front;
  }
  front.ids_.assign(ids_.begin(), ids_.begin() + count);
  ids_.erase(ids_.begin(), ids_.begin() + count);
  return front;
}

OwnedPages OwnedPages::take_back(std::int32_t count) {
  TOKENSPEED_INVARIANT(allocator_ != nullptr && count >= 0 && count <= size());
  OwnedPages back(*allocator_);
  back.ids_.assign(ids_.end() - count, ids_.end());
  ids_.resize(ids_.size() - static_cast<std::size_t>(count));
  return back;
}

void OwnedPages::release() noexcept {
  if (ids_.empty()) return;
  allocator_->give_back(ids_);
  ids_.clear();
}

}  // namespace tokenspeed
