// Weights into panels, once, when they are loaded; and the rows of an embedding table out of its stored blocks.
#include <algorithm>
#include <cstring>

#include "linear.h"
#include "number.h"
#include "parallel.h"

namespace tokenspeed_cpu {
namespace {

float half_of(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return float_of_half(bits);
}

// Scale and minimum of one of eight sub-blocks; see unpack.h.
void six_bits(const uint8_t* packed, int64_t sub, int* scale, int* minimum) {
  *scale = sub < 4 ? packed[sub] & 63 : (packed[sub + 4] & 15) | (packed[sub - 4] >> 6) << 4;
  *minimum = sub < 4 ? packed[sub + 4] & 63 : (packed[sub + 4] >> 4) | (packed[sub] >> 6) << 4;
}

void row_q4(const uint8_t* block, bool has_minimum, int64_t columns, float* out) {
  for (int64_t c = 0; c < columns; c += kBlockColumns, out += kBlockColumns, block += has_minimum ? 20 : 18) {
    const float d = half_of(block), m = has_minimum ? half_of(block + 2) : -8.0f * d;
    const uint8_t* values = block + (has_minimum ? 4 : 2);
    for (int64_t i = 0; i < 16; ++i) {
      out[i] = d * static_cast<float>(values[i] & 15) + m;
      out[16 + i] = d * static_cast<float>(values[i] >> 4) + m;
    }
  }
}

void row_q8_0(const uint8_t* block, int64_t columns, float* out) {
  for (int64_t c = 0; c < columns; c += kBlockColumns, out += kBlockColumns, block += 34) {
    const float d = half_of(block);
    for (int64_t i = 0; i < kBlockColumns; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(block[2 + i]));
  }
}

void row_q4_k(const uint8_t* super, int64_t columns, float* out) {
  for (int64_t c = 0; c < columns; c += kSuperColumns, out += kSuperColumns, super += 144) {
    const float d = half_of(super), low = half_of(super + 2);
    for (int64_t sub = 0; sub < 8; ++sub) {
      int scale, minimum;
      six_bits(super + 4, sub, &scale, &minimum);
      const float step = d * static_cast<float>(scale), offset = low * static_cast<float>(minimum);
      for (int64_t i = 0; i < kBlockColumns; ++i) {
        out[sub * kBlockColumns + i] = step * static_cast<float>(super[16 + sub / 2 * 32 + i] >> (sub % 2 * 4) & 15) - offset;
      }
    }
  }
}

void row_q6_k(const uint8_t* super, int64_t columns, float* out) {
  for (int64_t c = 0; c < columns; c += kSuperColumns, out += kSuperColumns, super += 210) {
    const float d = half_of(super + 208);
    for (int64_t i = 0; i < kSuperColumns; ++i) {
      const int64_t part = i / 128, run = i / 32 % 4, at = i % 32;
      const int low = super[part * 64 + run % 2 * 32 + at] >> (run / 2 * 4) & 15;
      const int high = super[128 + part * 32 + at] >> (run * 2) & 3;
      out[i] = d * static_cast<float>(static_cast<int8_t>(super[192 + i / 16])) * static_cast<float>((low | high << 4) - 32);
    }
  }
}

}  // namespace

void pack_stored(const QuantizedTable& kernels, Stored stored, const uint8_t* data, int64_t row_bytes, int64_t rows,
                 int64_t columns, uint8_t* panels, int threads) {
  const auto unpack = kernels.unpack[static_cast<int>(stored)];
  const int64_t bytes = panel_bytes(static_cast<Panel>(stored), columns);
  parallel_for((rows + kPanelRows - 1) / kPanelRows, threads, [&](int64_t panel) {
    const int64_t first = panel * kPanelRows;
    unpack(data + first * row_bytes, row_bytes, std::min(kPanelRows, rows - first), 0, columns / kBlockColumns,
           panels + panel * bytes);
  });
}

void pack_int4(const Int4Args& args, uint8_t* panels) {
  const int64_t groups = args.columns / args.group, blocks = args.group / kBlockColumns;
  const int64_t width = scale_bytes(args.scale), bytes = group_bytes(args.scale, blocks);
  const uint8_t flip = args.is_signed ? 8 : 0;
  for (int64_t first = 0; first < args.rows; first += kPanelRows) {
    for (int64_t g = 0; g < groups; ++g, panels += bytes) {
      uint8_t* values = panels + kPanelRows * (width + 1);
      for (int64_t r = 0; r < kPanelRows; ++r) {
        const int64_t row = std::min(first + r, args.rows - 1), at = row * groups + g;
        std::memcpy(panels + width * r, static_cast<const uint8_t*>(args.scales) + width * at, static_cast<size_t>(width));
        panels[kPanelRows * width + r] = args.zeros == nullptr ? 8 : args.zeros[at];
        const uint8_t* from = args.values + row * args.columns / 2 + g * args.group / 2;
        for (int64_t b = 0; b < blocks; ++b) {
          const auto value = [&](int64_t i) { return static_cast<uint8_t>((from[b * 16 + i / 2] >> (i % 2 * 4) & 15) ^ flip); };
          for (int64_t i = 0; i < 16; ++i) {
            values[b * 256 + i / 4 * 64 + 4 * r + i % 4] = static_cast<uint8_t>(value(i) | value(16 + i) << 4);
          }
        }
      }
    }
  }
}

void look_up(const LookUpArgs& args) {
  constexpr int64_t kAtOnce = kSuperColumns;
  for (int64_t token = 0; token < args.tokens; ++token) {
    const int64_t at = token * args.id_stride;
    const int64_t id = args.wide_ids ? static_cast<const int64_t*>(args.ids)[at] : static_cast<const int32_t*>(args.ids)[at];
    const bool inside = id >= 0 && id < args.rows;
    for (int64_t c = 0; c < args.columns; c += kAtOnce) {
      float part[kAtOnce] = {};
      const int64_t columns = std::min(kAtOnce, args.columns - c);
      if (inside) {
        const uint8_t* row = args.data + id * args.row_bytes + stored_row_bytes(args.stored, c);
        switch (args.stored) {
          case Stored::kQ4_0: row_q4(row, false, columns, part); break;
          case Stored::kQ4_1: row_q4(row, true, columns, part); break;
          case Stored::kQ8_0: row_q8_0(row, columns, part); break;
          case Stored::kQ4_K: row_q4_k(row, columns, part); break;
          case Stored::kQ6_K: row_q6_k(row, columns, part); break;
        }
      }
      if (args.out_bf16) {
        uint16_t* to = static_cast<uint16_t*>(args.out) + token * args.out_stride + c;
        for (int64_t i = 0; i < columns; ++i) to[i] = bf16_of(part[i]);
      } else {
        std::memcpy(static_cast<float*>(args.out) + token * args.out_stride + c, part, static_cast<size_t>(columns) * 4);
      }
    }
  }
}

}  // namespace tokenspeed_cpu
