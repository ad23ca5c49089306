// Rows of the page table, leased to requests while they hold pages.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "../invariant.h"

namespace tokenspeed {

class RowLease;

// Free rows, last in first out: deterministic, and the rows in use stay dense.
class RowPool {
 public:
  explicit RowPool(std::int32_t num_rows) {
    free_.reserve(static_cast<std::size_t>(num_rows));
    for (std::int32_t row = num_rows - 1; row >= 0; --row) free_.push_back(row);
  }
  RowPool(const RowPool&) = delete;
  RowPool& operator=(const RowPool&) = delete;

  std::int32_t num_free() const noexcept { return static_cast<std::int32_t>(free_.size()); }
  RowLease lease();

 private:
  friend class RowLease;
  void give_back(std::int32_t row) noexcept { free_.push_back(row); }
  std::vector<std::int32_t> free_;
};

// One row, held by one owner. Move-only; the destructor gives it back.
class RowLease {
 public:
  RowLease(RowLease&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), row_(other.row_) {}
  RowLease& operator=(RowLease&& other) noexcept {
    if (this != &other) {
      release();
      pool_ = std::exchange(other.pool_, nullptr);
      row_ = other.row_;
    }
    return *this;
  }
  RowLease(const RowLease&) = delete;
  RowLease& operator=(const RowLease&) = delete;
  ~RowLease() { release(); }

  std::int32_t row() const {
    TOKENSPEED_INVARIANT(pool_ != nullptr);
    return row_;
  }

 private:
  friend class RowPool;
  RowLease(RowPool& pool, std::int32_t row) noexcept : pool_(&pool), row_(row) {}
  void release() noexcept {
    if (pool_ != nullptr) std::exchange(pool_, nullptr)->give_back(row_);
  }
  RowPool* pool_;
  std::int32_t row_;
};

inline RowLease RowPool::lease() {
  TOKENSPEED_INVARIANT(!free_.empty());
  const std::int32_t row = free_.back();
  free_.pop_back();
  return RowLease(*this, row);
}

}  // namespace tokenspeed
