// Sixteen lanes of the processor's vectors, for each instruction set a kernel is compiled for.
//
// One source serves all sets: the build passes JAXSERVE_AVX2, JAXSERVE_AVX_VNNI or JAXSERVE_AVX512_VNNI.
// `Floats` are 16 floats, `Bytes` 64 bytes: 16 outputs times 4 consecutive inputs. `Dot` sums products of
// unsigned weights and signed activations, of which `Four` has the same four for all outputs: weights of 8 bits
// where `kDotTakesBytes`, else of 4, and at most 8 of them before `total`.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace jaxserve {

struct BFloat16 { uint16_t bits; };

inline int32_t load_int(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return four;
}
constexpr int32_t kOnes = 0x01010101;

// Asks for the line of memory, wherever that is.
inline void prefetch_bytes(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

#if defined(JAXSERVE_AVX512_VNNI)

constexpr int kTokensPerTile = 8, kBlocksPerTile = 2;  // 16 sums, or 18, and a few to work with, of 32 registers
constexpr bool kDotTakesBytes = true;

struct Floats { __m512 v; };
struct Bytes { __m512i v; };
struct Four { __m512i v; };
struct Dot { __m512i v; };

inline Floats zeros() { return {_mm512_setzero_ps()}; }
inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats load(const uint16_t* p) {  // float16
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Floats load(const BFloat16* p) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
}
inline Floats load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline float max_lane(Floats a) { return _mm512_reduce_max_ps(a.v); }
inline float sum_lanes(Floats a) { return _mm512_reduce_add_ps(a.v); }
inline Floats round_even(Floats a) { return {_mm512_roundscale_ps(a.v, 8)}; }  // no exceptions
// 2^a for a whole number in [-127, 127]; 2^-127 is 0.
inline Floats power_of_two(Floats a) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
inline Floats where_less(Floats a, Floats b, Floats yes, Floats no) {  // a < b ? yes : no
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline Floats with_sign_of(Floats a, Floats sign) {  // a is not negative
  const __m512 mask = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(a.v, _mm512_and_ps(sign.v, mask))};
}
// Columns in place of rows.
inline void transpose(Floats (&x)[16]) {
  __m512 pairs[16], fours[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
    pairs[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  // fours[4 g + k], part p of 4 lanes: column 4 p + k of rows 4 g to 4 g + 3.
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const int first = i / 4 * 4 + i % 4 / 2;
    const __m512d low = _mm512_castps_pd(pairs[first]), high = _mm512_castps_pd(pairs[first + 2]);
    fours[i] = _mm512_castpd_ps(i % 2 == 0 ? _mm512_unpacklo_pd(low, high) : _mm512_unpackhi_pd(low, high));
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const __m512 a = _mm512_shuffle_f32x4(fours[k], fours[4 + k], 0x88);  // parts 0 and 2
    const __m512 b = _mm512_shuffle_f32x4(fours[8 + k], fours[12 + k], 0x88);
    const __m512 c = _mm512_shuffle_f32x4(fours[k], fours[4 + k], 0xdd);  // parts 1 and 3
    const __m512 d = _mm512_shuffle_f32x4(fours[8 + k], fours[12 + k], 0xdd);
    x[k].v = _mm512_shuffle_f32x4(a, b, 0x88);
    x[4 + k].v = _mm512_shuffle_f32x4(c, d, 0x88);
    x[8 + k].v = _mm512_shuffle_f32x4(a, b, 0xdd);
    x[12 + k].v = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
}

// Round to nearest even and store as signed bytes; |x| is at most 127.
inline Dot round_to_bytes(int8_t* p, Floats x) {
  const __m512i whole = _mm512_cvtps_epi32(x.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(whole));
  return {whole};
}
inline int32_t sum_lanes(Dot a) { return _mm512_reduce_add_epi32(a.v); }
inline Dot operator+(Dot a, Dot b) { return {_mm512_add_epi32(a.v, b.v)}; }

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes operator+(Bytes a, Bytes b) { return {_mm512_add_epi8(a.v, b.v)}; }
inline Bytes low_nibbles(Bytes b) { return {_mm512_and_si512(b.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes b) {
  return {_mm512_and_si512(_mm512_srli_epi16(b.v, 4), _mm512_set1_epi8(15))};
}
inline Dot no_dot() { return {_mm512_setzero_si512()}; }
inline Four load_four(const int8_t* p) { return {_mm512_set1_epi32(load_int(p))}; }
inline Four four_ones() { return {_mm512_set1_epi32(kOnes)}; }
inline Dot dot(Dot sum, Bytes weights, Four x) { return {_mm512_dpbusd_epi32(sum.v, weights.v, x.v)}; }
inline Floats total(Dot sum) { return {_mm512_cvtepi32_ps(sum.v)}; }

#else  // 16 registers of 256 bits: sixteen lanes are two of them

constexpr int kTokensPerTile = 4, kBlocksPerTile = 1;  // 8 sums, or 10, and a few to work with

struct Floats { __m256 a, b; };
struct Bytes { __m256i a, b; };
struct Four { __m256i v; };
struct Dot { __m256i a, b; };

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats load(const uint16_t* p) {  // float16
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline Floats load(const BFloat16* p) {
  const __m128i* eights = reinterpret_cast<const __m128i*>(p);
  const auto widen = [](const __m128i* eight) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(eight)), 16));
  };
  return {widen(eights), widen(eights + 1)};
}
inline Floats load(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats operator/(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
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
inline Floats round_even(Floats x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
inline Floats power_of_two(Floats x) {
  const auto eight = [](__m256 whole) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  };
  return {eight(x.a), eight(x.b)};
}
inline Floats where_less(Floats x, Floats y, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline Floats with_sign_of(Floats x, Floats sign) {
  const __m256 mask = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(x.a, _mm256_and_ps(sign.a, mask)), _mm256_or_ps(x.b, _mm256_and_ps(sign.b, mask))};
}
inline void transpose_eight(const __m256* (&rows)[8], __m256* (&columns)[8]) {
  __m256 pairs[8], fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(*rows[i], *rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(*rows[i], *rows[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const int first = i / 4 * 4 + i % 4 / 2;
    const __m256d low = _mm256_castps_pd(pairs[first]), high = _mm256_castps_pd(pairs[first + 2]);
    fours[i] = _mm256_castpd_ps(i % 2 == 0 ? _mm256_unpacklo_pd(low, high) : _mm256_unpackhi_pd(low, high));
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    *columns[k] = _mm256_permute2f128_ps(fours[k], fours[4 + k], 0x20);
    *columns[4 + k] = _mm256_permute2f128_ps(fours[k], fours[4 + k], 0x31);
  }
}
inline void transpose(Floats (&x)[16]) {
  Floats y[16];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {  // of the rows
    const __m256 *left[8], *right[8];
    __m256 *top[8], *bottom[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      left[i] = &x[8 * half + i].a;
      right[i] = &x[8 * half + i].b;
      top[i] = half == 0 ? &y[i].a : &y[i].b;
      bottom[i] = half == 0 ? &y[8 + i].a : &y[8 + i].b;
    }
    transpose_eight(left, top);
    transpose_eight(right, bottom);
  }
  for (int i = 0; i < 16; ++i) x[i] = y[i];
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
inline Bytes operator+(Bytes x, Bytes y) { return {_mm256_add_epi8(x.a, y.a), _mm256_add_epi8(x.b, y.b)}; }
inline Bytes low_nibbles(Bytes b) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(b.a, mask), _mm256_and_si256(b.b, mask)};
}
inline Bytes high_nibbles(Bytes b) {
  return low_nibbles({_mm256_srli_epi16(b.a, 4), _mm256_srli_epi16(b.b, 4)});
}
inline Four load_four(const int8_t* p) { return {_mm256_set1_epi32(load_int(p))}; }
inline Four four_ones() { return {_mm256_set1_epi32(kOnes)}; }
inline Dot no_dot() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Floats whole(Dot sum) { return {_mm256_cvtepi32_ps(sum.a), _mm256_cvtepi32_ps(sum.b)}; }

#if defined(JAXSERVE_AVX_VNNI)

constexpr bool kDotTakesBytes = true;

inline Dot dot(Dot sum, Bytes weights, Four x) {
  return {_mm256_dpbusd_avx_epi32(sum.a, weights.a, x.v), _mm256_dpbusd_avx_epi32(sum.b, weights.b, x.v)};
}
inline Floats total(Dot sum) { return whole(sum); }

#else

// Pairs are summed in 16 bits, which saturate: 8 steps of nibbles reach 8 * 2 * 15 * 127 = 30,480 at most.
constexpr bool kDotTakesBytes = false;

inline Dot dot(Dot sum, Bytes weights, Four x) {
  return {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(weights.a, x.v)),
          _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(weights.b, x.v))};
}
inline Floats total(Dot sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  return whole({_mm256_madd_epi16(sum.a, ones), _mm256_madd_epi16(sum.b, ones)});
}

#endif
#endif

// The first n lanes, n < 16, and zeros; nothing behind them is read.
template <typename T>
inline Floats load_part(const T* p, int n) {
  T all[16] = {};
  std::memcpy(all, p, n * sizeof(T));
  return load(all);
}
inline void store_part(float* p, Floats x, int n) {
  float all[16];
  store(all, x);
  std::memcpy(p, all, n * sizeof(float));
}
// Lanes in [first, stop) of x, minus infinity in the others.
inline Floats keep_lanes(Floats x, int first, int stop) {
  alignas(64) static constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Floats lane = load(kLanes), none = splat(-__builtin_inff());
  const Floats below = where_less(lane, splat(static_cast<float>(stop)), x, none);
  return where_less(lane, splat(static_cast<float>(first)), none, below);
}

}  // namespace jaxserve
