// SHA-256, because keys of the external store outlive the process and cross tenants: nobody can make two prompts with one key. Written
// from the standard; its test vectors are in the tests. About 0.5 us for a page of 16 tokens, once for each page.
#include "block_hash.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>

#include "../invariant.h"

namespace tokenspeed {

namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<std::uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<std::uint32_t, 8>;
// The same of the square roots of the first 8 primes.
constexpr State kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
constexpr std::size_t kBlock = 64;

void compress(State& state, const std::uint8_t* block) {
  std::uint32_t w[64];
  for (std::size_t t = 0; t < 16; ++t) {
    const std::uint8_t* p = block + 4 * t;
    w[t] = std::uint32_t{p[0]} << 24 | std::uint32_t{p[1]} << 16 | std::uint32_t{p[2]} << 8 | std::uint32_t{p[3]};
  }
  for (std::size_t t = 16; t < 64; ++t) {
    const std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t t = 0; t < 64; ++t) {
    const std::uint32_t t1 =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
    const std::uint32_t t2 = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const State add = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < state.size(); ++i) state[i] += add[i];
}

// Bytes come in pieces; a block is compressed when it is full.
class Sha256 {
 public:
  void add(std::span<const std::uint8_t> bytes) {
    total_ += bytes.size();
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t count = std::min(kBlock - used_, bytes.size() - at);
      std::memcpy(block_.data() + used_, bytes.data() + at, count);
      used_ += count;
      at += count;
      if (used_ == kBlock) flush();
    }
  }

  BlockHash finish() {
    const std::uint64_t bits = static_cast<std::uint64_t>(total_) * 8;
    block_[used_++] = 0x80;
    if (used_ > kBlock - 8) {
      std::fill(block_.begin() + static_cast<std::ptrdiff_t>(used_), block_.end(), std::uint8_t{0});
      flush();
    }
    std::fill(block_.begin() + static_cast<std::ptrdiff_t>(used_), block_.end(), std::uint8_t{0});
    for (std::size_t i = 0; i < 8; ++i) block_[kBlock - 1 - i] = static_cast<std::uint8_t>(bits >> (8 * i));
    flush();
    BlockHash digest;
    for (std::size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
  }

 private:
  void flush() {
    compress(state_, block_.data());
    used_ = 0;
  }
  State state_ = kStart;
  std::array<std::uint8_t, kBlock> block_{};
  std::size_t used_ = 0;
  std::size_t total_ = 0;
};

void add_little_endian(Sha256& sha, std::uint32_t value) {
  std::array<std::uint8_t, 4> bytes;
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(value >> (8 * i));
  sha.add(bytes);
}

}  // namespace

BlockHash sha256(std::span<const std::uint8_t> bytes) {
  Sha256 sha;
  sha.add(bytes);
  return sha.finish();
}

BlockHash root_hash(std::int32_t page_size, std::string_view salt) {
  constexpr std::string_view domain("tokenspeed-kv/1\0", 16);
  Sha256 sha;
  sha.add(std::span(reinterpret_cast<const std::uint8_t*>(domain.data()), domain.size()));
  add_little_endian(sha, static_cast<std::uint32_t>(page_size));
  sha.add(std::span(reinterpret_cast<const std::uint8_t*>(salt.data()), salt.size()));
  return sha.finish();
}

BlockHash chain_hash(const BlockHash& before, std::span<const TokenId> page) {
  Sha256 sha;
  sha.add(before);
  if constexpr (std::endian::native == std::endian::little) {
    sha.add(std::span(reinterpret_cast<const std::uint8_t*>(page.data()), page.size_bytes()));
  } else {
    for (const TokenId token : page) add_little_endian(sha, static_cast<std::uint32_t>(token));
  }
  return sha.finish();
}

void append_hashes(BlockHash before, std::span<const TokenId> tokens, std::int32_t page_size, std::vector<BlockHash>& out) {
  TOKENSPEED_INVARIANT(page_size > 0);
  const auto page = static_cast<std::size_t>(page_size);
  for (; tokens.size() >= page; tokens = tokens.subspan(page)) {
    before = chain_hash(before, tokens.first(page));
    out.push_back(before);
  }
}

std::vector<BlockHash> hash_pages(std::span<const TokenId> tokens, std::int32_t page_size, std::string_view salt) {
  std::vector<BlockHash> hashes;
  hashes.reserve(tokens.size() / static_cast<std::size_t>(page_size));
  append_hashes(root_hash(page_size, salt), tokens, page_size, hashes);
  return hashes;
}

}  // namespace tokenspeed
