#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "cache/block_hash.h"
#include "cache/kv_events.h"
#include "check.h"

using namespace tokenspeed;

namespace {

std::string hex(const BlockHash& hash) {
  std::string text;
  for (const std::uint8_t byte : hash) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

std::string sha(std::string_view text) {
  return hex(sha256(std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size())));
}

}  // namespace

TEST(sha256_gives_the_vectors_of_the_standard) {
  CHECK_EQ(sha(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(sha("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(sha("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(sha(std::string(1'000'000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(sha256_pads_at_every_length_around_a_block) {
  // The digest must not depend on how the bytes came: one call here, and the chain's two calls below.
  std::vector<std::string> seen;
  for (std::size_t length = 54; length <= 66; ++length) seen.push_back(sha(std::string(length, 'x')));
  for (std::size_t i = 0; i < seen.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) CHECK(seen[i] != seen[j]);
  }
  // 55 bytes leave room for the length in the last block, 56 do not.
  CHECK_EQ(sha(std::string(55, 'x')), "d5e285683cd4efc02d021a5c62014694958901005d6f71e89e0989fac77e4072");
  CHECK_EQ(sha(std::string(56, 'x')), "04c26261370ee7541549d16dee320c723e3fd14671e66a099afe0a377c16888e");
}

TEST(a_hash_is_of_the_hash_before_and_the_tokens) {
  const std::vector<TokenId> tokens{1, 258, 3, 4, 5};
  const std::vector<BlockHash> hashes = hash_pages(tokens, 2, "seven");
  CHECK_EQ(hashes.size(), 2U);
  const BlockHash root = root_hash(2, "seven");
  std::string bytes(root.begin(), root.end());
  bytes += std::string("\x01\x00\x00\x00\x02\x01\x00\x00", 8);
  CHECK_EQ(hex(hashes[0]), sha(bytes));
  CHECK(hashes[1] == chain_hash(hashes[0], std::span(tokens).subspan(2, 2)));
  CHECK(hash_pages(tokens, 2, "eight")[0] != hashes[0]);
  CHECK(root_hash(4, "seven") != root);
  CHECK_EQ(hex(root_hash(16, "ab")), sha(std::string("tokenspeed-kv/1\0\x10\0\0\0ab", 22)));
}

TEST(events_that_nobody_drains_become_one_that_says_less) {
  KvEventBuffer buffer(4);
  const auto stored = [](std::size_t pages) {
    KvEvent event;
    event.kind = KvEventKind::kStored;
    event.hashes.resize(pages);
    return event;
  };
  buffer.push(stored(2));
  buffer.push(stored(2));
  CHECK_EQ(buffer.drain().size(), 2U);
  CHECK(buffer.empty());
  buffer.push(stored(3));
  buffer.push(stored(2));
  CHECK_EQ(buffer.num_lost(), 2U);
  buffer.push(stored(1));
  const std::vector<KvEvent> events = buffer.drain();
  CHECK_EQ(events.size(), 2U);
  CHECK(events[0].kind == KvEventKind::kCleared);
  CHECK(events[1].kind == KvEventKind::kStored);
}
