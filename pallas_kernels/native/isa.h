// Sixteen lanes of the processor's vectors, for each instruction set a kernel is compiled for.
//
// One source serves all sets: the build passes JAXSERVE_AVX2, JAXSERVE_AVX_VNNI or JAXSERVE_AVX512_VNNI.
// `Floats` are 16 floats, `Bytes` 64 bytes: 16 outputs times 4 consecutive inputs. `Dot` sums products of
// unsigned weights and signed activations; `dot` takes bytes of at most `kMaxExact` and at most 8 of them
// may follow one another before `sum`.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace jaxserve {

inline int32_t load_int(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return four;
}

#if defined(JAXSERVE_AVX512_VNNI)

constexpr int kTokensPerTile = 14;  // 14 sums, 8 registers of weights, and a few to work with, of 32
constexpr bool kDotTakesBytes = true;

struct Floats { __m512 v; };
struct Bytes { __m512i v; };
struct Dot { __m512i v; };

inline Floats zeros() { return {_mm512_setzero_ps()}; }
inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats load(const uint16_t* p) {  // float16
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline float max_lane(Floats a) { return _mm512_reduce_max_ps(a.v); }
inline float sum_lanes(Floats a) { return _mm512_reduce_add_ps(a.v); }

// Round to nearest even and store as signed bytes; |x| is at most 127.
inline Dot round_to_bytes(int8_t* p, Floats x) {
  const __m512i whole = _mm512_cvtps_epi32(x.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(whole));
  return {whole};
}
inline int32_t sum_lanes(Dot a) { return _mm512_reduce_add_epi32(a.v); }
inline Dot operator+(Dot a, Dot b) { return {_mm512_add_epi32(a.v, b.v)}; }

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes low_nibbles(Bytes b) { return {_mm512_and_si512(b.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes b) {
  return {_mm512_and_si512(_mm512_srli_epi16(b.v, 4), _mm512_set1_epi8(15))};
}
inline Dot no_dot() { return {_mm512_setzero_si512()}; }
inline Dot dot(Dot sum, Bytes weights, int32_t four) {
  return {_mm512_dpbusd_epi32(sum.v, weights.v, _mm512_set1_epi32(four))};
}
inline Floats total(Dot sum) { return {_mm512_cvtepi32_ps(sum.v)}; }

#else  // 16 registers of 256 bits: sixteen lanes are two of them

constexpr int kTokensPerTile = 4;

struct Floats { __m256 a, b; };
struct Bytes { __m256i a, b; };
struct Dot { __m256i a, b; };

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats load(const uint16_t* p) {  // float16
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Floats abs(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline float max_lane(Floats x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline float sum_lanes(Floats x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

inline Dot round_to_bytes(int8_t* p, Floats x) {
  const Dot whole = {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
  __m256i words = _mm256_packs_epi32(whole.a, whole.b);  // 4 of a, 4 of b, 4 of a, 4 of b
  words = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(low, high));
  return whole;
}
inline Dot operator+(Dot x, Dot y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline int32_t sum_lanes(Dot x) {
  const __m256i eight = _mm256_add_epi32(x.a, x.b);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 1)));
}

inline Bytes load_bytes(const uint8_t* p) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline Bytes low_nibbles(Bytes b) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(b.a, mask), _mm256_and_si256(b.b, mask)};
}
inline Bytes high_nibbles(Bytes b) {
  return low_nibbles({_mm256_srli_epi16(b.a, 4), _mm256_srli_epi16(b.b, 4)});
}
inline Dot no_dot() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Floats whole(Dot sum) { return {_mm256_cvtepi32_ps(sum.a), _mm256_cvtepi32_ps(sum.b)}; }

#if defined(JAXSERVE_AVX_VNNI)

constexpr bool kDotTakesBytes = true;

inline Dot dot(Dot sum, Bytes weights, int32_t four) {
  const __m256i x = _mm256_set1_epi32(four);
  return {_mm256_dpbusd_avx_epi32(sum.a, weights.a, x), _mm256_dpbusd_avx_epi32(sum.b, weights.b, x)};
}
inline Floats total(Dot sum) { return whole(sum); }

#else

// Pairs are summed in 16 bits, which saturate: 8 steps of nibbles reach 8 * 2 * 15 * 127 = 30,480 at most.
constexpr bool kDotTakesBytes = false;

inline Dot dot(Dot sum, Bytes weights, int32_t four) {
  const __m256i x = _mm256_set1_epi32(four);
  return {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(weights.a, x)),
          _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(weights.b, x))};
}
inline Floats total(Dot sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  return whole({_mm256_madd_epi16(sum.a, ones), _mm256_madd_epi16(sum.b, ones)});
}

#endif
#endif

}  // namespace jaxserve
