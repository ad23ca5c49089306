// One vector of floats, as wide as the instruction set that this translation unit is compiled for, and exp on it.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

#ifdef __AVX512F__
using Vec = __m512;
constexpr int64_t kWidth = 16;
using Tail = __mmask16;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float sum_of(Vec v) { return _mm512_reduce_add_ps(v); }
inline float maximum_of(Vec v) { return _mm512_reduce_max_ps(v); }
inline Tail tail_of(int64_t count) { return static_cast<Tail>((1u << count) - 1); }
inline Vec load(const float* p, Tail tail) { return _mm512_maskz_loadu_ps(tail, p); }
inline void store(float* p, Vec v, Tail tail) { _mm512_mask_storeu_ps(p, tail, v); }
inline Vec magnitude(Vec v) { return _mm512_abs_ps(v); }
// a where x < y, else b (b where either is NaN).
inline Vec where_less(Vec x, Vec y, Vec a, Vec b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
}
// 2^n for n in [-126, 127], n the low bits of x + 1.5 * 2^23.
inline Vec power_of_two(__m512i n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
inline __m512i integer(Vec shifted) {
  return _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4B400000));
}
inline __m512i half(__m512i n) { return _mm512_srai_epi32(n, 1); }
inline __m512i difference(__m512i a, __m512i b) { return _mm512_sub_epi32(a, b); }
#else
using Vec = __m256;
constexpr int64_t kWidth = 8;
using Tail = __m256i;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline float sum_of(Vec v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float maximum_of(Vec v) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline Tail tail_of(int64_t count) {
  const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), places);
}
inline Vec load(const float* p, Tail tail) { return _mm256_maskload_ps(p, tail); }
inline void store(float* p, Vec v, Tail tail) { _mm256_maskstore_ps(p, tail, v); }
inline Vec magnitude(Vec v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
inline Vec where_less(Vec x, Vec y, Vec a, Vec b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ)); }
inline Vec power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline __m256i integer(Vec shifted) {
  return _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4B400000));
}
inline __m256i half(__m256i n) { return _mm256_srai_epi32(n, 1); }
inline __m256i difference(__m256i a, __m256i b) { return _mm256_sub_epi32(a, b); }
#endif

// exp(-x) for x >= 0, about one unit in the last place; NaN stays NaN, and beyond 105 the result is 0, as it is in float32.
//
// exp(-x) = 2^n * exp(r) with n = round(-x / ln 2) and |r| <= ln 2 / 2, where eight terms of the power series are enough:
// the first one that is left out is below 6e-9. ln 2 is subtracted in two parts, the first of which n multiplies exactly.
inline Vec exp_of_negative(Vec x) {
  const Vec limit = splat(105.0f);
  const Vec y = splat(0.0f) - where_less(limit, x, limit, x);
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = fma(y, splat(1.44269504f), shift);
  const Vec n = shifted - shift;
  Vec r = fma(n, splat(-0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec series = splat(1.0f / 5040);
  series = fma(series, r, splat(1.0f / 720));
  series = fma(series, r, splat(1.0f / 120));
  series = fma(series, r, splat(1.0f / 24));
  series = fma(series, r, splat(1.0f / 6));
  series = fma(series, r, splat(0.5f));
  series = fma(series, r, splat(1.0f));
  series = fma(series, r, splat(1.0f));
  // In two factors: 2^-151 alone is no float, and results below 2^-126 are rounded once.
  const auto exponent = integer(shifted);
  const auto first = half(exponent);
  return series * power_of_two(first) * power_of_two(difference(exponent, first));
}

// tanh: the power series near 0, where the other form would lose digits; else from exp(-2|x|).
inline Vec tanh_of(Vec x) {
  const Vec one = splat(1.0f), square = x * x, size = magnitude(x);
  Vec series = splat(-1382.0f / 155925);
  series = fma(series, square, splat(62.0f / 2835));
  series = fma(series, square, splat(-17.0f / 315));
  series = fma(series, square, splat(2.0f / 15));
  series = fma(series, square, splat(-1.0f / 3));
  series = fma(series * square, x, x);
  const Vec decay = exp_of_negative(size + size);
  const Vec far = (one - decay) / (one + decay);
  return where_less(size, splat(0.35f), series, where_less(x, splat(0.0f), splat(0.0f) - far, far));
}

}  // namespace
