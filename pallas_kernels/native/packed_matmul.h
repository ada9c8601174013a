// Activations times packed weights: see pallas_kernels/packed_matmul.
//
// Weights lie in blocks of 16 outputs and 32 inputs. In a block, the 64 bytes of step j hold, for each output,
// the inputs 4 j to 4 j + 3; of 4-bit weights the low nibbles are step 2 i and the high ones step 2 i + 1. So
// one load serves 16 outputs, and four activations are spread over all of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "isa.h"

namespace jaxserve {

constexpr int kOutputs = 16;  // of a block
constexpr int kInputs = 32;   // of a block, and of a group of activations
constexpr int kSteps = kInputs / 4;

// Activations as 8-bit integers: x[t, 32 g + i] = scale[t, g] * values[t, 32 g + i] + middle[t, g].
struct Activations {
  const int8_t* values;  // [num_tokens, num_groups * 32]
  const float* scales;   // [num_tokens, num_groups]
  const float* middles;  // [num_tokens, num_groups]
  const float* sums;     // [num_tokens, num_groups]: of a group's x, as it is rounded
  int64_t num_groups;
};

// The integers cover a group's own range: one large value of one sign leaves the others twice as fine.
inline void quantize_row(const float* x, int64_t num_groups, int8_t* values, float* scales, float* middles,
                         float* sums) {
  for (int64_t g = 0; g < num_groups; ++g, x += kInputs, values += kInputs) {
    const Floats a = load(x), b = load(x + 16);
    const float high = max_lane(max(a, b)), low = -max_lane(max(zeros() - a, zeros() - b));
    const float half = 0.5f * high - 0.5f * low, middle = 0.5f * high + 0.5f * low;
    const Floats inverse = splat(half > 0.0f ? 127.0f / half : 0.0f), center = splat(middle);
    const Dot first = round_to_bytes(values, (a - center) * inverse);
    const Dot second = round_to_bytes(values + 16, (b - center) * inverse);
    scales[g] = half / 127.0f;
    middles[g] = middle;
    sums[g] = scales[g] * static_cast<float>(sum_lanes(first + second)) + kInputs * middle;
  }
}

// One weight matrix of a layer.
template <typename Scale>  // float, or uint16_t for float16
struct Matrix {
  const uint8_t* values;  // [num_blocks, num_groups, 16 * 32 * bits / 8]
  const Scale* scales;    // [num_blocks, num_scales, 16]
  const Scale* mins;      // the same, or null: the values are offset by half of their range instead
  int64_t num_groups;
  int64_t groups_per_scale;
};

// y[t, 0:16] for the T tokens from `token` on and a block of outputs; `num_outputs` of the 16 exist.
template <int T, int kBits, typename Scale>
void tile(const Matrix<Scale>& matrix, int64_t block, const Activations& x, int64_t token, float* y,
          int64_t y_stride, int num_outputs) {
  const int64_t num_groups = matrix.num_groups, row = num_groups * kInputs;
  constexpr int kBlockBytes = kOutputs * kInputs * kBits / 8;
  constexpr float kOffset = kBits == 4 ? 8.0f : 128.0f;
  const int64_t num_scales = num_groups / matrix.groups_per_scale;
  const uint8_t* w = matrix.values + block * num_groups * kBlockBytes;
  const Scale* scales = matrix.scales + block * num_scales * kOutputs;
  const Scale* mins = matrix.mins == nullptr ? nullptr : matrix.mins + block * num_scales * kOutputs;
  const int8_t* values = x.values + token * row;
  const int64_t first = token * num_groups;

  Floats y_tile[T];
  for (int t = 0; t < T; ++t) y_tile[t] = zeros();
  Floats scale = zeros(), min = zeros();
  int64_t until_scale = 0;
  for (int64_t g = 0; g < num_groups; ++g, w += kBlockBytes, values += kInputs) {
    if (until_scale == 0) {
      scale = load(scales);
      scales += kOutputs;
      if (mins != nullptr) {
        min = load(mins);
        mins += kOutputs;
      } else {
        min = scale * splat(-kOffset);
      }
      until_scale = matrix.groups_per_scale;
    }
    --until_scale;
    constexpr int32_t kOnes = 0x01010101;
    Floats dots[T], sum_of_weights;
    if constexpr (kBits == 4 || kDotTakesBytes) {
      Bytes steps[kSteps];
      Dot ones = no_dot();
      for (int j = 0; j < kSteps; ++j) {
        if constexpr (kBits == 4) {
          const Bytes two = load_bytes(w + 64 * (j / 2));
          steps[j] = j % 2 == 0 ? low_nibbles(two) : high_nibbles(two);
        } else {
          steps[j] = load_bytes(w + 64 * j);
        }
        ones = dot(ones, steps[j], kOnes);
      }
      sum_of_weights = total(ones);
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        Dot sum = no_dot();
#pragma GCC unroll 8
        for (int j = 0; j < kSteps; ++j) sum = dot(sum, steps[j], load_int(values + t * row + 4 * j));
        dots[t] = total(sum);
      }
    } else {
      // Bytes as two nibbles: what `dot` takes without saturating.
      const auto by_nibbles = [&](auto four) {
        Dot low = no_dot(), high = no_dot();
#pragma GCC unroll 8
        for (int j = 0; j < kSteps; ++j) {
          const Bytes bytes = load_bytes(w + 64 * j);
          low = dot(low, low_nibbles(bytes), four(j));
          high = dot(high, high_nibbles(bytes), four(j));
        }
        return fma(total(high), splat(16.0f), total(low));
      };
      sum_of_weights = by_nibbles([](int) { return kOnes; });
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        dots[t] = by_nibbles([&](int j) { return load_int(values + t * row + 4 * j); });
      }
    }
    // A weight is scale * value + min and an activation x_scale * integer + middle.
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const int64_t at = first + t * num_groups + g;
      const Floats of_values = fma(splat(x.middles[at]), sum_of_weights, splat(x.scales[at]) * dots[t]);
      y_tile[t] = fma(min, splat(x.sums[at]), fma(of_values, scale, y_tile[t]));
    }
  }
  for (int t = 0; t < T; ++t) {
    float* out = y + (token + t) * y_stride + block * kOutputs;
    if (num_outputs == kOutputs) {
      store(out, y_tile[t]);
    } else {
      float all[kOutputs];
      store(all, y_tile[t]);
      std::memcpy(out, all, num_outputs * sizeof(float));
    }
  }
}

// All tokens [0, num_tokens) of one block of outputs.
template <int kBits, typename Scale>
void block_of_outputs(const Matrix<Scale>& matrix, int64_t block, const Activations& x, int64_t num_tokens,
                      float* y, int64_t y_stride) {
  const int num_outputs = static_cast<int>(std::min<int64_t>(kOutputs, y_stride - block * kOutputs));
  int64_t token = 0;
  for (; token + kTokensPerTile <= num_tokens; token += kTokensPerTile) {
    tile<kTokensPerTile, kBits>(matrix, block, x, token, y, y_stride, num_outputs);
  }
  // What is left over, by fewer at a time. A token's arithmetic is the same in any tile.
  const auto rest = [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    if constexpr (kSize < kTokensPerTile) {
      for (; token + kSize <= num_tokens; token += kSize) {
        tile<kSize, kBits>(matrix, block, x, token, y, y_stride, num_outputs);
      }
    }
  };
  rest(std::integral_constant<int, 8>());
  rest(std::integral_constant<int, 4>());
  rest(std::integral_constant<int, 2>());
  rest(std::integral_constant<int, 1>());
}

}  // namespace jaxserve
