// Stored rows into panels: what is done once when a weight is packed, or a few blocks at a time while multiplying.
#pragma once

#include "bytes.h"
#include "quantized.h"

namespace {

using namespace tokenspeed_cpu;

// Rows beyond the last are copies of it: their products are computed and not written.
struct StoredRows {
  const uint8_t* row[kPanelRows];

  StoredRows(const uint8_t* stored, int64_t row_bytes, int64_t rows) {
    for (int64_t r = 0; r < kPanelRows; ++r) row[r] = stored + (r < rows ? r : rows - 1) * row_bytes;
  }
};

inline void copy_half(uint8_t* to, int64_t r, const uint8_t* from) { std::memcpy(to + 2 * r, from, 2); }

// 8 rows of 32 bytes: word j of row r goes to place r of row j, rows of 64 bytes.
inline void transpose_words(const __m256i* rows, uint8_t* to) {
  __m256i pair[8], four[8];
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    pair[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    four[i] = _mm256_unpacklo_epi64(pair[i], pair[i + 2]);
    four[i + 1] = _mm256_unpackhi_epi64(pair[i], pair[i + 2]);
    four[i + 2] = _mm256_unpacklo_epi64(pair[i + 1], pair[i + 3]);
    four[i + 3] = _mm256_unpackhi_epi64(pair[i + 1], pair[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 64 * i), _mm256_permute2x128_si256(four[i], four[i + 4], 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 64 * (i + 4)), _mm256_permute2x128_si256(four[i], four[i + 4], 0x31));
  }
}

inline __m256i bytes_at(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// 16 bytes of each row, whose low nibbles are columns 0..15 and whose high ones are 16..31.
inline void place_nibbles(uint8_t* block, int64_t r, const uint8_t* from) {
  for (int64_t i = 0; i < 4; ++i) std::memcpy(block + 64 * i + 4 * r, from + 4 * i, 4);
}

void unpack_q4_0(const uint8_t* stored, int64_t row_bytes, int64_t rows, int64_t first, int64_t count, uint8_t* panel) {
  const StoredRows from(stored, row_bytes, rows);
  for (int64_t b = 0; b < count; ++b, panel += 288) {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const uint8_t* block = from.row[r] + (first + b) * 18;
      copy_half(panel + 256, r, block);
      place_nibbles(panel, r, block + 2);
    }
  }
}

void unpack_q4_1(const uint8_t* stored, int64_t row_bytes, int64_t rows, int64_t first, int64_t count, uint8_t* panel) {
  const StoredRows from(stored, row_bytes, rows);
  for (int64_t b = 0; b < count; ++b, panel += 320) {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const uint8_t* block = from.row[r] + (first + b) * 20;
      copy_half(panel + 256, r, block);
      copy_half(panel + 288, r, block + 2);
      place_nibbles(panel, r, block + 4);
    }
  }
}

void unpack_q8_0(const uint8_t* stored, int64_t row_bytes, int64_t rows, int64_t first, int64_t count, uint8_t* panel) {
  const StoredRows from(stored, row_bytes, rows);
  const __m256i bias = _mm256_set1_epi8(-128);
  for (int64_t b = 0; b < count; ++b, panel += 544) {
    const int64_t at = (first + b) * 34;
    for (int64_t half = 0; half < kPanelRows; half += 8) {
      __m256i words[8];
      for (int64_t r = 0; r < 8; ++r) words[r] = _mm256_xor_si256(bytes_at(from.row[half + r] + at + 2), bias);
      transpose_words(words, panel + 4 * half);
    }
    for (int64_t r = 0; r < kPanelRows; ++r) copy_half(panel + 512, r, from.row[r] + at);
  }
}

// Scale and minimum of one of 8 sub-blocks, 6 bits each, from 12 bytes: 0..3 have the scales of the first four in their lower bits
// and 4..7 their minima; 8..11 hold the lower four bits of the last four, whose upper two bits top the first eight bytes.
inline void scale_and_minimum(const uint8_t* packed, int64_t sub, uint8_t* scale, uint8_t* minimum) {
  if (sub < 4) {
    *scale = packed[sub] & 63;
    *minimum = packed[sub + 4] & 63;
  } else {
    *scale = static_cast<uint8_t>((packed[sub + 4] & 15) | (packed[sub - 4] >> 6) << 4);
    *minimum = static_cast<uint8_t>((packed[sub + 4] >> 4) | (packed[sub] >> 6) << 4);
  }
}

// Stored: 32 bytes hold two sub-blocks, one in the low nibbles and one in the high ones. In the panel each has 16 bytes of its own.
void unpack_q4_k(const uint8_t* stored, int64_t row_bytes, int64_t rows, int64_t first, int64_t count, uint8_t* panel) {
  const StoredRows from(stored, row_bytes, rows);
  for (int64_t s = first / 8; s < (first + count) / 8; ++s, panel += 2368) {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const uint8_t* super = from.row[r] + s * 144;
      copy_half(panel, r, super);
      copy_half(panel + 32, r, super + 2);
      for (int64_t sub = 0; sub < 8; ++sub) {
        uint8_t* block = panel + 64 + sub * 288;
        const uint8_t* values = super + 16 + sub / 2 * 32;
        const int shift = sub % 2 * 4;
        uint8_t nibbles[16];
        for (int64_t i = 0; i < 16; ++i) {
          nibbles[i] = static_cast<uint8_t>((values[i] >> shift & 15) | (values[16 + i] >> shift & 15) << 4);
        }
        place_nibbles(block, r, nibbles);
        scale_and_minimum(super + 4, sub, block + 256 + r, block + 272 + r);
      }
    }
  }
}

inline float half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return _cvtsh_ss(bits);
}

// Stored, of each 128 columns: 64 bytes of lower nibbles and 32 of upper pairs of bits, which serve four runs of 32 columns.
void unpack_q6_k(const uint8_t* stored, int64_t row_bytes, int64_t rows, int64_t first, int64_t count, uint8_t* panel) {
  const StoredRows from(stored, row_bytes, rows);
  const __m256i nibble = _mm256_set1_epi8(15), two_bits = _mm256_set1_epi8(48);
  for (int64_t b = 0; b < count; b += 4, panel += 4 * 640) {
    const int64_t super = (first + b) / 8 * 210, part = (first + b) / 4 % 2;
    for (int64_t half = 0; half < kPanelRows; half += 8) {
      __m256i words[4][8];
      for (int64_t r = 0; r < 8; ++r) {
        const uint8_t* from_row = from.row[half + r] + super;
        const __m256i low = bytes_at(from_row + part * 64), high = bytes_at(from_row + part * 64 + 32);
        const __m256i top = bytes_at(from_row + 128 + part * 32);
        // The pair of bits of run i stands at bit 2 i, and belongs at bit 4.
        words[0][r] = _mm256_or_si256(_mm256_and_si256(low, nibble), _mm256_and_si256(_mm256_slli_epi16(top, 4), two_bits));
        words[1][r] = _mm256_or_si256(_mm256_and_si256(high, nibble), _mm256_and_si256(_mm256_slli_epi16(top, 2), two_bits));
        words[2][r] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low, 4), nibble), _mm256_and_si256(top, two_bits));
        words[3][r] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(high, 4), nibble),
                                      _mm256_and_si256(_mm256_srli_epi16(top, 2), two_bits));
      }
      for (int64_t i = 0; i < 4; ++i) transpose_words(words[i], panel + i * 640 + 4 * half);
    }
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const uint8_t* from_row = from.row[r] + super;
      const float d = half_at(from_row + 208);
      for (int64_t i = 0; i < 8; ++i) {  // each run of 16 columns
        const float scale = d * static_cast<float>(static_cast<int8_t>(from_row[192 + part * 8 + i]));
        std::memcpy(panel + i / 2 * 640 + 512 + i % 2 * 64 + 4 * r, &scale, 4);
      }
    }
  }
}

}  // namespace
