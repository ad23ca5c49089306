// Kernels that go over rows: norm, SwiGLU, rope. Each row is computed alone, so that a result does not depend on its batch.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

using namespace tokenspeed_cpu;

inline float* row_of(const Rows& rows, int64_t row) {
  return rows.data + (row / rows.inner) * rows.outer_stride + (row % rows.inner) * rows.inner_stride;
}

void rms_norm(const NormArgs& args, int64_t row) {
  const int64_t columns = args.columns, whole = columns & ~(kWidth - 1);
  const Tail tail = tail_of(columns - whole);
  const float* x = row_of(args.x, row);
  float* out = args.out + row * columns;
  Vec squares = splat(0.0f), more = splat(0.0f);
  if (args.residual.data != nullptr) {
    const float* residual = row_of(args.residual, row);
    float* sum = args.sum + row * columns;
    int64_t i = 0;
    for (; i < whole; i += kWidth) {
      const Vec total = load(x + i) + load(residual + i);
      store(sum + i, total);
      squares = fma(total, total, squares);
    }
    if (i < columns) {
      const Vec total = load(x + i, tail) + load(residual + i, tail);
      store(sum + i, total, tail);
      more = total * total;
    }
    x = sum;
  } else {
    int64_t i = 0;
    for (; i < whole; i += kWidth) squares = fma(load(x + i), load(x + i), squares);
    if (i < columns) more = load(x + i, tail) * load(x + i, tail);
  }
  const float mean = sum_of(squares + more) / static_cast<float>(columns);
  const Vec scale = splat(1.0f / __builtin_sqrtf(mean + args.eps));
  int64_t i = 0;
  for (; i < whole; i += kWidth) store(out + i, load(x + i) * scale * load(args.weight + i));
  if (i < columns) store(out + i, load(x + i, tail) * scale * load(args.weight + i, tail), tail);
}

// gate / (1 + exp(-gate)) from exp(-|gate|), which does not overflow.
inline Vec silu(Vec gate) {
  const Vec one = splat(1.0f), decay = exp_of_negative(magnitude(gate));
  return where_less(gate, splat(0.0f), gate * decay, gate) / (one + decay);
}

void silu_and_mul(const SiluArgs& args, int64_t row) {
  const int64_t inner = args.inner, whole = inner & ~(kWidth - 1);
  const float* gate = row_of(args.gate_up, row);
  const float* up = gate + inner;
  float* out = args.out + row * inner;
  int64_t i = 0;
  for (; i < whole; i += kWidth) store(out + i, silu(load(gate + i)) * load(up + i));
  if (i < inner) {
    const Tail tail = tail_of(inner - i);
    store(out + i, silu(load(gate + i, tail)) * load(up + i, tail), tail);
  }
}

void rotate_halves(const float* in, float* out, const float* cos, const float* sin, int64_t pairs) {
  int64_t i = 0;
  for (; i + kWidth <= pairs; i += kWidth) {
    const Vec a = load(in + i), b = load(in + pairs + i), c = load(cos + i), s = load(sin + i);
    store(out + i, a * c - b * s);
    store(out + pairs + i, b * c + a * s);
  }
  if (i < pairs) {
    const Tail tail = tail_of(pairs - i);
    const Vec a = load(in + i, tail), b = load(in + pairs + i, tail), c = load(cos + i, tail), s = load(sin + i, tail);
    store(out + i, a * c - b * s, tail);
    store(out + pairs + i, b * c + a * s, tail);
  }
}

void rotate_neighbours(const float* in, float* out, const float* cos, const float* sin, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = in[2 * i], b = in[2 * i + 1];
    out[2 * i] = a * cos[i] - b * sin[i];
    out[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

void apply_rope(const RopeArgs& args, int64_t token) {
  const int64_t at = token * args.position_stride;
  const int64_t position = args.wide_positions ? static_cast<const int64_t*>(args.positions)[at]
                                               : static_cast<const int32_t*>(args.positions)[at];
  const int64_t pairs = args.rotary_dim / 2;
  const float* cos = args.cos_sin + position * args.rotary_dim;
  const float* sin = cos + pairs;
  for (const Heads& part : args.parts) {
    for (int64_t head = 0; head < part.num_heads; ++head) {
      const float* in = part.in + token * part.in_token + head * part.in_head;
      float* out = part.out + token * part.out_token + head * part.out_head;
      if (args.interleaved) {
        rotate_neighbours(in, out, cos, sin, pairs);
      } else {
        rotate_halves(in, out, cos, sin, pairs);
      }
      if (in == out) continue;
      for (int64_t i = args.rotary_dim; i < args.head_dim; ++i) out[i] = in[i];
    }
  }
}

}  // namespace
