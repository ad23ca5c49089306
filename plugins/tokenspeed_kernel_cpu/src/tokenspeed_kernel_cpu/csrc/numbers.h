// Vectors of float32 from and to the 16-bit formats. The tail of a row is never read or written beyond its end.
#pragma once

#include <cstring>

#include "attend_args.h"
#include "vector.h"

namespace {

using namespace tokenspeed_cpu;

template <Number Type>
struct Cached;

template <>
struct Cached<Number::kFloat> {
  using Element = float;
  static Vec load_at(const float* p) { return load(p); }
};

template <>
struct Cached<Number::kBf16> {
  using Element = uint16_t;
#ifdef __AVX512F__
  static Vec load_at(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
#else
  static Vec load_at(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
#endif
};

template <>
struct Cached<Number::kHalf> {
  using Element = uint16_t;
#ifdef __AVX512F__
  static Vec load_at(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
#else
  static Vec load_at(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
#endif
};

// The first `count` numbers of a vector, and zeros.
template <Number Type>
inline Vec load_some(const typename Cached<Type>::Element* p, int64_t count) {
  if (count >= kWidth) return Cached<Type>::load_at(p);
  typename Cached<Type>::Element some[kWidth] = {};
  std::memcpy(some, p, static_cast<size_t>(count) * sizeof(some[0]));
  return Cached<Type>::load_at(some);
}

// kWidth numbers, rounded to nearest even.
#ifdef __AVX512F__
inline __m256i to_bf16(Vec v) {
  const __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16));
}
inline void store_halves(uint16_t* to, Vec v, Number type) {
  const __m256i halves = type == Number::kBf16 ? to_bf16(v) : _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
#else
inline __m128i to_bf16(Vec v) {
  const __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
inline void store_halves(uint16_t* to, Vec v, Number type) {
  const __m128i halves = type == Number::kBf16 ? to_bf16(v) : _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}
#endif

// Copy numbers from one type to another.
inline void convert(const void* from, Number from_type, void* to, Number to_type, int64_t count) {
  const int64_t width = from_type == Number::kFloat ? 4 : 2;
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<size_t>(count * width));
    return;
  }
  for (int64_t i = 0; i < count; i += kWidth) {
    const int64_t some = count - i < kWidth ? count - i : kWidth;
    const Vec part = from_type == Number::kFloat  ? load_some<Number::kFloat>(static_cast<const float*>(from) + i, some)
                     : from_type == Number::kBf16 ? load_some<Number::kBf16>(static_cast<const uint16_t*>(from) + i, some)
                                                  : load_some<Number::kHalf>(static_cast<const uint16_t*>(from) + i, some);
    if (to_type == Number::kFloat) {
      store(static_cast<float*>(to) + i, part, tail_of(some));
    } else if (some == kWidth) {
      store_halves(static_cast<uint16_t*>(to) + i, part, to_type);
    } else {
      uint16_t halves[kWidth];
      store_halves(halves, part, to_type);
      std::memcpy(static_cast<uint16_t*>(to) + i, halves, static_cast<size_t>(some) * 2);
    }
  }
}

// kWidth rows of kWidth numbers: column j of row i goes to place i of row j.
#ifdef __AVX512F__
inline void transpose(Vec* r) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  const auto low = [](__m512 a, __m512 b) { return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
  const auto high = [](__m512 a, __m512 b) { return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
  for (int i = 0; i < 16; i += 4) {
    r[i] = low(t[i], t[i + 2]);
    r[i + 1] = high(t[i], t[i + 2]);
    r[i + 2] = low(t[i + 1], t[i + 3]);
    r[i + 3] = high(t[i + 1], t[i + 3]);
  }
  // r[4 g + c] holds, in its four quarters, columns c, 4 + c, 8 + c, 12 + c of rows 4 g .. 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512 a = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xDD), e = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xDD);
    t[c] = _mm512_shuffle_f32x4(a, b, 0x88);
    t[8 + c] = _mm512_shuffle_f32x4(a, b, 0xDD);
    t[4 + c] = _mm512_shuffle_f32x4(d, e, 0x88);
    t[12 + c] = _mm512_shuffle_f32x4(d, e, 0xDD);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}
#else
inline void transpose(Vec* r) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}
#endif

}  // namespace
