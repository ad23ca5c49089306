// The tokens of one request: prompt, then output.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "../cache/radix_tree.h"
#include "../invariant.h"

namespace tokenspeed {

// Room for prompt and output is taken once, so appending never copies a long context. The memory of a large buffer begins at the start
// of a virtual page; were the tokens to begin there too, then all requests of one prompt length would append at the same offset in a
// page, and a thousand of them would fight for a few cache sets. So each buffer begins at another cache line.
class SequenceTokens {
 public:
  SequenceTokens() = default;
  SequenceTokens(std::span<const TokenId> prompt, std::size_t capacity, std::uint64_t number)
      : offset_(static_cast<std::size_t>(number % kLinesInPage) * kTokensInLine), capacity_(capacity) {
    storage_ = std::make_unique_for_overwrite<TokenId[]>(offset_ + capacity_);
    std::copy(prompt.begin(), prompt.end(), storage_.get() + offset_);
    size_ = prompt.size();
  }

  std::size_t size() const noexcept { return size_; }
  TokenId operator[](std::size_t index) const noexcept { return storage_[offset_ + index]; }
  std::span<const TokenId> span() const noexcept { return {storage_.get() + offset_, size_}; }
  void append(TokenId token) {
    TOKENSPEED_INVARIANT(size_ < capacity_);
    storage_[offset_ + size_++] = token;
  }

 private:
  static constexpr std::size_t kTokensInLine = 64 / sizeof(TokenId);
  static constexpr std::uint64_t kLinesInPage = 4096 / 64;

  std::unique_ptr<TokenId[]> storage_;
  std::size_t offset_ = 0;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

}  // namespace tokenspeed
