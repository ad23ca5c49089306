// Holds the products of one instruction set against another's: the same bits are promised.
#pragma once

#include "kernels.h"

namespace tokenspeed_cpu {

bool same_products(const QuantizedTable& one, const QuantizedTable& other);

}  // namespace tokenspeed_cpu
