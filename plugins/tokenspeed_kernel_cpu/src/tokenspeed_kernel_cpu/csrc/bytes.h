// Dot products of bytes, as wide as the instruction set that this translation unit is compiled for.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "vector.h"

namespace {

inline int32_t word_at(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

#ifdef __AVX512F__
using Ints = __m512i;

inline Ints load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline Ints splat_word(int32_t word) { return _mm512_set1_epi32(word); }
inline Ints splat_byte(char byte) { return _mm512_set1_epi8(byte); }
inline Ints low_nibbles(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline Vec to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Vec load_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline Vec load_bf16(const void* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))), 16));
}
inline Vec load_u8(const void* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints add16(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
inline Ints pairs(Ints unsigned_bytes, Ints signed_bytes) { return _mm512_maddubs_epi16(unsigned_bytes, signed_bytes); }
inline Ints widen(Ints sixteen) { return _mm512_madd_epi16(sixteen, _mm512_set1_epi16(1)); }
inline Ints flip_sign_bits(Ints v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }
inline Ints magnitudes(Ints v) { return _mm512_abs_epi8(v); }
using Signs = __mmask64;
inline Signs signs_of(Ints v) { return _mm512_movepi8_mask(v); }
inline Ints with_signs(Ints v, Signs signs) { return _mm512_mask_sub_epi8(v, signs, _mm512_setzero_si512(), v); }
#else
using Ints = __m256i;

inline Ints load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Ints splat_word(int32_t word) { return _mm256_set1_epi32(word); }
inline Ints splat_byte(char byte) { return _mm256_set1_epi8(byte); }
inline Ints low_nibbles(Ints v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Ints high_nibbles(Ints v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
inline Vec to_float(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Vec load_half(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline Vec load_bf16(const void* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))), 16));
}
inline Vec load_u8(const void* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)))); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints add16(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
inline Ints pairs(Ints unsigned_bytes, Ints signed_bytes) { return _mm256_maddubs_epi16(unsigned_bytes, signed_bytes); }
inline Ints widen(Ints sixteen) { return _mm256_madd_epi16(sixteen, _mm256_set1_epi16(1)); }
inline Ints flip_sign_bits(Ints v) { return _mm256_xor_si256(v, _mm256_set1_epi8(-128)); }
inline Ints magnitudes(Ints v) { return _mm256_abs_epi8(v); }
using Signs = __m256i;
inline Signs signs_of(Ints v) { return v; }
inline Ints with_signs(Ints v, Signs signs) { return _mm256_sign_epi8(v, signs); }
#endif

#ifdef __AVX512VNNI__
inline Ints dot(Ints sum, Ints unsigned_bytes, Ints signed_bytes) { return _mm512_dpbusd_epi32(sum, unsigned_bytes, signed_bytes); }
#endif

}  // namespace
