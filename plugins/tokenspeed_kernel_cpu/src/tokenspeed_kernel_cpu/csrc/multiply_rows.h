// One token's products with 16 rows of Q8_0 as they lie in the file: what an output head does for each token of a single stream.
//
// Turning the rows into a panel first costs more than the products with one token. Here a register holds a block of two rows, and the
// partial sums of sixteen rows are folded into one register with a lane for each: the same integers as in `tile`, after which the same
// float32 operations follow in the same order.
#pragma once

#include "bytes.h"
#include "quantized.h"

namespace {

using namespace tokenspeed_cpu;

#ifdef __AVX512VNNI__

constexpr int64_t kRowBlockBytes = 34;

// From sixteen registers' worth of rows, two to a register: rows i and i + 4 in the first four, i + 4 and i + 8 in the others.
inline __m512i fold_rows(const __m512i* part) {
  const auto two = [](__m512i a, __m512i b) { return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); };
  const auto four = [](__m512i a, __m512i b) { return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)); };
  const __m512i low = four(two(part[0], part[1]), two(part[2], part[3])), high = four(two(part[4], part[5]), two(part[6], part[7]));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xDD));
}

// The scales of four rows; integer units put them together while the vector units are busy.
inline int64_t four_scales(const uint8_t* const* rows, int64_t at) {
  uint64_t all = 0;
  for (int r = 3; r >= 0; --r) {
    uint16_t bits;
    std::memcpy(&bits, rows[r] + at, 2);
    all = all << 16 | bits;
  }
  return static_cast<int64_t>(all);
}

void multiply_rows_q8_0(const uint8_t* stored, int64_t row_bytes, int64_t rows, const TileArgs& args) {
  const uint8_t* row[kPanelRows];
  for (int64_t r = 0; r < kPanelRows; ++r) row[r] = stored + (r < rows ? r : rows - 1) * row_bytes;
  const int64_t blocks = args.num_blocks;
  const int8_t* values = args.x.values + args.first_token * args.x.columns;
  const float* scale = args.x.scale + args.first_token * blocks;
  const int32_t* half_sum = args.x.half_sum + 2 * args.first_token * blocks;
  const __m512i offset = _mm512_set1_epi8(-128);
  // Rows that follow these are asked for two panels ahead: sixteen short streams are none that hardware would recognize and fetch. Into
  // the second level, because in the first one they would push each other out (half the time, 49152 x 576 on an EPYC of 2022).
  const char* ahead = reinterpret_cast<const char*>(stored + 2 * kPanelRows * row_bytes);
  const int64_t step = blocks > 0 ? (kPanelRows * row_bytes + blocks - 1) / blocks : 0;
  __m512 total = _mm512_setzero_ps();
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t line = 0; line < step; line += 64) _mm_prefetch(ahead + b * step + line, _MM_HINT_T1);
    const int64_t at = b * kRowBlockBytes;
    const __m512i x = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + b * kBlockColumns)));
    __m512i part[8];
    for (int i = 0; i < 8; ++i) {
      const int first = i < 4 ? i : i + 4;
      const auto* one = reinterpret_cast<const __m256i*>(row[first] + at + 2);
      const auto* other = reinterpret_cast<const __m256i*>(row[first + 4] + at + 2);
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(one)), _mm256_loadu_si256(other), 1);
      part[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_xor_si512(both, offset), x);
    }
    const __m512i dots = _mm512_add_epi32(fold_rows(part), _mm512_set1_epi32(-128 * (half_sum[2 * b] + half_sum[2 * b + 1])));
    const __m256i halves = _mm256_set_epi64x(four_scales(row + 12, at), four_scales(row + 8, at), four_scales(row + 4, at),
                                             four_scales(row, at));
    const __m512 d = _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(scale[b]));
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), d, total);
  }
  _mm512_storeu_ps(args.sums, total);
}

constexpr auto kMultiplyRows = multiply_rows_q8_0;
#else
constexpr void (*kMultiplyRows)(const uint8_t*, int64_t, int64_t, const TileArgs&) = nullptr;
#endif

}  // namespace
