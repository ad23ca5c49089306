// Products of 16 tokens with a panel in tiles (AMX-INT8). Included by multiply.h, within its namespace.
//
// A panel's block of bytes is the right-hand tile as it stands: a tile row holds four columns of 16 rows. The sums of a block are the
// same integers as elsewhere, and what follows is the same code: results are the same bits.

// Tile 0 has the sums, 1 the tokens, 2 the weights; the intrinsics want the numbers written out.

constexpr int kAmxTokens = 16;

// `parts` is 1 for tiles of 32 columns, 2 for those of 16.
inline void configure_tiles(int parts) {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  config.rows[0] = kAmxTokens;
  config.row_bytes[0] = 64;
  config.rows[1] = kAmxTokens;
  config.row_bytes[1] = static_cast<uint16_t>(kBlockColumns / parts);
  config.rows[2] = static_cast<uint8_t>(kBlockColumns / parts / 4);
  config.row_bytes[2] = 64;
  _tile_loadconfig(&config);
}

// Returns how many tokens were done; the rest are too few to fill a tile. Whoever used tiles before set them up for itself and does so
// again: they are set up for each call, and released after it.
template <Panel Format>
int64_t multiply_amx(const TileArgs& args) {
  if (args.num_tokens < kAmxTokens) return 0;
  configure_tiles(kParts<Format>);
  alignas(64) uint8_t bytes[512];
  alignas(64) int32_t sums[kAmxTokens * kPanelRows];
  int64_t token = 0;
  for (; token + kAmxTokens <= args.num_tokens; token += kAmxTokens) {
    const TokenRows<kAmxTokens> x(args.x, args.first_token + token, args.first_block);
    float* to = args.sums + token * kPanelRows;
    Vec total[kAmxTokens];
    for (int t = 0; t < kAmxTokens; ++t) total[t] = load(to + t * kPanelRows);
    for (int64_t b = 0; b < args.num_blocks; ++b) {
      const uint8_t* block = block_at<Format>(args, b);
      if constexpr (Format != Panel::kQ8_0 && Format != Panel::kQ6_K) {
        for (int i = 0; i < 4; ++i) {
          const Ints both = load_bytes(block + 64 * i);
          _mm512_store_si512(bytes + 64 * i, low_nibbles(both));
          _mm512_store_si512(bytes + 64 * (4 + i), high_nibbles(both));
        }
        block = bytes;
      }
      for (int part = 0; part < kParts<Format>; ++part) {
        _tile_zero(0);
        _tile_loadd(1, x.values[0] + b * kBlockColumns + 16 * part, args.x.columns);
        _tile_loadd(2, block + 256 * part, 64);
        _tile_dpbsud(0, 1, 2);
        _tile_stored(0, sums, 64);
        Ints dots[kAmxTokens];
        for (int t = 0; t < kAmxTokens; ++t) {
          dots[t] = add(load_bytes(sums + t * kPanelRows), splat_word(offset_sum<Format, kAmxTokens>(x, t, b, part)));
        }
        add_scaled<Format, kAmxTokens>(args, x, b, part, 0, dots, total);
      }
    }
    for (int t = 0; t < kAmxTokens; ++t) store(to + t * kPanelRows, total[t]);
  }
  _tile_release();
  return token;
}
