// Products with quantized weights: rounds the activations, deals panels out to the threads, writes what they sum up.
#include "linear.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "number.h"

namespace tokenspeed_cpu {
namespace {

constexpr int64_t kTokensAtOnce = 128;          // that one unpacked panel serves
constexpr int64_t kBytesAtOnce = 12 * 1024;     // of weights in one piece of work, where there are few tokens
constexpr int64_t kBytesForThreads = 48 * 1024;  // of weights, below which a second thread costs more than it saves
constexpr int64_t kMaxTokens = 1024;            // whose rounded activations are in memory at a time
constexpr int64_t kBlocksUnpacked = 8;          // at a time: one super-block

int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Memory that a thread keeps for its next call; it grows to the largest call so far.
uint8_t* scratch(size_t bytes, std::unique_ptr<uint8_t[]>& memory, size_t& size) {
  if (size < bytes + 64) {
    memory.reset(new uint8_t[bytes + 64]);
    size = bytes + 64;
  }
  return memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64);
}

Activations activations(int64_t tokens, int64_t columns) {
  static thread_local std::unique_ptr<uint8_t[]> memory;
  static thread_local size_t size = 0;
  const int64_t blocks = columns / kBlockColumns;
  const int64_t values = rounded_up(tokens * columns, 64), scales = rounded_up(tokens * blocks * 4, 64);
  uint8_t* start = scratch(static_cast<size_t>(values + 4 * scales), memory, size);
  return {reinterpret_cast<int8_t*>(start), reinterpret_cast<float*>(start + values),
          reinterpret_cast<float*>(start + values + scales), reinterpret_cast<int32_t*>(start + values + 2 * scales), columns};
}

// The activations as float32: where they lie, or a copy.
const float* as_floats(const LinearArgs& args, int64_t start, int64_t tokens, int64_t* stride) {
  if (!args.x_bf16) {
    *stride = args.x_stride;
    return static_cast<const float*>(args.x) + start * args.x_stride;
  }
  static thread_local std::unique_ptr<uint8_t[]> memory;
  static thread_local size_t size = 0;
  float* to = reinterpret_cast<float*>(scratch(static_cast<size_t>(tokens * args.columns) * sizeof(float), memory, size));
  for (int64_t t = 0; t < tokens; ++t) {
    const uint16_t* row = static_cast<const uint16_t*>(args.x) + (start + t) * args.x_stride;
    for (int64_t i = 0; i < args.columns; ++i) to[t * args.columns + i] = float_of_bf16(row[i]);
  }
  *stride = args.columns;
  return to;
}

float number_at(const void* data, int64_t i, bool bf16) {
  return bf16 ? float_of_bf16(static_cast<const uint16_t*>(data)[i]) : static_cast<const float*>(data)[i];
}

// Sums of one panel to the outputs of its rows, with the bias.
void write(const LinearArgs& args, int64_t panel, int64_t token, int64_t tokens, float* sums) {
  const int64_t first = panel * kPanelRows, rows = std::min(kPanelRows, args.rows - first);
  if (args.bias != nullptr) {
    float bias[kPanelRows];
    for (int64_t r = 0; r < rows; ++r) bias[r] = number_at(args.bias, first + r, args.bias_bf16);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t r = 0; r < rows; ++r) sums[t * kPanelRows + r] += bias[r];
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t at = (token + t) * args.out_stride + first;
    const float* from = sums + t * kPanelRows;
    if (!args.out_bf16) {
      std::memcpy(static_cast<float*>(args.out) + at, from, static_cast<size_t>(rows) * 4);
    } else {
      uint16_t* to = static_cast<uint16_t*>(args.out) + at;
      for (int64_t r = 0; r < rows; ++r) to[r] = bf16_of(from[r]);
    }
  }
}

// Read one word of each cache line, in order. Unpacking reads sixteen rows side by side, which is no stream that hardware would
// recognize and fetch ahead: a quarter of the memory's rate without this, 49152 x 576 in Q8_0 on an EPYC of 2022.
void touch(const uint8_t* data, int64_t bytes) {
  uint8_t any = 0;
  for (int64_t i = 0; i < bytes; i += 64) any |= data[i];
  asm volatile("" ::"r"(any));
}

struct Worker {
  alignas(64) float sums[kTokensAtOnce * kPanelRows];
  alignas(64) uint8_t panel[kBlocksUnpacked * 640];
};

}  // namespace

void linear(const QuantizedTable& kernels, const LinearArgs& args, int threads) {
  const int64_t panels = (args.rows + kPanelRows - 1) / kPanelRows, blocks = args.columns / kBlockColumns;
  const int format = static_cast<int>(args.panel);
  const auto multiply = (args.is_exact ? kernels.multiply_exact : kernels.multiply)[format];
  const auto unpack = args.is_stored ? kernels.unpack[format] : nullptr;
  const int64_t element = args.x_bf16 ? 2 : 4;
  for (int64_t start = 0; start < args.tokens; start += kMaxTokens) {
    const int64_t tokens = std::min(kMaxTokens, args.tokens - start);
    const Activations x = args.is_exact ? Activations{} : activations(tokens, args.columns);
    int64_t exact_stride = 0;
    const float* exact = args.is_exact ? as_floats(args, start, tokens, &exact_stride) : nullptr;
    const auto round = [&](int64_t token) {
      const auto* row = static_cast<const uint8_t*>(args.x) + (start + token) * args.x_stride * element;
      kernels.quantize(row, args.x_bf16, x, token);
    };
    const int64_t bytes = panels * args.panel_stride;
    const bool alone = bytes * std::min<int64_t>(tokens, 8) < kBytesForThreads;
    const int team_size = alone ? 1 : threads;
    const int64_t tokens_at_once = std::min(tokens, kTokensAtOnce), parts = (tokens + kTokensAtOnce - 1) / kTokensAtOnce;
    const int64_t run = tokens > 8 || team_size == 1 ? 1 : std::max<int64_t>(1, kBytesAtOnce / std::max<int64_t>(args.panel_stride, 1));
    const int64_t runs = (panels + run - 1) / run;
    const bool by_rows = args.is_stored && args.panel == Panel::kQ8_0 && !args.is_exact && tokens == 1 &&
                         kernels.multiply_rows_q8_0 != nullptr;
    const auto work = [&](int64_t item) {
      static thread_local Worker own;
      const int64_t token = item / runs * tokens_at_once, count = std::min(tokens_at_once, tokens - token);
      const int64_t last = std::min((item % runs + 1) * run, panels);
      for (int64_t panel = item % runs * run; panel < last; ++panel) {
        const uint8_t* data = args.data + panel * args.panel_stride;
        std::memset(own.sums, 0, static_cast<size_t>(count * kPanelRows) * sizeof(float));
        const int64_t rows = std::min(kPanelRows, args.rows - panel * kPanelRows);
        TileArgs tile{data, 0, blocks, args.blocks_per_group, args.scale, x, exact, exact_stride, token, count, own.sums};
        if (unpack == nullptr) {
          multiply(tile);
        } else if (by_rows) {
          kernels.multiply_rows_q8_0(data, args.row_bytes, rows, tile);
        } else {
          tile.panel = own.panel;
          if (blocks > 0) touch(data, (rows - 1) * args.row_bytes + stored_row_bytes(static_cast<Stored>(args.panel), args.columns));
          for (int64_t b = 0; b < blocks; b += kBlocksUnpacked) {
            tile.first_block = b;
            tile.num_blocks = std::min(kBlocksUnpacked, blocks - b);
            unpack(data, args.row_bytes, rows, b, tile.num_blocks, own.panel);
            multiply(tile);
          }
        }
        write(args, panel, start + token, count, own.sums);
      }
    };
    if (args.is_exact) {
      // Nothing to round.
    } else if (tokens < 8) {
      for (int64_t token = 0; token < tokens; ++token) round(token);
    } else {
      parallel_for((tokens + 7) / 8, team_size, [&](int64_t part) {
        for (int64_t token = part * 8; token < std::min(part * 8 + 8, tokens); ++token) round(token);
      });
    }
    parallel_for(runs * parts, team_size, work, tokens <= 8 ? args.next : Upcoming{});
  }
}

}  // namespace tokenspeed_cpu
