// The products of one panel with a few tokens at a time, for each panel format; see quantized.h for the layout.
#pragma once

#include "bytes.h"
#include "quantized.h"

namespace {

using namespace tokenspeed_cpu;

// How far ahead of the products with a single token weights are asked for: several times a memory's latency at the rate of one thread.
constexpr int64_t kPrefetchBytes = 4096;

// Integer sums of one block for Tokens tokens and the rows of one register, from 4-bit weights: 4 registers of 2 x 4 columns.
template <int Tokens>
inline void dot_nibbles(const uint8_t* block, const int8_t* const* x, Ints* sums) {
#ifdef __AVX512VNNI__
  if constexpr (Tokens == 1) {
    // Two chains of sums, and what comes next asked for in time: with one token there is nothing else to wait for.
    Ints other = splat_word(0);
    for (int i = 0; i < 4; ++i) {
      const Ints both = load_bytes(block + 64 * i);
      __builtin_prefetch(block + kPrefetchBytes + 64 * i);
      sums[0] = dot(sums[0], low_nibbles(both), splat_word(word_at(x[0] + 4 * i)));
      other = dot(other, high_nibbles(both), splat_word(word_at(x[0] + 16 + 4 * i)));
    }
    sums[0] = add(sums[0], other);
    return;
  }
  for (int i = 0; i < 4; ++i) {
    const Ints both = load_bytes(block + 64 * i), low = low_nibbles(both), high = high_nibbles(both);
    for (int t = 0; t < Tokens; ++t) sums[t] = dot(sums[t], low, splat_word(word_at(x[t] + 4 * i)));
    for (int t = 0; t < Tokens; ++t) sums[t] = dot(sums[t], high, splat_word(word_at(x[t] + 16 + 4 * i)));
  }
#else
  // Eight sums of two products, each at most 2 * 15 * 127, fit into 16 bits.
  Ints halves[Tokens];
  for (int i = 0; i < 4; ++i) {
    const Ints both = load_bytes(block + 64 * i), low = low_nibbles(both), high = high_nibbles(both);
    for (int t = 0; t < Tokens; ++t) {
      const Ints first = pairs(low, splat_word(word_at(x[t] + 4 * i)));
      const Ints two = add16(first, pairs(high, splat_word(word_at(x[t] + 16 + 4 * i))));
      halves[t] = i == 0 ? two : add16(halves[t], two);
    }
  }
  for (int t = 0; t < Tokens; ++t) sums[t] = add(sums[t], widen(halves[t]));
#endif
}

// From bytes 0..63 (Q6_K), half a block: 4 registers of 4 columns.
template <int Tokens>
inline void dot_six_bits(const uint8_t* block, const int8_t* const* x, Ints* sums) {
  for (int i = 0; i < 4; i += 2) {
    const Ints first = load_bytes(block + 64 * i), second = load_bytes(block + 64 * i + 64);
    for (int t = 0; t < Tokens; ++t) {
      const Ints one = splat_word(word_at(x[t] + 4 * i)), two = splat_word(word_at(x[t] + 4 * i + 4));
#ifdef __AVX512VNNI__
      sums[t] = dot(dot(sums[t], first, one), second, two);
#else
      // Two sums of two products, each at most 2 * 63 * 127, fit into 16 bits.
      sums[t] = add(sums[t], widen(add16(pairs(first, one), pairs(second, two))));
#endif
    }
  }
}

// From bytes that are 128 more than the weight: 8 registers of 4 columns. With VNNI the 128 is not taken off again: the caller
// starts the sums at -128 * sum(q).
template <int Tokens>
inline void dot_bytes(const uint8_t* block, const int8_t* const* x, Ints* sums) {
  for (int i = 0; i < 8; ++i) {
    const Ints raw = load_bytes(block + 64 * i);
#ifdef __AVX512VNNI__
    for (int t = 0; t < Tokens; ++t) sums[t] = dot(sums[t], raw, splat_word(word_at(x[t] + 4 * i)));
#else
    // |w| * (x with the sign of w): two products are at most 2 * 128 * 127.
    const Ints weight = flip_sign_bits(raw), size = magnitudes(weight);
    const Signs signs = signs_of(weight);
    for (int t = 0; t < Tokens; ++t) sums[t] = add(sums[t], widen(pairs(size, with_signs(splat_word(word_at(x[t] + 4 * i)), signs))));
#endif
  }
}

// Where the activations of some tokens stand.
template <int Tokens>
struct TokenRows {
  const int8_t* values[Tokens];
  const float* scale[Tokens];
  const float* sum[Tokens];
  const int32_t* half_sum[Tokens];

  TokenRows(const Activations& x, int64_t token, int64_t first_block) {
    const int64_t blocks = x.columns / kBlockColumns;
    for (int t = 0; t < Tokens; ++t) {
      values[t] = x.values + (token + t) * x.columns + first_block * kBlockColumns;
      scale[t] = x.scale + (token + t) * blocks + first_block;
      sum[t] = x.sum + (token + t) * blocks + first_block;
      half_sum[t] = x.half_sum + 2 * ((token + t) * blocks + first_block);
    }
  }
  int32_t whole_sum(int t, int64_t b) const { return half_sum[t][2 * b] + half_sum[t][2 * b + 1]; }
};

// Bytes of a block (of half of one, for Q6_K, whose scales are for 16 columns), and how many such parts a block has.
template <Panel Format>
constexpr int kParts = Format == Panel::kQ6_K ? 2 : 1;

// Weights are stored with this much added.
template <Panel Format>
constexpr int32_t kOffset = Format == Panel::kQ4_0 ? 8 : Format == Panel::kQ8_0 ? 128 : Format == Panel::kQ6_K ? 32 : 0;

// What is to be taken off the sum of products of a part for the offset; the integers stay exact.
template <Panel Format, int Tokens>
inline int32_t offset_sum(const TokenRows<Tokens>& x, int t, int64_t b, int part) {
  if constexpr (kOffset<Format> == 0) return 0;
  return -kOffset<Format> * (kParts<Format> == 2 ? x.half_sum[t][2 * b + part] : x.whole_sum(t, b));
}

// The 4-bit values or bytes of a block.
template <Panel Format>
inline const uint8_t* block_at(const TileArgs& args, int64_t b) {
  if constexpr (Format == Panel::kQ4_0) return args.panel + b * 288;
  if constexpr (Format == Panel::kQ4_1) return args.panel + b * 320;
  if constexpr (Format == Panel::kQ8_0) return args.panel + b * 544;
  if constexpr (Format == Panel::kQ6_K) return args.panel + b * 640;
  if constexpr (Format == Panel::kQ4_K) return args.panel + (b >> 3) * 2368 + 64 + (b & 7) * 288;
  const int64_t group = b / args.blocks_per_group, within = b - group * args.blocks_per_group;
  return args.panel + group * group_bytes(args.scale, args.blocks_per_group) + kPanelRows * (scale_bytes(args.scale) + 1) + within * 256;
}

inline Vec load_scales(Scale scale, const uint8_t* p) {
  return scale == Scale::kHalf ? load_half(p) : scale == Scale::kBf16 ? load_bf16(p) : load(reinterpret_cast<const float*>(p));
}

// Bring the integer sums of a part of a block into the totals: times the scales of rows and tokens, and the minima's share.
template <Panel Format, int Tokens>
inline void add_scaled(const TileArgs& args, const TokenRows<Tokens>& x, int64_t b, int part, int64_t lane, const Ints* dots, Vec* total) {
  const uint8_t* block = block_at<Format>(args, b);
  Vec d, m;
  constexpr bool kHasMinimum = Format == Panel::kQ4_1 || Format == Panel::kQ4_K || Format == Panel::kInt4;
  if constexpr (Format == Panel::kQ4_0 || Format == Panel::kQ4_1) d = load_half(block + 256 + 2 * lane);
  if constexpr (Format == Panel::kQ4_1) m = load_half(block + 288 + 2 * lane);
  if constexpr (Format == Panel::kQ8_0) d = load_half(block + 512 + 2 * lane);
  if constexpr (Format == Panel::kQ6_K) d = load(reinterpret_cast<const float*>(block + 512 + 64 * part) + lane);
  if constexpr (Format == Panel::kQ4_K) {
    const uint8_t* super = args.panel + (b >> 3) * 2368;
    d = load_half(super + 2 * lane) * load_u8(block + 256 + lane);
    m = load_half(super + 32 + 2 * lane) * load_u8(block + 272 + lane);
  }
  if constexpr (Format == Panel::kInt4) {
    const int64_t width = scale_bytes(args.scale);
    const uint8_t* start = args.panel + b / args.blocks_per_group * group_bytes(args.scale, args.blocks_per_group);
    d = load_scales(args.scale, start + width * lane);
    m = d * load_u8(start + kPanelRows * width + lane);
  }
  for (int t = 0; t < Tokens; ++t) {
    total[t] = fma(to_float(dots[t]), d * splat(x.scale[t][b]), total[t]);
    if constexpr (kHasMinimum) {
      // Minima of Q4_1 are added; those of Q4_K, and zero points, are taken off.
      total[t] = fma(m, splat(Format == Panel::kQ4_1 ? x.sum[t][b] : -x.sum[t][b]), total[t]);
    }
  }
}

template <Panel Format, int Tokens>
void tile(const TileArgs& args, int64_t token, int64_t lane, float* sums) {
  const TokenRows<Tokens> x(args.x, token, args.first_block);
  Vec total[Tokens];
  for (int t = 0; t < Tokens; ++t) total[t] = load(sums + t * kPanelRows);
  const int8_t* values[Tokens];
  for (int64_t b = 0; b < args.num_blocks; ++b) {
    const uint8_t* block = block_at<Format>(args, b) + 4 * lane;
    for (int part = 0; part < kParts<Format>; ++part) {
      for (int t = 0; t < Tokens; ++t) values[t] = x.values[t] + b * kBlockColumns + 16 * part;
      Ints dots[Tokens];
#ifdef __AVX512VNNI__
      constexpr bool kIsBiased = true;
#else
      constexpr bool kIsBiased = Format != Panel::kQ8_0;  // dot_bytes takes the offset off by itself
#endif
      for (int t = 0; t < Tokens; ++t) dots[t] = splat_word(kIsBiased ? offset_sum<Format, Tokens>(x, t, b, part) : 0);
      if constexpr (Format == Panel::kQ8_0) {
        dot_bytes<Tokens>(block, values, dots);
      } else if constexpr (Format == Panel::kQ6_K) {
        dot_six_bits<Tokens>(block + 256 * part, values, dots);
      } else {
        dot_nibbles<Tokens>(block, values, dots);
      }
      add_scaled<Format, Tokens>(args, x, b, part, lane, dots, total);
    }
  }
  for (int t = 0; t < Tokens; ++t) store(sums + t * kPanelRows, total[t]);
}

#ifdef TOKENSPEED_AMX
#include "multiply_amx.h"
#endif

template <Panel Format>
void multiply(const TileArgs& args) {
#ifdef TOKENSPEED_AMX
  const int64_t done = multiply_amx<Format>(args);
#else
  constexpr int64_t done = 0;
#endif
  for (int64_t lane = 0; lane < kPanelRows; lane += kWidth) {
    int64_t t = done;
    const auto sums = [&] { return args.sums + t * kPanelRows + lane; };
#ifdef __AVX512F__
    for (; t + 8 <= args.num_tokens; t += 8) tile<Format, 8>(args, args.first_token + t, lane, sums());
#endif
    for (; t + 4 <= args.num_tokens; t += 4) tile<Format, 4>(args, args.first_token + t, lane, sums());
    for (; t + 2 <= args.num_tokens; t += 2) tile<Format, 2>(args, args.first_token + t, lane, sums());
    for (; t < args.num_tokens; ++t) tile<Format, 1>(args, args.first_token + t, lane, sums());
  }
}

}  // namespace
