// Activations rounded to 8 bits, each run of 32 with its own scale.
#pragma once

#include "bytes.h"
#include "quantized.h"

namespace {

using namespace tokenspeed_cpu;

// 16 or 8 numbers as float32.
inline Vec load_any(const void* x, int64_t i, bool bf16) {
  return bf16 ? load_bf16(static_cast<const uint16_t*>(x) + i) : load(static_cast<const float*>(x) + i);
}

#ifdef __AVX512F__
inline Ints largest_bits(Ints a, Ints b) { return _mm512_max_epu32(a, b); }
inline Ints bits_of(Vec v) { return _mm512_castps_si512(v); }
inline uint32_t largest_of(Ints v) { return _mm512_reduce_max_epu32(v); }
inline Ints nearest(Vec v) { return _mm512_cvtps_epi32(v); }
inline int32_t total_of(Ints v) { return _mm512_reduce_add_epi32(v); }
inline void store_bytes(int8_t* to, Ints v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(v)); }
#else
inline Ints largest_bits(Ints a, Ints b) { return _mm256_max_epu32(a, b); }
inline Ints bits_of(Vec v) { return _mm256_castps_si256(v); }
inline Ints nearest(Vec v) { return _mm256_cvtps_epi32(v); }
inline uint32_t largest_of(Ints v) {
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xB1))));
}
inline int32_t total_of(Ints v) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
inline void store_bytes(int8_t* to, Ints v) {
  const __m128i eight = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(eight, eight));
}
#endif

// One token: q = round(x * 127 / max|x|), ties to even. A block that holds NaN or an infinity gets the scale NaN, which reaches
// every output of the token; one whose numbers are all below 2^-100 counts as 0, because the reciprocal of its scale overflows.
void quantize(const void* x, bool bf16, const Activations& to, int64_t token) {
  constexpr int64_t kParts = kBlockColumns / kWidth;
  const int64_t blocks = to.columns / kBlockColumns;
  int8_t* values = to.values + token * to.columns;
  float* scale = to.scale + token * blocks;
  float* sum = to.sum + token * blocks;
  int32_t* half_sum = to.half_sum + token * blocks * 2;
  for (int64_t b = 0; b < blocks; ++b) {
    Vec part[kParts];
    Ints most = bits_of(splat(0.0f));
    for (int64_t i = 0; i < kParts; ++i) {
      part[i] = load_any(x, b * kBlockColumns + i * kWidth, bf16);
      most = largest_bits(most, bits_of(magnitude(part[i])));  // as integers, in which NaN is the largest
    }
    const uint32_t bits = largest_of(most);
    float largest;
    std::memcpy(&largest, &bits, 4);
    const bool finite = bits < 0x7F800000u, tiny = bits < 0x0D800000u;
    const float step = !finite ? __builtin_nanf("") : tiny ? 0.0f : largest / 127.0f;
    const Vec inverse = splat(!finite || tiny ? 0.0f : 127.0f / largest);
    int32_t halves[2] = {0, 0};
    for (int64_t i = 0; i < kParts; ++i) {
      const Ints q = nearest(finite ? part[i] * inverse : splat(0.0f));
      store_bytes(values + b * kBlockColumns + i * kWidth, q);
      halves[i * kWidth / 16] += total_of(q);
    }
    scale[b] = step;
    sum[b] = step * static_cast<float>(halves[0] + halves[1]);
    half_sum[2 * b] = halves[0];
    half_sum[2 * b + 1] = halves[1];
  }
}

}  // namespace
