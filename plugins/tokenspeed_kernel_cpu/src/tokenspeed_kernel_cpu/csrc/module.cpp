// The binding: addresses, sizes and strides (in elements) as integers. The Python wrappers have checked what they point at.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "binding.h"
#include "parallel.h"

namespace nb = nanobind;

namespace tokenspeed_cpu {
namespace {

// Below these a second thread costs more than it saves: elements of rows.
constexpr int64_t kElementsForThreads = 64 * 1024;
constexpr int64_t kElementsAtOnce = 16 * 1024;

// Rows [0, rows) of `width` elements each, in runs that are worth a thread's while.
template <typename Body>
void for_rows(int64_t rows, int64_t width, int threads, const Body& body) {
  if (rows * width < kElementsForThreads || threads <= 1) {
    for (int64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  nb::gil_scoped_release released;
  const int64_t run = width >= kElementsAtOnce ? 1 : kElementsAtOnce / (width > 0 ? width : 1);
  parallel_for((rows + run - 1) / run, threads, [&](int64_t part) {
    const int64_t last = (part + 1) * run < rows ? (part + 1) * run : rows;
    for (int64_t row = part * run; row < last; ++row) body(row);
  });
}

void rms_norm(uintptr_t x, int64_t x_inner, int64_t x_outer_stride, int64_t x_inner_stride, uintptr_t residual,
              int64_t residual_inner, int64_t residual_outer_stride, int64_t residual_inner_stride, uintptr_t weight,
              uintptr_t out, uintptr_t sum, int64_t rows, int64_t columns, float eps, int threads) {
  need_memory(x, rows * columns);
  const NormArgs args{{at<float>(x), x_inner, x_outer_stride, x_inner_stride},
                      {at<float>(residual), residual_inner, residual_outer_stride, residual_inner_stride},
                      at<float>(out),
                      at<float>(sum),
                      at<const float>(weight),
                      columns,
                      eps};
  const KernelTable& kernels = table();
  for_rows(rows, columns, threads, [&](int64_t row) { kernels.rms_norm(args, row); });
}

void silu_and_mul(uintptr_t gate_up, int64_t inner_rows, int64_t outer_stride, int64_t inner_stride, uintptr_t out,
                  int64_t rows, int64_t inner, int threads) {
  need_memory(gate_up, rows * inner);
  const SiluArgs args{{at<float>(gate_up), inner_rows, outer_stride, inner_stride}, at<float>(out), inner};
  const KernelTable& kernels = table();
  for_rows(rows, 4 * inner, threads, [&](int64_t row) { kernels.silu_and_mul(args, row); });
}

// Returns None, or a position that the table does not have; then nothing is written.
nb::object apply_rope(uintptr_t q, uintptr_t q_out, int64_t q_heads, int64_t q_token, int64_t q_head, int64_t q_out_token,
                      int64_t q_out_head, uintptr_t k, uintptr_t k_out, int64_t k_heads, int64_t k_token, int64_t k_head,
                      int64_t k_out_token, int64_t k_out_head, uintptr_t positions, int64_t position_stride,
                      bool wide_positions, uintptr_t cos_sin, int64_t max_position, int64_t rotary_dim, int64_t head_dim,
                      bool interleaved, int64_t tokens, int threads) {
  need_memory(q, tokens * q_heads * head_dim);
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t position = wide_positions ? at<const int64_t>(positions)[token * position_stride]
                                            : at<const int32_t>(positions)[token * position_stride];
    if (position < 0 || position >= max_position) return nb::int_(position);
  }
  const RopeArgs args{{{at<const float>(q), at<float>(q_out), q_heads, q_token, q_head, q_out_token, q_out_head},
                       {at<const float>(k), at<float>(k_out), k_heads, k_token, k_head, k_out_token, k_out_head}},
                      at<const void>(positions),
                      at<const float>(cos_sin),
                      position_stride,
                      head_dim,
                      rotary_dim,
                      wide_positions,
                      interleaved};
  const KernelTable& kernels = table();
  for_rows(tokens, (q_heads + k_heads) * head_dim, threads, [&](int64_t token) { kernels.apply_rope(args, token); });
  return nb::none();
}

void argmax(uintptr_t logits, int64_t row_stride, int64_t rows, int64_t columns, uintptr_t out, int64_t out_stride, int threads) {
  need_memory(logits, rows * columns);
  const auto argmax_of = table().argmax;
  for_rows(rows, columns, threads, [&](int64_t row) {
    at<int32_t>(out)[row * out_stride] = argmax_of(at<const float>(logits) + row * row_stride, columns);
  });
}

void write_kv(uintptr_t k, int type, int64_t k_token, int64_t k_head, uintptr_t v, int64_t v_token, int64_t v_head,
              uintptr_t k_cache, int cache_type, int64_t k_page, int64_t k_slot, int64_t k_cache_head, uintptr_t v_cache,
              int64_t v_page, int64_t v_slot, int64_t v_cache_head, uintptr_t slots, int64_t slot_stride, int64_t tokens,
              int64_t num_pages, int64_t page_size, int64_t heads, int64_t head_dim) {
  need_memory(k, tokens * heads * head_dim);
  const auto convert = table().convert;
  const Number from = static_cast<Number>(type), to = static_cast<Number>(cache_type);
  const int64_t from_bytes = from == Number::kFloat ? 4 : 2, to_bytes = to == Number::kFloat ? 4 : 2;
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t slot = at<const int64_t>(slots)[token * slot_stride];
    if (slot < 0 || slot >= num_pages * page_size) continue;
    const int64_t page = slot / page_size, offset = slot - page * page_size;
    for (int64_t head = 0; head < heads; ++head) {
      convert(at<const uint8_t>(k) + (token * k_token + head * k_head) * from_bytes, from,
              at<uint8_t>(k_cache) + (page * k_page + offset * k_slot + head * k_cache_head) * to_bytes, to, head_dim);
      convert(at<const uint8_t>(v) + (token * v_token + head * v_head) * from_bytes, from,
              at<uint8_t>(v_cache) + (page * v_page + offset * v_slot + head * v_cache_head) * to_bytes, to, head_dim);
    }
  }
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.def("instruction_set", &instruction_set);
  m.def("instruction_sets", &instruction_sets);
  m.def("give_same_products", &give_same_products);
  m.def("use_instruction_set", &use_instruction_set);
  m.def("team_size", &team_size);
  m.def("rms_norm", &rms_norm);
  m.def("silu_and_mul", &silu_and_mul);
  m.def("apply_rope", &apply_rope);
  m.def("argmax", &argmax);
  m.def("write_kv", &write_kv);
  bind_attention(m);
  bind_linear(m);
}

}  // namespace tokenspeed_cpu
