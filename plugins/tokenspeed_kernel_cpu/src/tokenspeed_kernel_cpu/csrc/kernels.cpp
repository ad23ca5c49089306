// Compiled once for each instruction set; TOKENSPEED_TABLE and TOKENSPEED_NAME say which.
#include "kernels.h"

#include "decode.h"
#include "rows.h"

namespace tokenspeed_cpu {

const KernelTable TOKENSPEED_TABLE = {TOKENSPEED_NAME, rms_norm, silu_and_mul, apply_rope, mha_decode};

}  // namespace tokenspeed_cpu
