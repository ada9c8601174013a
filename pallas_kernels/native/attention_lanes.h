// What attention of single queries asks of vectors: 32 elements at a time, and sums over lanes of many rows.
#pragma once

#include "isa.h"

namespace jaxserve {

// Two vectors of 32 consecutive elements: of bfloat16 those in even and those in odd places, which takes one
// operation each, else the first and the second half.
struct Pair { Floats x, y; };

template <typename T>
constexpr bool kAlternate = false;
template <>
constexpr bool kAlternate<BFloat16> = true;

template <typename T>
inline Pair load_pair(const T* p) { return {load(p), load(p + 16)}; }

#if defined(JAXSERVE_AVX512_VNNI)

template <>
inline Pair load_pair(const BFloat16* p) {
  const __m512i words = _mm512_loadu_si512(p);
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
}
// Elements of even and of odd places, put in order.
inline Pair interleave(Pair p) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return {{_mm512_permutex2var_ps(p.x.v, low, p.y.v)}, {_mm512_permutex2var_ps(p.x.v, high, p.y.v)}};
}

// A sum in parts; `four_sums` has those of four, in parts still, and `all_sums` has all of sixteen.
struct Parts { __m512 v; };

inline Parts no_parts() { return {_mm512_setzero_ps()}; }
inline Parts add_products(Parts sum, Floats a, Floats b) { return {_mm512_fmadd_ps(a.v, b.v, sum.v)}; }
inline Parts four_sums(Parts a, Parts b, Parts c, Parts d) {
  const auto two = [](__m512 x, __m512 y) {  // in each 128 bits: two parts of x, two of y
    return _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, x, y), _mm512_shuffle_ps(x, y, 0x4e));
  };
  const __m512 x = two(a.v, b.v), y = two(c.v, d.v);
  return {_mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd))};
}
inline Floats all_sums(const Parts (&fours)[4]) {
  const auto two = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  return {two(two(fours[0].v, fours[1].v), two(fours[2].v, fours[3].v))};
}

#else

template <>
inline Pair load_pair(const BFloat16* p) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i* words = reinterpret_cast<const __m256i*>(p);
  const __m256i a = _mm256_loadu_si256(words), b = _mm256_loadu_si256(words + 1);
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(a, mask)), _mm256_castsi256_ps(_mm256_and_si256(b, mask))}};
}
inline Pair interleave(Pair p) {
  const auto sixteen = [](__m256 even, __m256 odd) -> Floats {
    const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
  };
  return {sixteen(p.x.a, p.y.a), sixteen(p.x.b, p.y.b)};
}

struct Parts { __m256 v; };

inline Parts no_parts() { return {_mm256_setzero_ps()}; }
inline Parts add_products(Parts sum, Floats a, Floats b) {
  return {_mm256_fmadd_ps(a.b, b.b, _mm256_fmadd_ps(a.a, b.a, sum.v))};
}
inline Parts four_sums(Parts a, Parts b, Parts c, Parts d) {
  const auto two = [](__m256 x, __m256 y) {
    return _mm256_add_ps(_mm256_blend_ps(x, y, 0xcc), _mm256_shuffle_ps(x, y, 0x4e));
  };
  const __m256 x = two(a.v, b.v), y = two(c.v, d.v);
  return {_mm256_add_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd))};
}
inline Floats all_sums(const Parts (&fours)[4]) {
  const auto two = [](__m256 x, __m256 y) {
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  };
  return {two(fours[0].v, fours[1].v), two(fours[2].v, fours[3].v)};
}

#endif

}  // namespace jaxserve
