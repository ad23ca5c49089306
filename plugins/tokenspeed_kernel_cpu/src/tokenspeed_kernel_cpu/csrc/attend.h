// Softmax attention of a tile of query rows to keys that are read where they lie, in pages or in one piece.
//
// Keys go by blocks of 64 that start at multiples of 64 of the request's positions, one after the other from the first that a
// row of the tile sees. Keys that a row does not see have weight 0 for it and add nothing: so a row's result depends neither on the
// rows beside it, nor on how a prompt was cut into chunks. Keys are turned over once for all rows, so that a vector holds 16 (or 8)
// keys and nothing is summed across lanes.
//
// Source: online softmax arXiv:1805.02867; tiles arXiv:2205.14135; paging arXiv:2309.06180; grouped queries arXiv:2305.13245.
#pragma once

#include "attend_args.h"
#include "numbers.h"

namespace {

using namespace tokenspeed_cpu;

constexpr float kNothing = -__builtin_inff();
constexpr int kScoreVectors = 2;                     // vectors of keys that are summed at once
constexpr int kValueVectors = kWidth == 16 ? 4 : 2;  // vectors of a value row that are
constexpr int kScoreRows = kWidth == 16 ? 6 : 4;

struct RowState {
  float maximum;
  float sum;
  int32_t low, high;  // keys of the block that the row sees
};

struct Scratch {
  float* q;       // [rows, padded]
  float* sums;    // [rows, padded]
  float* keys;    // [head_dim, 64]
  float* values;  // [64, padded]
  float* zeros;   // [padded]
  float* weights;  // [rows, 64]
  RowState* rows;

  Scratch(float* memory, int64_t padded) {
    q = memory;
    sums = q + kTileRows * padded;
    keys = sums + kTileRows * padded;
    values = keys + kKeyBlock * padded;
    zeros = values + kKeyBlock * padded;
    weights = zeros + padded;
    rows = reinterpret_cast<RowState*>(weights + kTileRows * kKeyBlock);
  }
};

// Where the keys and values of a block lie; null where a page is missing.
template <typename Element>
struct KeyBlock {
  const Element* k[kKeyBlock];
  const Element* v[kKeyBlock];
};

template <typename Element>
void find_keys(const AttendArgs& args, const AttendTile& tile, int64_t start, int64_t count, KeyBlock<Element>& block) {
  const Element* k = static_cast<const Element*>(args.k) + tile.key_head * args.k_head;
  const Element* v = static_cast<const Element*>(args.v) + tile.key_head * args.v_head;
  if (args.page_table == nullptr) {
    for (int64_t j = 0; j < count; ++j) {
      block.k[j] = k + (tile.first_key + start + j) * args.k_token;
      block.v[j] = v + (tile.first_key + start + j) * args.v_token;
    }
    return;
  }
  const int32_t* pages = args.page_table + tile.request * args.table_row;
  int64_t column = start / args.page_size, offset = start - column * args.page_size;
  for (int64_t j = 0; j < count; ++column, offset = 0) {
    const int64_t page = pages[column * args.table_column];
    const bool exists = page >= 0 && page < args.num_pages;
    const int64_t left = args.page_size - offset, take = left < count - j ? left : count - j;
    const Element* key = exists ? k + page * args.k_page + offset * args.k_token : nullptr;
    const Element* value = exists ? v + page * args.v_page + offset * args.v_token : nullptr;
    for (int64_t i = 0; i < take; ++i, ++j) {
      block.k[j] = exists ? key + i * args.k_token : nullptr;
      block.v[j] = exists ? value + i * args.v_token : nullptr;
    }
  }
}

#ifdef __AVX512F__
// 16 rows of float32: 16 of their columns turned over. Quarters of rows go to their places while they are loaded, so that half of
// the shuffles of `transpose` are left.
inline void turn_rows(const float* const* rows, int64_t d, float* keys) {
  const auto low = [](__m512 a, __m512 b) { return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
  const auto high = [](__m512 a, __m512 b) { return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
  for (int64_t c = 0; c < 16; c += 4) {
    __m512 part[4];
    for (int i = 0; i < 4; ++i) {
      part[i] = _mm512_castps128_ps512(_mm_loadu_ps(rows[i] + d + c));
      part[i] = _mm512_mask_broadcast_f32x4(part[i], 0x00F0, _mm_loadu_ps(rows[4 + i] + d + c));
      part[i] = _mm512_mask_broadcast_f32x4(part[i], 0x0F00, _mm_loadu_ps(rows[8 + i] + d + c));
      part[i] = _mm512_mask_broadcast_f32x4(part[i], 0xF000, _mm_loadu_ps(rows[12 + i] + d + c));
    }
    const __m512 t0 = _mm512_unpacklo_ps(part[0], part[1]), t1 = _mm512_unpackhi_ps(part[0], part[1]);
    const __m512 t2 = _mm512_unpacklo_ps(part[2], part[3]), t3 = _mm512_unpackhi_ps(part[2], part[3]);
    store(keys + (d + c) * kKeyBlock, low(t0, t2));
    store(keys + (d + c + 1) * kKeyBlock, high(t0, t2));
    store(keys + (d + c + 2) * kKeyBlock, low(t1, t3));
    store(keys + (d + c + 3) * kKeyBlock, high(t1, t3));
  }
}
#endif

// keys[d][j] = element d of key j, in groups of kWidth keys; zeros for keys that do not exist and beyond `count`.
template <Number Type>
void turn_keys(const KeyBlock<typename Cached<Type>::Element>& block, int64_t count, int64_t dim, float* keys) {
  for (int64_t j = 0; j < count; j += kWidth) {
#ifdef __AVX512F__
    if constexpr (Type == Number::kFloat) {
      bool whole = dim % kWidth == 0 && j + kWidth <= count;
      for (int64_t i = 0; whole && i < kWidth; ++i) whole = block.k[j + i] != nullptr;
      if (whole) {
        for (int64_t d = 0; d < dim; d += kWidth) turn_rows(block.k + j, d, keys + j);
        continue;
      }
    }
#endif
    for (int64_t d = 0; d < dim; d += kWidth) {
      const int64_t some = dim - d < kWidth ? dim - d : kWidth;
      Vec part[kWidth];
      for (int64_t i = 0; i < kWidth; ++i) {
        part[i] = j + i < count && block.k[j + i] != nullptr ? load_some<Type>(block.k[j + i] + d, some) : splat(0.0f);
      }
      transpose(part);
      for (int64_t i = 0; i < some; ++i) store(keys + (d + i) * kKeyBlock + j, part[i]);
    }
  }
}

// Logits of Rows rows and Vectors vectors of keys.
template <int Rows, int Vectors>
void score(const float* q, int64_t q_stride, const float* keys, int64_t dim, float scale, float* weights) {
  Vec sums[Rows][Vectors];
  for (int r = 0; r < Rows; ++r)
    for (int i = 0; i < Vectors; ++i) sums[r][i] = splat(0.0f);
  for (int64_t d = 0; d < dim; ++d) {
    Vec key[Vectors];
    for (int i = 0; i < Vectors; ++i) key[i] = load(keys + d * kKeyBlock + i * kWidth);
    for (int r = 0; r < Rows; ++r) {
      const Vec query = splat(q[r * q_stride + d]);
      for (int i = 0; i < Vectors; ++i) sums[r][i] = fma(query, key[i], sums[r][i]);
    }
  }
  const Vec factor = splat(scale);
  for (int r = 0; r < Rows; ++r)
    for (int i = 0; i < Vectors; ++i) store(weights + r * kKeyBlock + i * kWidth, sums[r][i] * factor);
}

template <int Rows>
void score_block(const float* q, int64_t q_stride, const float* keys, int64_t count, int64_t dim, float scale, float* weights) {
  int64_t j = 0;
  for (; j + kScoreVectors * kWidth <= count; j += kScoreVectors * kWidth) {
    score<Rows, kScoreVectors>(q, q_stride, keys + j, dim, scale, weights + j);
  }
  for (; j < count; j += kWidth) score<Rows, 1>(q, q_stride, keys + j, dim, scale, weights + j);
}

// Logits to weights, and the row's state brought up to date; returns what its sums so far are to be multiplied by.
inline float soften(float* row, RowState& state, int64_t count, float cap, const bool* absent) {
  const int64_t padded = (count + kWidth - 1) & ~(kWidth - 1);
  if (cap > 0.0f) {
    const Vec bound = splat(cap);
    for (int64_t j = 0; j < padded; j += kWidth) store(row + j, bound * tanh_of(load(row + j) / bound));
  }
  if (absent != nullptr) {
    for (int64_t j = 0; j < count; ++j)
      if (absent[j]) row[j] = kNothing;
  }
  for (int64_t j = 0; j < state.low; ++j) row[j] = kNothing;
  for (int64_t j = state.high; j < padded; ++j) row[j] = kNothing;
  Vec most = splat(kNothing);
  for (int64_t j = 0; j < padded; j += kWidth) most = maximum(most, load(row + j));
  const float block_maximum = maximum_of(most);
  const float highest = block_maximum > state.maximum ? block_maximum : state.maximum;
  if (highest == kNothing) {  // every key so far is missing
    for (int64_t j = 0; j < padded; ++j) row[j] = 0.0f;
    return 1.0f;
  }
  const Vec top = splat(highest);
  Vec total = splat(0.0f);
  for (int64_t j = 0; j < padded; j += kWidth) {
    const Vec weight = exp_of_negative(top - load(row + j));
    store(row + j, weight);
    total = total + weight;
  }
  alignas(64) float factor[kWidth];
  store(factor, exp_of_negative(splat(highest - state.maximum)));
  state.maximum = highest;
  state.sum = state.sum * factor[0] + sum_of(total);
  return factor[0];
}

// sums = sums * factor + weights * values for Rows rows, Vectors vectors of a value row from `d` on, and keys [low, high).
template <int Rows, int Vectors>
void gather(const float* weights, const float* const* values, int64_t d, int64_t low, int64_t high, const float* factors, float* sums,
            int64_t stride) {
  Vec totals[Rows][Vectors];
  for (int r = 0; r < Rows; ++r)
    for (int i = 0; i < Vectors; ++i) totals[r][i] = load(sums + r * stride + d + i * kWidth) * splat(factors[r]);
  for (int64_t j = low; j < high; ++j) {
    Vec value[Vectors];
    for (int i = 0; i < Vectors; ++i) value[i] = load(values[j] + d + i * kWidth);
    for (int r = 0; r < Rows; ++r) {
      const Vec weight = splat(weights[r * kKeyBlock + j]);
      for (int i = 0; i < Vectors; ++i) totals[r][i] = fma(weight, value[i], totals[r][i]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int i = 0; i < Vectors; ++i) store(sums + r * stride + d + i * kWidth, totals[r][i]);
}

// Rows [row, row + Rows) against the block. `all_finite` is false where values that some row does not see may be no numbers: 0 times
// those would not be 0, so that each row then goes by the keys that it sees.
template <int Rows>
void attend_rows(const AttendArgs& args, const Scratch& at, const float* const* values, const bool* absent, int64_t row, int64_t count,
                 bool all_finite) {
  const int64_t dim = args.head_dim, padded = padded_dim(dim);
  int64_t low = count, high = 0;
  for (int r = 0; r < Rows; ++r) {
    const RowState& state = at.rows[row + r];
    if (state.low >= state.high) continue;
    if (state.low < low) low = state.low;
    if (state.high > high) high = state.high;
  }
  if (low >= high) return;
  float* weights = at.weights + row * kKeyBlock;
  float* sums = at.sums + row * padded;
  score_block<Rows>(at.q + row * padded, padded, at.keys, high, dim, args.scale, weights);
  float factors[Rows];
  for (int r = 0; r < Rows; ++r) {
    RowState& state = at.rows[row + r];
    factors[r] = 1.0f;
    if (state.low < state.high) {
      factors[r] = soften(weights + r * kKeyBlock, state, high, args.cap, absent);
    } else {
      for (int64_t j = low; j < high; ++j) weights[r * kKeyBlock + j] = 0.0f;
    }
  }
  const auto pass = [&]<int kRows>(int first, int64_t from, int64_t to) {
    int64_t d = 0;
    for (; d + kValueVectors * kWidth <= padded; d += kValueVectors * kWidth) {
      gather<kRows, kValueVectors>(weights + first * kKeyBlock, values, d, from, to, factors + first, sums + first * padded, padded);
    }
    for (; d < padded; d += kWidth) {
      gather<kRows, 1>(weights + first * kKeyBlock, values, d, from, to, factors + first, sums + first * padded, padded);
    }
  };
  if (all_finite) {
    pass.template operator()<Rows>(0, low, high);
  } else {
    for (int r = 0; r < Rows; ++r) pass.template operator()<1>(r, at.rows[row + r].low, at.rows[row + r].high);
  }
}

inline bool are_finite(const float* const* values, int64_t count, int64_t padded) {
  Vec largest = splat(0.0f);
  // x - x is 0 for a number and NaN else; a sum with one NaN is NaN.
  for (int64_t j = 0; j < count; ++j)
    for (int64_t d = 0; d < padded; d += kWidth) {
      const Vec value = load(values[j] + d);
      largest = largest + (value - value);
    }
  return sum_of(largest) == 0.0f;
}

template <Number Type>
void attend_blocks(const AttendArgs& args, const AttendTile& tile, const Scratch& at, int64_t num_rows, int64_t first, int64_t last) {
  using Element = typename Cached<Type>::Element;
  const int64_t dim = args.head_dim, padded = padded_dim(dim);
  const bool in_place = Type == Number::kFloat && dim == padded;
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
  KeyBlock<Element> blocks[2];
  const float* values[kKeyBlock];
  const auto count_at = [&](int64_t start) { return last - start < kKeyBlock ? last - start : kKeyBlock; };
  int64_t start = first / kKeyBlock * kKeyBlock;
  find_keys(args, tile, start, count_at(start), blocks[0]);
  for (int64_t turn = 0; start < last; start += kKeyBlock, turn = 1 - turn) {
    const int64_t count = count_at(start), next = start + kKeyBlock;
    const KeyBlock<Element>& block = blocks[turn];
    if (next < last) find_keys(args, tile, next, count_at(next), blocks[1 - turn]);
    bool absent[kKeyBlock];
    int64_t missing = 0;
    for (int64_t j = 0; j < count; ++j) missing += absent[j] = block.k[j] == nullptr;
    if (missing == count) continue;
    // Values, and the keys of the next block, are asked for ahead: with pages in any order and heads side by side, hardware does not
    // guess them.
    for (int64_t j = 0; j < count; ++j)
      for (int64_t d = 0; d < dim; d += kLine) __builtin_prefetch(block.v[j] + d);
    turn_keys<Type>(block, count, dim, at.keys);
    for (int64_t j = 0; next < last && j < count_at(next); ++j)
      for (int64_t d = 0; d < dim; d += kLine) __builtin_prefetch(blocks[1 - turn].k[j] + d);
    for (int64_t j = 0; j < count; ++j) {
      if (block.v[j] == nullptr) {
        values[j] = at.zeros;
      } else if (in_place) {
        values[j] = reinterpret_cast<const float*>(block.v[j]);
      } else {
        float* to = at.values + j * padded;
        for (int64_t d = 0; d < dim; d += kWidth) store(to + d, load_some<Type>(block.v[j] + d, dim - d < kWidth ? dim - d : kWidth));
        values[j] = to;
      }
    }
    // What each row sees of the block.
    bool partial = false;
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t position = tile.position + row / tile.heads;
      int64_t low = args.window > 0 ? position - args.window + 1 - start : 0;
      int64_t high = args.causal ? position + 1 - start : count;
      if (low < 0) low = 0;
      if (high > count) high = count;
      RowState& state = at.rows[row];
      state.low = static_cast<int32_t>(low < high ? low : 0);
      state.high = static_cast<int32_t>(low < high ? high : 0);
      partial |= state.low > 0 || state.high < count;
    }
    const bool all_finite = !partial || are_finite(values, count, padded);
    int64_t row = 0;
    const auto run = [&]<int kRows>() {
      attend_rows<kRows>(args, at, values, missing > 0 ? absent : nullptr, row, count, all_finite);
      row += kRows;
    };
    while (num_rows - row >= kScoreRows) run.template operator()<kScoreRows>();
    if (num_rows - row >= 4) run.template operator()<4>();
    if (num_rows - row == 3) run.template operator()<3>();
    if (num_rows - row == 2) run.template operator()<2>();
    while (row < num_rows) run.template operator()<1>();
  }
}

template <Number Type>
void attend_keys(const AttendArgs& args, const AttendTile& tile, float* memory) {
  const int64_t dim = args.head_dim, padded = padded_dim(dim), num_rows = tile.tokens * tile.heads;
  const Scratch at(memory, padded);
  for (int64_t i = 0; i < padded; ++i) at.zeros[i] = 0.0f;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t token = tile.first_row + row / tile.heads, head = tile.first_head + row % tile.heads;
    const int64_t from = token * args.q_row + head * args.q_head;
    float* q = at.q + row * padded;
    convert(static_cast<const uint8_t*>(args.q) + from * (args.q_type == Number::kFloat ? 4 : 2), args.q_type, q, Number::kFloat, dim);
    for (int64_t d = 0; d < padded; ++d) at.sums[row * padded + d] = 0.0f;
    // A sink is a key whose value is 0.
    at.rows[row] = args.sinks != nullptr ? RowState{args.sinks[head], 1.0f, 0, 0} : RowState{kNothing, 0.0f, 0, 0};
  }
  const int64_t end = tile.position + tile.tokens;
  const int64_t last = args.causal && end < tile.num_keys ? end : tile.num_keys;
  const int64_t first = args.window > 0 && tile.position - args.window + 1 > 0 ? tile.position - args.window + 1 : 0;
  if (first < last) attend_blocks<Type>(args, tile, at, num_rows, first, last);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t token = tile.first_row + row / tile.heads, head = tile.first_head + row % tile.heads;
    const RowState& state = at.rows[row];
    const float inverse = state.sum > 0.0f || state.sum != state.sum ? 1.0f / state.sum : 0.0f;
    const int64_t to = token * args.out_row + head * args.out_head;
    float* sums = at.sums + row * padded;
    for (int64_t d = 0; d < padded; ++d) sums[d] *= inverse;
    convert(sums, Number::kFloat, static_cast<uint8_t*>(args.out) + to * (args.q_type == Number::kFloat ? 4 : 2), args.q_type, dim);
    if (args.lse != nullptr) {
      args.lse[token * args.num_heads + head] = state.sum > 0.0f || state.sum != state.sum ? state.maximum + __builtin_logf(state.sum) : kNothing;
    }
  }
}

void attend(const AttendArgs& args, const AttendTile& tile, float* memory) {
  switch (args.cache_type) {
    case Number::kFloat: return attend_keys<Number::kFloat>(args, tile, memory);
    case Number::kBf16: return attend_keys<Number::kBf16>(args, tile, memory);
    case Number::kHalf: return attend_keys<Number::kHalf>(args, tile, memory);
  }
}

}  // namespace
