// What the binding and the compiled kernels share: plain structs and a table of functions for each instruction set.
//
// kernels.cpp is compiled once for each instruction set. Only plain functions and types stand here and there: an inline
// function of the standard library, compiled with AVX-512, could be the copy that the linker keeps for everybody.
#pragma once

#include <cstdint>

#include "attend_args.h"
#include "quantized.h"

namespace tokenspeed_cpu {

// Rows of `columns` neighbouring floats; row i lies at (i / inner) * outer_stride + (i % inner) * inner_stride.
struct Rows {
  float* data;
  int64_t inner;
  int64_t outer_stride;
  int64_t inner_stride;
};

struct NormArgs {
  Rows x;
  Rows residual;  // data is null without a residual
  float* out;     // contiguous
  float* sum;     // contiguous; x + residual
  const float* weight;
  int64_t columns;
  float eps;
};

struct SiluArgs {
  Rows gate_up;
  float* out;  // contiguous
  int64_t inner;
};

// [tokens, heads, head_dim], the last dimension contiguous.
struct Heads {
  const float* in;
  float* out;
  int64_t num_heads;
  int64_t in_token, in_head, out_token, out_head;  // strides, in elements
};

struct RopeArgs {
  Heads parts[2];
  const void* positions;
  const float* cos_sin;
  int64_t position_stride;
  int64_t head_dim;
  int64_t rotary_dim;
  bool wide_positions;  // int64, else int32
  bool interleaved;
};

struct KernelTable {
  const char* name;
  void (*rms_norm)(const NormArgs&, int64_t row);
  void (*silu_and_mul)(const SiluArgs&, int64_t row);
  void (*apply_rope)(const RopeArgs&, int64_t token);
  // `memory` holds attend_scratch(head_dim) floats.
  void (*attend)(const AttendArgs&, const AttendTile&, float* memory);
  int32_t (*argmax)(const float* row, int64_t count);
  void (*convert)(const void* from, Number from_type, void* to, Number to_type, int64_t count);
  QuantizedTable quantized;
};

extern const KernelTable kAvx2;
extern const KernelTable kAvx512;
extern const KernelTable kAvx512Vnni;
extern const KernelTable kAmx;

}  // namespace tokenspeed_cpu
