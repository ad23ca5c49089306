// The binding of the products with quantized weights.
#include "linear.h"

#include <nanobind/nanobind.h>

#include "binding.h"

namespace nb = nanobind;

namespace tokenspeed_cpu {
namespace {

// A weight in panels, or in its file's blocks, as Python holds it: everything about a product that stays the same.
struct Weight {
  LinearArgs fixed{};
  // What was multiplied by after this weight the last time: a model goes through its weights in the same order at every step. It is
  // an address and not a Weight, because that one may be gone. Guarded, as `last` is, by the lock of the interpreter.
  mutable Upcoming next;
  static inline const Weight* last = nullptr;

  Weight(const Weight&) = delete;
  Weight& operator=(const Weight&) = delete;
  ~Weight() {
    if (last == this) last = nullptr;
  }

  Weight(int panel, bool is_stored, bool is_exact, uintptr_t data, int64_t rows, int64_t columns, int64_t row_bytes, int64_t group,
         int scale) {
    need_memory(data, rows * columns);
    fixed.panel = static_cast<Panel>(panel);
    fixed.is_stored = is_stored;
    fixed.is_exact = is_exact;
    fixed.data = at<const uint8_t>(data);
    fixed.rows = rows;
    fixed.columns = columns;
    fixed.row_bytes = row_bytes;
    fixed.scale = static_cast<Scale>(scale);
    if (fixed.panel == Panel::kInt4) {
      fixed.blocks_per_group = group / kBlockColumns;
      fixed.panel_stride = columns / group * group_bytes(fixed.scale, fixed.blocks_per_group);
    } else {
      fixed.panel_stride = is_stored ? row_bytes * kPanelRows : panel_bytes(fixed.panel, columns);
    }
  }

  void multiply(uintptr_t x, int64_t x_stride, bool x_bf16, int64_t tokens, uintptr_t bias, bool bias_bf16, uintptr_t out,
                int64_t out_stride, bool out_bf16, int threads) const {
    need_memory(x, tokens * fixed.columns);
    need_memory(out, tokens * fixed.rows);
    LinearArgs args = fixed;
    args.x = at<const void>(x);
    args.x_stride = x_stride;
    args.x_bf16 = x_bf16;
    args.tokens = tokens;
    args.bias = at<const void>(bias);
    args.bias_bf16 = bias_bf16;
    args.out = at<void>(out);
    args.out_stride = out_stride;
    args.out_bf16 = out_bf16;
    const QuantizedTable& kernels = table().quantized;
    if (last != nullptr) last->next = {fixed.data, fixed.panel_stride * ((fixed.rows + kPanelRows - 1) / kPanelRows)};
    last = this;
    args.next = next;
    nb::gil_scoped_release released;
    linear(kernels, args, threads);
  }
};

void pack_stored_rows(int stored, uintptr_t data, int64_t row_bytes, int64_t rows, int64_t columns, uintptr_t panels, int threads) {
  need_memory(data, rows * columns);
  const QuantizedTable& kernels = table().quantized;
  nb::gil_scoped_release released;
  pack_stored(kernels, static_cast<Stored>(stored), at<const uint8_t>(data), row_bytes, rows, columns, at<uint8_t>(panels), threads);
}

void pack_int4_rows(uintptr_t values, uintptr_t scales, uintptr_t zeros, int64_t rows, int64_t columns, int64_t group, int scale,
                    bool is_signed, uintptr_t panels) {
  need_memory(values, rows * columns);
  nb::gil_scoped_release released;
  pack_int4({at<const uint8_t>(values), at<const void>(scales), at<const uint8_t>(zeros), rows, columns, group,
             static_cast<Scale>(scale), is_signed},
            at<uint8_t>(panels));
}

void embedding(int stored, uintptr_t data, int64_t row_bytes, int64_t rows, int64_t columns, uintptr_t ids, bool wide_ids,
               int64_t id_stride, int64_t tokens, uintptr_t out, int64_t out_stride, bool out_bf16) {
  need_memory(out, tokens * columns);
  look_up({static_cast<Stored>(stored), at<const uint8_t>(data), row_bytes, rows, columns, at<const void>(ids), wide_ids, id_stride,
           tokens, at<void>(out), out_stride, out_bf16});
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<Weight>(m, "Weight")
      .def(nb::init<int, bool, bool, uintptr_t, int64_t, int64_t, int64_t, int64_t, int>())
      .def("multiply", &Weight::multiply);
  m.def("panel_bytes", [](int panel, int64_t columns) { return panel_bytes(static_cast<Panel>(panel), columns); });
  m.def("group_bytes", [](int scale, int64_t group) { return group_bytes(static_cast<Scale>(scale), group / kBlockColumns); });
  m.def("pack_stored", &pack_stored_rows);
  m.def("pack_int4", &pack_int4_rows);
  m.def("embedding", &embedding);
}

}  // namespace tokenspeed_cpu
