// Hashes of pages, chained: the hash of a page stands for all tokens up to its end. Keys of the external store and of KV events.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "token.h"

namespace tokenspeed {

using BlockHash = std::array<std::uint8_t, 32>;

// SHA-256 of `bytes`. Source: FIPS 180-4, section 6.2.
BlockHash sha256(std::span<const std::uint8_t> bytes);

// What stands before the first page of a sequence: another salt or page size gives other hashes throughout.
BlockHash root_hash(std::int32_t page_size, std::string_view salt);

// The hash of a page: SHA-256 of the hash before it and the page's tokens, each as four bytes, lowest first.
BlockHash chain_hash(const BlockHash& before, std::span<const TokenId> page);

// Appends the hashes of the whole pages of `tokens`, which follow `before`.
void append_hashes(BlockHash before, std::span<const TokenId> tokens, std::int32_t page_size, std::vector<BlockHash>& out);

// The hashes of the whole pages of a sequence, from its start.
std::vector<BlockHash> hash_pages(std::span<const TokenId> tokens, std::int32_t page_size, std::string_view salt);

}  // namespace tokenspeed
