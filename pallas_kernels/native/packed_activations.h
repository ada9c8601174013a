// Activations as packed weights are multiplied with: rounded to integers, group by group.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention_math.h"
#include "isa.h"

namespace jaxserve {

constexpr int kInputs = 32;          // of a group
constexpr int kRanges = 4;           // numbers kept of a group
constexpr float kFinePart = 254.0f;  // of a step of the integers, that a fine one is

// x[t, 32 g + i] = scale * (values + fine / 254) + middle of the group. Tokens lie in panels: what a tile reads
// of a group is one run of memory.
struct Activations {
  int8_t* values;  // [num_panels, num_groups, kTokensPerTile, 32]
  int8_t* fine;    // the same: what rounding left; or null
  float* ranges;   // [num_panels, num_groups, 4, kTokensPerTile]: scales, middles, sums of x as rounded, and fine ones
  int64_t num_groups;

  int64_t panel_group(int64_t token, int64_t group) const { return token / kTokensPerTile * num_groups + group; }
};

// The integers cover a group's own range: one large value of one sign leaves the others twice as fine.
inline void quantize_group(const float* x, const Activations& to, int64_t token, int64_t group) {
  const int64_t place = to.panel_group(token, group), t = token % kTokensPerTile;
  const Floats a = load(x), b = load(x + 16);
  const float high = max_lane(max(a, b)), low = -max_lane(max(zeros() - a, zeros() - b));
  const float half = 0.5f * high - 0.5f * low, middle = 0.5f * high + 0.5f * low;
  const Floats inverse = splat(half > 0.0f ? 127.0f / half : 0.0f), center = splat(middle);
  const Floats a_steps = (a - center) * inverse, b_steps = (b - center) * inverse;
  int8_t* const values = to.values + (place * kTokensPerTile + t) * kInputs;
  const float sum = static_cast<float>(sum_lanes(round_to_bytes(values, a_steps) + round_to_bytes(values + 16, b_steps)));
  const float scale = half / 127.0f;
  float rest = 0.0f;
  if (to.fine != nullptr) {
    int8_t* const fine = to.fine + (place * kTokensPerTile + t) * kInputs;
    const Floats part = splat(kFinePart);
    const Dot first = round_to_bytes(fine, (a_steps - round_even(a_steps)) * part);
    const Dot second = round_to_bytes(fine + 16, (b_steps - round_even(b_steps)) * part);
    rest = static_cast<float>(sum_lanes(first + second)) / kFinePart;
  }
  float* const range = to.ranges + place * kRanges * kTokensPerTile + t;
  range[0] = scale;
  range[kTokensPerTile] = middle;
  range[2 * kTokensPerTile] = scale * sum + kInputs * middle;
  range[3 * kTokensPerTile] = scale * (sum + rest) + kInputs * middle;
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

}  // namespace jaxserve
