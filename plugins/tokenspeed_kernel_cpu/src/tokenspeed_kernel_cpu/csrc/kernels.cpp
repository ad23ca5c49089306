// Compiled once for each instruction set; TOKENSPEED_TABLE and TOKENSPEED_NAME say which.
#include "kernels.h"

#include "argmax.h"
#include "attend.h"
#include "multiply_exact.h"
#include "multiply_rows.h"
#include "round.h"
#include "rows.h"
#include "unpack.h"

namespace tokenspeed_cpu {

const KernelTable TOKENSPEED_TABLE = {
    TOKENSPEED_NAME,
    rms_norm,
    silu_and_mul,
    apply_rope,
    attend,
    argmax,
    convert,
    {quantize,
     {multiply<Panel::kQ4_0>, multiply<Panel::kQ4_1>, multiply<Panel::kQ8_0>, multiply<Panel::kQ4_K>, multiply<Panel::kQ6_K>,
      multiply<Panel::kInt4>},
     {multiply_exact<Panel::kQ4_0>, multiply_exact<Panel::kQ4_1>, multiply_exact<Panel::kQ8_0>, multiply_exact<Panel::kQ4_K>,
      multiply_exact<Panel::kQ6_K>, multiply_exact<Panel::kInt4>},
     {unpack_q4_0, unpack_q4_1, unpack_q8_0, unpack_q4_k, unpack_q6_k},
     kMultiplyRows},
};

}  // namespace tokenspeed_cpu
