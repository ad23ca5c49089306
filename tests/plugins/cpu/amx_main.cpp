// Exit status 0 where tiles give the bits that AVX512_VNNI gives.
#include "same_products.h"

int main() {
  using namespace tokenspeed_cpu;
  return same_products(kAmx.quantized, kAvx512Vnni.quantized) ? 0 : 1;
}
