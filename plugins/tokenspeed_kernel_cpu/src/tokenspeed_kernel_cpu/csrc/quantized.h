// What the driver of the quantized products and the kernels compiled for each instruction set share. Plain types alone.
//
// A weight [rows, columns] is cut into panels of 16 rows and blocks of 32 columns. In a panel, four neighbouring columns of one row
// are one 32-bit lane, and the 16 rows stand side by side: one AVX-512 register (or two AVX2 ones) holds 16 rows x 4 columns, which
// a byte dot product multiplies by the same four activations, broadcast. Nothing has to be summed across lanes at any time.
//
// Activations are rounded to 8 bits, each run of 32 with a scale of its own: x ~ scale * q, |q| <= 127. Then
//   sum over a block of w * x = d * scale * sum(u * q) + m * scale * sum(q),   w = d * u + m
// where sum(u * q) is an integer and exact. Blocks are added in order, in float32, for any number of rows: what a row gives does not
// depend on the rows beside it, on the threads, or on the instruction set.
#pragma once

#include <cstdint>

namespace tokenspeed_cpu {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kBlockColumns = 32;        // columns
constexpr int64_t kSuperColumns = 256;  // columns of a block of the K formats

// As stored in a file: each row's blocks one after the other.
enum class Stored : int { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2, kQ4_K = 3, kQ6_K = 4 };
// Panels. Sizes are those of the stored blocks, but for Q4_K (2.8% more) and Q6_K, which is unpacked a few blocks at a time.
enum class Panel : int { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2, kQ4_K = 3, kQ6_K = 4, kInt4 = 5 };

// How the scales of kInt4 are stored.
enum class Scale : int { kHalf = 0, kBf16 = 1, kFloat = 2 };

// Activations of `tokens` rows, as the kernels read them.
struct Activations {
  int8_t* values;  // [tokens, columns]
  float* scale;    // [tokens, columns / 32]
  float* sum;      // [tokens, columns / 32]: scale * sum(q)
  int32_t* half_sum;  // [tokens, columns / 16]: sum(q) of each half block
  int64_t columns;
};

struct TileArgs {
  const uint8_t* panel;  // of the first block
  int64_t first_block;
  int64_t num_blocks;    // whole super-blocks where the format has them
  int64_t blocks_per_group;  // kInt4: blocks that share a scale
  Scale scale;               // kInt4
  Activations x;
  const float* exact;    // [tokens, columns]: activations as they are, for multiply_exact; first_token counts from here
  int64_t exact_stride;
  int64_t first_token;
  int64_t num_tokens;
  float* sums;  // [num_tokens, 16], contiguous; added to
};

struct QuantizedTable {
  // Round rows of float32 or bfloat16 to 8 bits.
  void (*quantize)(const void* x, bool bf16, const Activations& to, int64_t token);
  // Add the products of one panel with some tokens.
  void (*multiply[6])(const TileArgs&);
  void (*multiply_exact[6])(const TileArgs&);
  // Unpack blocks [first, first + count) of up to 16 stored rows into a panel.
  void (*unpack[5])(const uint8_t* stored, int64_t row_bytes, int64_t rows, int64_t first, int64_t count, uint8_t* panel);
  // One token's products with up to 16 stored rows of Q8_0, without a panel; null where it would not be quicker. Writes the sums.
  void (*multiply_rows_q8_0)(const uint8_t* stored, int64_t row_bytes, int64_t rows, const TileArgs&);
};

static constexpr int64_t panel_bytes(Panel panel, int64_t columns) {
  switch (panel) {
    case Panel::kQ4_0: return columns / kBlockColumns * 288;
    case Panel::kQ4_1: return columns / kBlockColumns * 320;
    case Panel::kQ8_0: return columns / kBlockColumns * 544;
    case Panel::kQ4_K: return columns / kSuperColumns * 2368;
    case Panel::kQ6_K: return columns / kBlockColumns * 640;
    case Panel::kInt4: break;  // depends on the group
  }
  return 0;
}

// kInt4: a group's 16 scales and 16 zero points, then its blocks of 4-bit values.
static constexpr int64_t scale_bytes(Scale scale) { return scale == Scale::kFloat ? 4 : 2; }
static constexpr int64_t group_bytes(Scale scale, int64_t blocks) { return kPanelRows * (scale_bytes(scale) + 1) + 256 * blocks; }

static constexpr int64_t stored_row_bytes(Stored stored, int64_t columns) {
  switch (stored) {
    case Stored::kQ4_0: return columns / kBlockColumns * 18;
    case Stored::kQ4_1: return columns / kBlockColumns * 20;
    case Stored::kQ8_0: return columns / kBlockColumns * 34;
    case Stored::kQ4_K: return columns / kSuperColumns * 144;
    case Stored::kQ6_K: return columns / kSuperColumns * 210;
  }
  return 0;
}

}  // namespace tokenspeed_cpu
