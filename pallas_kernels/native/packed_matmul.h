// Activations times packed weights: see pallas_kernels/packed_matmul.
//
// Weights lie in blocks of 16 outputs and 32 inputs. In a block, the 64 bytes of step j hold, for each output,
// the inputs 4 j to 4 j + 3; of 4-bit weights the low nibbles are step 2 i and the high ones step 2 i + 1. So
// one load serves 16 outputs, and four activations are spread over all of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "attention_math.h"
#include "isa.h"

namespace jaxserve {

constexpr int kOutputs = 16;  // of a block
constexpr int kInputs = 32;   // of a block, and of a group of activations
constexpr int kSteps = kInputs / 4;
constexpr float kFinePart = 254.0f;  // of a step of the integers, that a fine one is

// Activations as 8-bit integers: x[t, 32 g + i] = scale * (values + fine / 254) + middle of the group.
struct Activations {
  const int8_t* values;  // [num_tokens, num_groups * 32]
  const int8_t* fine;    // the same: what rounding left; or null
  const float* scales;   // [num_tokens, num_groups]
  const float* middles;  // [num_tokens, num_groups]
  const float* sums;     // [num_tokens, num_groups]: of a group's x, as it is rounded
  int64_t num_groups;
};

// The integers cover a group's own range: one large value of one sign leaves the others twice as fine.
inline void quantize_row(const float* x, int64_t num_groups, int8_t* values, int8_t* fine, float* scales,
                         float* middles, float* sums) {
  for (int64_t g = 0; g < num_groups; ++g, x += kInputs, values += kInputs) {
    const Floats a = load(x), b = load(x + 16);
    const float high = max_lane(max(a, b)), low = -max_lane(max(zeros() - a, zeros() - b));
    const float half = 0.5f * high - 0.5f * low, middle = 0.5f * high + 0.5f * low;
    const Floats inverse = splat(half > 0.0f ? 127.0f / half : 0.0f), center = splat(middle);
    const Floats a_steps = (a - center) * inverse, b_steps = (b - center) * inverse;
    float sum = static_cast<float>(sum_lanes(round_to_bytes(values, a_steps) + round_to_bytes(values + 16, b_steps)));
    if (fine != nullptr) {
      const Floats part = splat(kFinePart);
      const Dot first = round_to_bytes(fine, (a_steps - round_even(a_steps)) * part);
      const Dot second = round_to_bytes(fine + 16, (b_steps - round_even(b_steps)) * part);
      sum += static_cast<float>(sum_lanes(first + second)) / kFinePart;
      fine += kInputs;
    }
    scales[g] = half / 127.0f;
    middles[g] = middle;
    sums[g] = scales[g] * sum + kInputs * middle;
  }
}

// What is done to the activations first.
enum class Before : int64_t { kNothing, kRmsNorm, kSilu, kGelu };

// x / (1 + e^-y)
inline Floats times_sigmoid(Floats x, Floats y) {
  const Floats e = exp_negative(zeros() - abs(y)), one = splat(1.0f);
  return x * where_less(y, zeros(), e, one) / (one + e);
}

// A row of size elements: x / sqrt(mean(x^2) + eps) * other.
inline void rms_norm(const float* x, const float* other, float eps, int64_t size, float* out) {
  Floats squares = zeros();
  for (int64_t i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const Floats scale = splat(1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(size) + eps));
  for (int64_t i = 0; i < size; i += 16) store(out + i, load(x + i) * scale * load(other + i));
}

// activation(x) * other
inline void gate(Before kind, const float* x, const float* other, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += 16) {
    const Floats v = load(x + i);
    Floats y = v;
    // The tanh form: x / 2 * (1 + tanh(z)) = x / (1 + e^-2z)
    if (kind == Before::kGelu) y = splat(1.5957691216f) * fma(v * v * v, splat(0.044715f), v);
    store(out + i, times_sigmoid(v, y) * load(other + i));
  }
}

// One weight matrix of a layer, and where its products go.
struct Matrix {
  const uint8_t* values;  // [num_blocks, num_groups, 16 * 32 * bits / 8]
  const uint8_t* scales;  // [num_blocks, num_scales, 16] of float16, or of float
  const uint8_t* mins;    // the same, or null: the values are offset by half of their range instead
  bool is_half;
  int bits;
  int64_t num_blocks, num_groups, groups_per_scale;
  float* y;               // [num_tokens, num_outputs]
  const float* residual;  // the same, to add; or null
  int64_t num_outputs;

  Floats scale(const uint8_t* from, int64_t index) const {
    if (is_half) return load(reinterpret_cast<const uint16_t*>(from) + index * kOutputs);
    return load(reinterpret_cast<const float*>(from) + index * kOutputs);
  }
};

// Sums over a group of weights times `four(j)`, the activations of step j.
template <int kBits, typename F>
inline Floats dot_group(const Bytes (&steps)[kSteps], const F& four) {
  if constexpr (kDotTakesBytes) {
    // Two sums: eight instructions that wait for each other are longer than what the processor sees at once.
    Dot even = no_dot(), odd = no_dot();
#pragma GCC unroll 8
    for (int j = 0; j < kSteps; j += 2) {
      even = dot(even, steps[j], four(j));
      odd = dot(odd, steps[j + 1], four(j + 1));
    }
    return total(even + odd);
  } else if constexpr (kBits == 4) {
    Dot sum = no_dot();
#pragma GCC unroll 8
    for (int j = 0; j < kSteps; ++j) sum = dot(sum, steps[j], four(j));
    return total(sum);
  } else {
    // Bytes as two nibbles: what `dot` takes without saturating.
    Dot low = no_dot(), high = no_dot();
#pragma GCC unroll 8
    for (int j = 0; j < kSteps; ++j) {
      low = dot(low, low_nibbles(steps[j]), four(j));
      high = dot(high, high_nibbles(steps[j]), four(j));
    }
    return fma(total(high), splat(16.0f), total(low));
  }
}

// y[t, 0:16] for the T tokens from `token` on and a block of outputs.
template <int T, int kBits, bool kIsFine>
void tile(const Matrix& matrix, int64_t block, const Activations& x, int64_t token) {
  const int64_t num_groups = matrix.num_groups, row = num_groups * kInputs, first = token * num_groups;
  constexpr int kBlockBytes = kOutputs * kInputs * kBits / 8;
  constexpr float kOffset = kBits == 4 ? 8.0f : 128.0f;
  const uint8_t* w = matrix.values + block * num_groups * kBlockBytes;
  int64_t next_scale = block * (num_groups / matrix.groups_per_scale);
  const int8_t* values = x.values + token * row;
  const int8_t* fine = kIsFine ? x.fine + token * row : nullptr;

  Floats y[T];
  for (int t = 0; t < T; ++t) y[t] = zeros();
  Floats scale = zeros(), min = zeros();
  int64_t until_scale = 0;
  for (int64_t g = 0; g < num_groups; ++g, w += kBlockBytes, values += kInputs) {
    if (until_scale == 0) {
      scale = matrix.scale(matrix.scales, next_scale);
      min = matrix.mins == nullptr ? scale * splat(-kOffset) : matrix.scale(matrix.mins, next_scale);
      ++next_scale;
      until_scale = matrix.groups_per_scale;
    }
    --until_scale;
    Bytes steps[kSteps];
    for (int j = 0; j < kSteps; ++j) {
      if constexpr (kBits == 4) {
        const Bytes two = load_bytes(w + 64 * (j / 2));
        steps[j] = j % 2 == 0 ? low_nibbles(two) : high_nibbles(two);
      } else {
        steps[j] = load_bytes(w + 64 * j);
      }
    }
    Floats dots[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      dots[t] = dot_group<kBits>(steps, [&](int j) { return load_int(values + t * row + 4 * j); });
      if constexpr (kIsFine) {
        const Floats rest = dot_group<kBits>(steps, [&](int j) { return load_int(fine + t * row + 4 * j); });
        dots[t] = fma(rest, splat(1.0f / kFinePart), dots[t]);
      }
    }
    if constexpr (kIsFine) fine += kInputs;
    const Floats sum_of_weights = dot_group<kBits>(steps, [](int) { return 0x01010101; });
    // A weight is scale * value + min and an activation x_scale * integer + middle.
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const int64_t at = first + t * num_groups + g;
      const Floats of_values = fma(splat(x.middles[at]), sum_of_weights, splat(x.scales[at]) * dots[t]);
      y[t] = fma(min, splat(x.sums[at]), fma(of_values, scale, y[t]));
    }
  }
  const int num_outputs = static_cast<int>(std::min<int64_t>(kOutputs, matrix.num_outputs - block * kOutputs));
  for (int t = 0; t < T; ++t) {
    const int64_t at = (token + t) * matrix.num_outputs + block * kOutputs;
    if (num_outputs == kOutputs) {
      store(matrix.y + at, matrix.residual == nullptr ? y[t] : y[t] + load(matrix.residual + at));
    } else {
      if (matrix.residual != nullptr) y[t] = y[t] + load_part(matrix.residual + at, num_outputs);
      store_part(matrix.y + at, y[t], num_outputs);
    }
  }
}

// All tokens [0, num_tokens) of one block of outputs. A token's arithmetic is the same in any tile.
template <int kBits, bool kIsFine>
void all_tokens(const Matrix& matrix, int64_t block, const Activations& x, int64_t num_tokens) {
  int64_t token = 0;
  const auto by = [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    if constexpr (kSize <= kTokensPerTile) {
      for (; token + kSize <= num_tokens; token += kSize) tile<kSize, kBits, kIsFine>(matrix, block, x, token);
    }
  };
  by(std::integral_constant<int, kTokensPerTile>());
  by(std::integral_constant<int, 8>());
  by(std::integral_constant<int, 4>());
  by(std::integral_constant<int, 1>());
}

inline void block_of_outputs(const Matrix& matrix, int64_t block, const Activations& x, int64_t num_tokens) {
  const bool is_fine = x.fine != nullptr;
  if (matrix.bits == 4) {
    is_fine ? all_tokens<4, true>(matrix, block, x, num_tokens) : all_tokens<4, false>(matrix, block, x, num_tokens);
  } else {
    is_fine ? all_tokens<8, true>(matrix, block, x, num_tokens) : all_tokens<8, false>(matrix, block, x, num_tokens);
  }
}

}  // namespace jaxserve
