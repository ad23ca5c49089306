// The products with quantized weights that the binding offers.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "quantized.h"

namespace tokenspeed_cpu {

// Outputs [tokens, rows] of activations [tokens, columns]; strides count elements, the last dimension is contiguous.
struct LinearArgs {
  Panel panel;
  bool is_stored;        // data is rows as in the file, unpacked on the way
  const uint8_t* data;
  int64_t panel_stride;  // bytes of 16 rows
  int64_t row_bytes;     // is_stored: bytes from one row to the next
  int64_t rows;
  int64_t columns;
  int64_t blocks_per_group;
  Scale scale;
  const void* x;
  int64_t x_stride;
  bool x_bf16;
  bool is_exact;  // x is not rounded to 8 bits
  int64_t tokens;
  const void* bias;  // null without
  bool bias_bf16;
  void* out;
  int64_t out_stride;
  bool out_bf16;
  Upcoming next;  // the weight that is multiplied by after this one, as far as is known
};

// A group-wise 4-bit weight; a byte holds an even column in its lower half, and the odd one after it.
struct Int4Args {
  const uint8_t* values;  // [rows, columns / 2], contiguous
  const void* scales;     // [rows, columns / group], contiguous
  const uint8_t* zeros;   // as scales; null where all are 8
  int64_t rows;
  int64_t columns;
  int64_t group;
  Scale scale;
  bool is_signed;  // two's complement, else offset by the zero point
};

// Into panels of columns / group * group_bytes(...) bytes each.
void pack_int4(const Int4Args& args, uint8_t* panels);

// Stored rows into panels.
void pack_stored(const QuantizedTable& kernels, Stored stored, const uint8_t* data, int64_t row_bytes, int64_t rows,
                 int64_t columns, uint8_t* panels, int threads);

// Rows `ids` of a weight as float32 or bfloat16; a row of zeros for an id outside of it.
struct LookUpArgs {
  Stored stored;
  const uint8_t* data;
  int64_t row_bytes;
  int64_t rows;
  int64_t columns;
  const void* ids;
  bool wide_ids;
  int64_t id_stride;
  int64_t tokens;
  void* out;
  int64_t out_stride;
  bool out_bf16;
};
void look_up(const LookUpArgs& args);

void linear(const QuantizedTable& kernels, const LinearArgs& args, int threads);

}  // namespace tokenspeed_cpu
