// AMX tiles in plain C++, after Intel's manual (LDTILECFG, TILELOADD, TDPBSUD, TILESTORED, TILERELEASE): force-included where the
// tile code is compiled for a processor that has none. A wrong configuration ends the program, as it would there.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

struct Tile {
  int rows = 0, row_bytes = 0;
  uint8_t bytes[16][64] = {};
};
static thread_local Tile tiles[8];
static thread_local bool is_configured = false;

inline void need(bool condition) {
  if (!condition) std::abort();
}

inline void load_config(const void* memory) {
  const auto* config = static_cast<const uint8_t*>(memory);
  need(config[0] == 1 && config[1] == 0);
  for (int i = 2; i < 16; ++i) need(config[i] == 0);
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * i, 2);
    tiles[i] = Tile{};
    tiles[i].rows = config[48 + i];
    tiles[i].row_bytes = row_bytes;
    need(tiles[i].rows <= 16 && row_bytes <= 64 && (tiles[i].rows == 0) == (row_bytes == 0));
  }
  is_configured = true;
}

inline void zero(int t) {
  need(is_configured && tiles[t].rows > 0);
  std::memset(tiles[t].bytes, 0, sizeof tiles[t].bytes);
}

inline void load(int t, const void* base, int64_t stride) {
  need(is_configured && tiles[t].rows > 0);
  zero(t);
  for (int r = 0; r < tiles[t].rows; ++r) {
    std::memcpy(tiles[t].bytes[r], static_cast<const uint8_t*>(base) + r * stride, static_cast<size_t>(tiles[t].row_bytes));
  }
}

inline void save(int t, void* base, int64_t stride) {
  need(is_configured && tiles[t].rows > 0);
  for (int r = 0; r < tiles[t].rows; ++r) {
    std::memcpy(static_cast<uint8_t*>(base) + r * stride, tiles[t].bytes[r], static_cast<size_t>(tiles[t].row_bytes));
  }
}

// c[m][n] += sum over k, i of a[m][4 k + i], signed, times b[k][4 n + i], unsigned.
inline void dot_signed_unsigned(int c, int a, int b) {
  need(is_configured && tiles[a].row_bytes == 4 * tiles[b].rows && tiles[c].rows == tiles[a].rows);
  need(tiles[c].row_bytes == tiles[b].row_bytes);
  for (int m = 0; m < tiles[c].rows; ++m)
    for (int n = 0; n < tiles[c].row_bytes / 4; ++n) {
      int32_t sum;
      std::memcpy(&sum, tiles[c].bytes[m] + 4 * n, 4);
      for (int k = 0; k < tiles[b].rows; ++k)
        for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(tiles[a].bytes[m][4 * k + i]) * tiles[b].bytes[k][4 * n + i];
      std::memcpy(tiles[c].bytes[m] + 4 * n, &sum, 4);
    }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig(memory) emulated::load_config(memory)
#define _tile_release() (emulated::is_configured = false)
#define _tile_zero(t) emulated::zero(t)
#define _tile_loadd(t, base, stride) emulated::load(t, base, stride)
#define _tile_stored(t, base, stride) emulated::save(t, base, stride)
#define _tile_dpbsud(c, a, b) emulated::dot_signed_unsigned(c, a, b)
