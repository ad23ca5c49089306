// Attention of one query row to its paged keys, read where they lie: no gather, no logits in memory beyond a block.
//
// Source: online softmax arXiv:1805.02867; paging arXiv:2309.06180; grouped queries arXiv:2305.13245.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

using namespace tokenspeed_cpu;

constexpr int64_t kBlock = 32;  // keys between two updates of the running maximum
constexpr float kNothing = -__builtin_inff();

// Offsets of the next keys that exist, in elements.
struct Block {
  int64_t count;
  int64_t k[kBlock];
  int64_t v[kBlock];
};

// Fill `block` from key `next` on, leaving out keys on pages that are not in the cache; returns the key to go on from.
inline int64_t fill(Block& block, const DecodeArgs& args, const int32_t* pages, int64_t next, int64_t end) {
  block.count = 0;
  while (next < end && block.count < kBlock) {
    const int64_t column = next / args.page_size, offset = next - column * args.page_size;
    const int64_t page = pages[column * args.table_column];
    int64_t take = args.page_size - offset;
    if (take > end - next) take = end - next;
    if (page < 0 || page >= args.num_pages) {
      next += take;
      continue;
    }
    if (take > kBlock - block.count) take = kBlock - block.count;
    const int64_t k = page * args.k_page + offset * args.k_token, v = page * args.v_page + offset * args.v_token;
    for (int64_t i = 0; i < take; ++i) {
      block.k[block.count + i] = k + i * args.k_token;
      block.v[block.count + i] = v + i * args.v_token;
    }
    block.count += take;
    next += take;
  }
  return next;
}

struct State {
  float maximum;
  float sum;
};

// Bring the block's keys into the states and accumulators of `Queries` query heads that share a key head. The values, and the
// keys of the block after it, are asked for ahead: with pages in any order and heads side by side, hardware does not guess them.
template <int Queries>
void attend(const DecodeArgs& args, const Block& block, const Block& ahead, const float* q, const float* k, const float* v, State* states, float* out) {
  constexpr int kTile = kWidth == 16 ? 4 : 2;  // vectors of a value row that are summed at once
  const int64_t dim = args.head_dim, whole = dim & ~(kWidth - 1), count = block.count;
  const Tail tail = tail_of(dim - whole);
  alignas(64) float weights[Queries][kBlock];
  for (int64_t j = 0; j < count; ++j) {
    const float* key = k + block.k[j];
    const float* value = v + block.v[j];
    for (int64_t i = 0; i < dim; i += 16) __builtin_prefetch(value + i);
    if (j < ahead.count) {
      for (int64_t i = 0; i < dim; i += 16) __builtin_prefetch(k + ahead.k[j] + i);
    }
    Vec dots[Queries];
    for (int g = 0; g < Queries; ++g) dots[g] = splat(0.0f);
    for (int64_t i = 0; i < whole; i += kWidth) {
      const Vec part = load(key + i);
      for (int g = 0; g < Queries; ++g) dots[g] = fma(load(q + g * args.q_head + i), part, dots[g]);
    }
    if (whole < dim) {
      const Vec part = load(key + whole, tail);
      for (int g = 0; g < Queries; ++g) dots[g] = fma(load(q + g * args.q_head + whole, tail), part, dots[g]);
    }
    for (int g = 0; g < Queries; ++g) weights[g][j] = sum_of(dots[g]) * args.scale;
  }
  const int64_t padded = (count + kWidth - 1) & ~(kWidth - 1);
  Vec shrink[Queries];
  for (int g = 0; g < Queries; ++g) {
    float* row = weights[g];
    for (int64_t j = count; j < padded; ++j) row[j] = 0.0f;
    if (args.cap > 0.0f) {
      const Vec cap = splat(args.cap);
      for (int64_t j = 0; j < padded; j += kWidth) store(row + j, cap * tanh_of(load(row + j) / cap));
    }
    for (int64_t j = count; j < padded; ++j) row[j] = kNothing;
    Vec most = splat(kNothing);
    for (int64_t j = 0; j < padded; j += kWidth) most = maximum(most, load(row + j));
    const float block_maximum = maximum_of(most);
    const float highest = block_maximum > states[g].maximum ? block_maximum : states[g].maximum;
    const Vec top = splat(highest);
    Vec total = splat(0.0f);
    for (int64_t j = 0; j < padded; j += kWidth) {
      const Vec weight = exp_of_negative(top - load(row + j));
      store(row + j, weight);
      total = total + weight;
    }
    alignas(64) float factor[kWidth];
    // A first block has nothing to shrink, and an infinite difference is 0 there.
    store(factor, exp_of_negative(splat(highest - states[g].maximum)));
    states[g] = {highest, states[g].sum * factor[0] + sum_of(total)};
    shrink[g] = splat(factor[0]);
  }
  int64_t d = 0;
  for (; d + kTile * kWidth <= dim; d += kTile * kWidth) {
    Vec sums[Queries][kTile];
    for (int g = 0; g < Queries; ++g)
      for (int t = 0; t < kTile; ++t) sums[g][t] = load(out + g * args.out_head + d + t * kWidth) * shrink[g];
    for (int64_t j = 0; j < count; ++j) {
      const float* value = v + block.v[j] + d;
      for (int t = 0; t < kTile; ++t) {
        const Vec part = load(value + t * kWidth);
        for (int g = 0; g < Queries; ++g) sums[g][t] = fma(splat(weights[g][j]), part, sums[g][t]);
      }
    }
    for (int g = 0; g < Queries; ++g)
      for (int t = 0; t < kTile; ++t) store(out + g * args.out_head + d + t * kWidth, sums[g][t]);
  }
  for (; d < dim; d += kWidth) {
    const Tail rest = tail_of(dim - d < kWidth ? dim - d : kWidth);
    Vec sums[Queries];
    for (int g = 0; g < Queries; ++g) sums[g] = load(out + g * args.out_head + d, rest) * shrink[g];
    for (int64_t j = 0; j < count; ++j) {
      const Vec part = load(v + block.v[j] + d, rest);
      for (int g = 0; g < Queries; ++g) sums[g] = fma(splat(weights[g][j]), part, sums[g]);
    }
    for (int g = 0; g < Queries; ++g) store(out + g * args.out_head + d, sums[g], rest);
  }
}

void mha_decode(const DecodeArgs& args, int64_t row, int64_t first, int64_t last) {
  const int64_t group = args.num_heads / args.num_kv_heads, dim = args.head_dim;
  const int64_t first_query = first * group, num_queries = (last - first) * group;
  const float* q = args.q + row * args.q_row + first_query * args.q_head;
  float* out = args.out + row * args.out_row + first_query * args.out_head;
  State* states = static_cast<State*>(__builtin_alloca(static_cast<size_t>(num_queries) * sizeof(State)));
  for (int64_t h = 0; h < num_queries; ++h) {
    // A sink is a key whose value is 0.
    states[h] = args.sinks != nullptr ? State{args.sinks[first_query + h], 1.0f} : State{kNothing, 0.0f};
    for (int64_t i = 0; i < dim; ++i) out[h * args.out_head + i] = 0.0f;
  }
  const int64_t length = args.seq_lens[row * args.seq_len_stride];
  const int32_t* pages = args.page_table + row * args.table_row;
  bool any = false;
  Block blocks[2];
  int64_t next = args.window > 0 && length > args.window ? length - args.window : 0;
  next = fill(blocks[0], args, pages, next, length);
  for (int64_t turn = 0; blocks[turn].count > 0; turn = 1 - turn) {
    const Block& block = blocks[turn];
    const Block& ahead = blocks[1 - turn];
    next = fill(blocks[1 - turn], args, pages, next, length);
    any = true;
    for (int64_t head = first; head < last; ++head) {
      const float* k = args.k + head * args.k_head;
      const float* v = args.v + head * args.v_head;
      for (int64_t g = 0; g < group;) {
        const int64_t h = (head - first) * group + g, left = group - g;
        const float* query = q + h * args.q_head;
        float* sums = out + h * args.out_head;
        if (left >= 4) {
          attend<4>(args, block, ahead, query, k, v, states + h, sums);
          g += 4;
        } else if (left == 3) {
          attend<3>(args, block, ahead, query, k, v, states + h, sums);
          g += 3;
        } else if (left == 2) {
          attend<2>(args, block, ahead, query, k, v, states + h, sums);
          g += 2;
        } else {
          attend<1>(args, block, ahead, query, k, v, states + h, sums);
          g += 1;
        }
      }
    }
  }
  for (int64_t h = 0; h < num_queries; ++h) {
    if (any) {
      const float inverse = 1.0f / states[h].sum;
      for (int64_t i = 0; i < dim; ++i) out[h * args.out_head + i] *= inverse;
    }
    if (args.lse != nullptr) {
      const bool nothing = !any && args.sinks == nullptr;
      args.lse[row * args.num_heads + first_query + h] =
          nothing ? kNothing : states[h].maximum + __builtin_logf(states[h].sum);
    }
  }
}

}  // namespace
