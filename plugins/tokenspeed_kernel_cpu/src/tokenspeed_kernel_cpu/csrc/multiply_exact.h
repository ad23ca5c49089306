// Products with activations as they are: weights become float32 in registers, four columns of all rows at a time.
//
// A row's sum is kept in four parts (columns 4 i + j go to part j), which are put together after every eighth block, for any number of
// tokens, and whether a weight is unpacked eight blocks at a time or not: so the order of its additions is always the same.
#pragma once

#include "multiply.h"

namespace {

using namespace tokenspeed_cpu;

#ifdef __AVX512F__
inline Ints byte_of(Ints v, int j, int32_t mask) { return _mm512_and_si512(_mm512_srli_epi32(v, 8 * j), _mm512_set1_epi32(mask)); }
inline Ints shifted_down(Ints v, int bits) { return _mm512_srli_epi32(v, bits); }
inline Ints words_of_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Ints minus(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
#else
inline Ints byte_of(Ints v, int j, int32_t mask) { return _mm256_and_si256(_mm256_srli_epi32(v, 8 * j), _mm256_set1_epi32(mask)); }
inline Ints shifted_down(Ints v, int bits) { return _mm256_srli_epi32(v, bits); }
inline Ints words_of_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline Ints minus(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
#endif

// weight = d * (u - offset) + m
struct Levels {
  Vec d, m;
  Ints offset;
};

template <Panel Format>
inline Levels levels(const TileArgs& args, int64_t b, int part, int64_t lane) {
  const uint8_t* block = block_at<Format>(args, b);
  Levels at{splat(0.0f), splat(0.0f), splat_word(kOffset<Format>)};
  if constexpr (Format == Panel::kQ4_0 || Format == Panel::kQ4_1) at.d = load_half(block + 256 + 2 * lane);
  if constexpr (Format == Panel::kQ4_1) at.m = load_half(block + 288 + 2 * lane);
  if constexpr (Format == Panel::kQ8_0) at.d = load_half(block + 512 + 2 * lane);
  if constexpr (Format == Panel::kQ6_K) at.d = load(reinterpret_cast<const float*>(block + 512 + 64 * part) + lane);
  if constexpr (Format == Panel::kQ4_K) {
    const uint8_t* super = args.panel + (b >> 3) * 2368;
    at.d = load_half(super + 2 * lane) * load_u8(block + 256 + lane);
    at.m = splat(0.0f) - load_half(super + 32 + 2 * lane) * load_u8(block + 272 + lane);
  }
  if constexpr (Format == Panel::kInt4) {
    const int64_t width = scale_bytes(args.scale);
    const uint8_t* start = args.panel + b / args.blocks_per_group * group_bytes(args.scale, args.blocks_per_group);
    at.d = load_scales(args.scale, start + width * lane);
    at.offset = words_of_bytes(start + kPanelRows * width + lane);
  }
  return at;
}

// Four columns, from bits 0..7 (or 0..3, under the mask) of each byte of `words`, with x[0..3] of each token.
template <int Tokens>
inline void add_columns(Ints words, int32_t mask, const Levels& at, const float* const* x, int64_t column, Vec (*total)[4]) {
  for (int j = 0; j < 4; ++j) {
    const Vec weight = fma(to_float(minus(byte_of(words, j, mask), at.offset)), at.d, at.m);
    for (int t = 0; t < Tokens; ++t) total[t][j] = fma(weight, splat(x[t][column + j]), total[t][j]);
  }
}

template <Panel Format, int Tokens>
void tile_exact(const TileArgs& args, int64_t token, int64_t lane, float* sums) {
  const float* x[Tokens];
  for (int t = 0; t < Tokens; ++t) x[t] = args.exact + (token + t) * args.exact_stride + args.first_block * kBlockColumns;
  Vec total[Tokens][4];
  for (int t = 0; t < Tokens; ++t) {
    total[t][0] = load(sums + t * kPanelRows);
    for (int j = 1; j < 4; ++j) total[t][j] = splat(0.0f);
  }
  for (int64_t b = 0; b < args.num_blocks; ++b) {
    const uint8_t* block = block_at<Format>(args, b) + 4 * lane;
    const int64_t column = b * kBlockColumns;
    if (b > 0 && b % 8 == 0) {
      for (int t = 0; t < Tokens; ++t) {
        total[t][0] = (total[t][0] + total[t][1]) + (total[t][2] + total[t][3]);
        for (int j = 1; j < 4; ++j) total[t][j] = splat(0.0f);
      }
    }
    if constexpr (Format == Panel::kQ8_0 || Format == Panel::kQ6_K) {
      for (int part = 0; part < kParts<Format>; ++part) {
        const Levels at = levels<Format>(args, b, part, lane);
        constexpr int kWords = 8 / kParts<Format>;
        for (int i = part * kWords; i < (part + 1) * kWords; ++i) {
          add_columns<Tokens>(load_bytes(block + 64 * i), 255, at, x, column + 4 * i, total);
        }
      }
    } else {
      const Levels at = levels<Format>(args, b, 0, lane);
      for (int i = 0; i < 4; ++i) add_columns<Tokens>(load_bytes(block + 64 * i), 15, at, x, column + 4 * i, total);
      for (int i = 0; i < 4; ++i) {
        add_columns<Tokens>(shifted_down(load_bytes(block + 64 * i), 4), 15, at, x, column + 16 + 4 * i, total);
      }
    }
  }
  for (int t = 0; t < Tokens; ++t) store(sums + t * kPanelRows, (total[t][0] + total[t][1]) + (total[t][2] + total[t][3]));
}

template <Panel Format>
void multiply_exact(const TileArgs& args) {
  for (int64_t lane = 0; lane < kPanelRows; lane += kWidth) {
    int64_t t = 0;
    const auto sums = [&] { return args.sums + t * kPanelRows + lane; };
#ifdef __AVX512F__
    for (; t + 4 <= args.num_tokens; t += 4) tile_exact<Format, 4>(args, args.first_token + t, lane, sums());
#endif
    for (; t + 2 <= args.num_tokens; t += 2) tile_exact<Format, 2>(args, args.first_token + t, lane, sums());
    for (; t < args.num_tokens; ++t) tile_exact<Format, 1>(args, args.first_token + t, lane, sums());
  }
}

}  // namespace
