// Activations times packed weights: see pallas_kernels/packed_matmul.
//
// Weights lie in blocks of 16 outputs and 32 inputs. In a block, the 64 bytes of step j hold, for each output,
// the inputs 4 j to 4 j + 3; of 4-bit weights the low nibbles are step 2 i and the high ones step 2 i + 1. So
// one load serves 16 outputs, and four activations are spread over all of them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "packed_activations.h"
#include "repeat.h"

namespace jaxserve {

constexpr int kOutputs = 16;                             // of a block
constexpr int kTileOutputs = kOutputs * kBlocksPerTile;  // of a tile
constexpr int kSteps = kInputs / 4;
constexpr int kSumsWidth = 32;  // outputs of a row of sums, whatever a tile has

// One weight matrix of a layer, and where its products go.
struct Matrix {
  const uint8_t* values;  // [num_blocks, num_groups, 16 * 32 * bits / 8]
  const uint8_t* scales;  // [num_blocks, num_scales, 16] of float16, or of float
  const uint8_t* mins;    // the same, or null: the values are offset by half of their range instead
  bool is_half, is_fine;  // float16 scales; activations of 16 bits
  int bits;
  int64_t num_blocks, num_groups, groups_per_scale;
  float* y;               // [num_tokens, num_outputs]
  const float* residual;  // the same, to add; or null
  int64_t num_outputs;

  int64_t num_tiles() const { return (num_blocks + kBlocksPerTile - 1) / kBlocksPerTile; }
  const uint8_t* block(int64_t index) const { return values + index * num_groups * kOutputs * kInputs * bits / 8; }
  Floats scale(const uint8_t* from, int64_t index) const {
    if (is_half) return load(reinterpret_cast<const uint16_t*>(from) + index * kOutputs);
    return load(reinterpret_cast<const float*>(from) + index * kOutputs);
  }
};

// The blocks whose products a tile makes side by side. Behind the last of a matrix it is that one once more:
// what comes of it is not stored.
struct Blocks {
  Blocks(const Matrix& matrix, int64_t tile) : matrix(matrix) {
    for (int b = 0; b < kBlocksPerTile; ++b) {
      index[b] = std::min(tile * kBlocksPerTile + b, matrix.num_blocks - 1);
      values[b] = matrix.block(index[b]);
    }
  }

  // Of a group, which is the next one: a weight is scale * value + min.
  void next(Floats (&scale)[kBlocksPerTile], Floats (&min)[kBlocksPerTile]) {
    if (until_scale == 0) {
      const float offset = matrix.bits == 4 ? -8.0f : -128.0f;
      for (int b = 0; b < kBlocksPerTile; ++b) {
        const int64_t at = index[b] * (matrix.num_groups / matrix.groups_per_scale) + next_scale;
        scale[b] = matrix.scale(matrix.scales, at);
        min[b] = matrix.mins == nullptr ? scale[b] * splat(offset) : matrix.scale(matrix.mins, at);
      }
      ++next_scale;
      until_scale = matrix.groups_per_scale;
    }
    --until_scale;
  }

  const Matrix& matrix;
  int64_t index[kBlocksPerTile];
  const uint8_t* values[kBlocksPerTile];
  int64_t next_scale = 0, until_scale = 0;
};

// Which half of a byte: `dot` takes 8 bits in one, or in two.
enum class Part { kAll, kLow, kHigh };

template <int kBits, Part kPart>
inline Bytes step_of(const uint8_t* group, int j) {
  if constexpr (kBits == 4) {
    const Bytes two = load_bytes(group + 64 * (j / 2));
    return j % 2 == 0 ? low_nibbles(two) : high_nibbles(two);
  }
  const Bytes step = load_bytes(group + 64 * j);
  if constexpr (kPart == Part::kLow) return low_nibbles(step);
  if constexpr (kPart == Part::kHigh) return high_nibbles(step);
  return step;
}

// found[b][t], t < T: sums over a group of weights times x [T, 32]; t = T, if there is one: of the weights alone.
template <int N, int T, int kBits, Part kPart>
inline void dots_of_group(const uint8_t* const (&w)[kBlocksPerTile], int64_t offset, const int8_t* x,
                          Floats (&found)[kBlocksPerTile][N]) {
  constexpr bool kFitBytes = kBits == 4 || kPart != Part::kAll;  // eight nibbles do, added up
  Dot sums[kBlocksPerTile][N];
  Bytes added[kBlocksPerTile];
  repeat<kBlocksPerTile>([&](auto b) INLINE { repeat<N>([&](auto t) INLINE { sums[b][t] = no_dot(); }); });
  repeat<kSteps>([&](auto j) INLINE {
    Bytes steps[kBlocksPerTile];
    repeat<kBlocksPerTile>([&](auto b) INLINE {
      steps[b] = step_of<kBits, kPart>(w[b] + offset, j);
      if constexpr (N > T) {
        if constexpr (kFitBytes) added[b] = j == 0 ? steps[b] : added[b] + steps[b];
        else sums[b][T] = dot(sums[b][T], steps[b], four_ones());
      }
    });
    repeat<T>([&](auto t) INLINE {
      const Four four = load_four(x + t * kInputs + 4 * j);
      repeat<kBlocksPerTile>([&](auto b) INLINE { sums[b][t] = dot(sums[b][t], steps[b], four); });
    });
  });
  repeat<kBlocksPerTile>([&](auto b) INLINE {
    if constexpr (N > T && kFitBytes) sums[b][T] = dot(no_dot(), added[b], four_ones());
    repeat<N>([&](auto t) INLINE {
      if constexpr (kPart == Part::kHigh) found[b][t] = fma(total(sums[b][t]), splat(16.0f), found[b][t]);
      else found[b][t] = total(sums[b][t]);
    });
  });
}

template <int N, int T, int kBits>
inline void sums_of_group(const uint8_t* const (&w)[kBlocksPerTile], int64_t offset, const int8_t* x,
                          Floats (&found)[kBlocksPerTile][N]) {
  if constexpr (kBits == 4 || kDotTakesBytes) {
    dots_of_group<N, T, kBits, Part::kAll>(w, offset, x, found);
  } else {
    dots_of_group<N, T, kBits, Part::kLow>(w, offset, x, found);
    dots_of_group<N, T, kBits, Part::kHigh>(w, offset, x, found);
  }
}

// Of each group, for all the tokens: scale, scale * sum of the values, and min; [num_groups, blocks, 3, 16].
constexpr int64_t kFactors = kBlocksPerTile * 3 * kOutputs;

template <int kBits>
void prepare(Blocks blocks, float* factors) {
  Floats scale[kBlocksPerTile], min[kBlocksPerTile];
  for (int64_t g = 0; g < blocks.matrix.num_groups; ++g) {
    Floats of_weights[kBlocksPerTile][1];
    sums_of_group<1, 0, kBits>(blocks.values, g * kOutputs * kInputs * kBits / 8, nullptr, of_weights);
    blocks.next(scale, min);
    for (int b = 0; b < kBlocksPerTile; ++b, factors += 3 * kOutputs) {
      store(factors, scale[b]);
      store(factors + kOutputs, scale[b] * of_weights[b][0]);
      store(factors + 2 * kOutputs, min[b]);
    }
  }
}

// sums[t, 0:16 B] for the T tokens of a panel from `first` on. `factors`: as prepared, or null.
//
// Products of a group are held in registers and the sums in memory: so each load of activations serves all the
// blocks, and each of weights all the tokens. A token's arithmetic is the same in any tile.
template <int T, int kBits, bool kIsFine, bool kIsPrepared>
void tile(Blocks blocks, const float* factors, const Activations& x, int64_t panel, int first, float* sums) {
  constexpr int N = kIsPrepared ? T : T + 1;
  const int64_t num_groups = blocks.matrix.num_groups, place = panel * num_groups * kTokensPerTile;
  const int8_t* values = x.values + (place + first) * kInputs;
  const int8_t* fine = kIsFine ? x.fine + (place + first) * kInputs : nullptr;
  const float* range = x.ranges + kRanges * place + first;
  for (int t = 0; t < T; ++t) {
    for (int b = 0; b < kBlocksPerTile; ++b) store(sums + t * kSumsWidth + b * kOutputs, zeros());
  }
  constexpr int64_t kGroupBytes = kOutputs * kInputs * kBits / 8;
  const int64_t next_blocks = kBlocksPerTile * num_groups * kGroupBytes;
  Floats scale[kBlocksPerTile], of_middle[kBlocksPerTile], min[kBlocksPerTile];
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t offset = g * kGroupBytes;
    asm volatile("" : "+r"(sums));  // or compilers keep the sums twice: there, and in registers that they spill
    if constexpr (kIsPrepared) {  // the next tile's: preparing it would wait for each line of memory
      for (int b = 0; b < kBlocksPerTile; ++b) {
        for (int i = 0; i < kGroupBytes; i += 64) prefetch_bytes(blocks.values[b] + next_blocks + offset + i);
      }
    }
    Floats found[kBlocksPerTile][N];
    sums_of_group<N, T, kBits>(blocks.values, offset, values, found);
    values += kTokensPerTile * kInputs;
    if constexpr (kIsFine) {
      Floats rest[kBlocksPerTile][T];
      sums_of_group<T, T, kBits>(blocks.values, offset, fine, rest);
      fine += kTokensPerTile * kInputs;
      repeat<kBlocksPerTile>([&](auto b) INLINE {
        repeat<T>([&](auto t) INLINE { found[b][t] = fma(rest[b][t], splat(1.0f / kFinePart), found[b][t]); });
      });
    }
    if constexpr (!kIsPrepared) blocks.next(scale, min);
    repeat<kBlocksPerTile>([&](auto b) INLINE {
      if constexpr (kIsPrepared) {
        scale[b] = load(factors), of_middle[b] = load(factors + kOutputs), min[b] = load(factors + 2 * kOutputs);
        factors += 3 * kOutputs;
      } else {
        of_middle[b] = scale[b] * found[b][T];
      }
    });
    // A weight is scale * value + min and an activation x_scale * integer + middle.
    repeat<T>([&](auto t) INLINE {
      const Floats x_scale = splat(range[t]), middle = splat(range[kTokensPerTile + t]);
      const Floats x_sum = splat(range[(kIsFine ? 3 : 2) * kTokensPerTile + t]);
      repeat<kBlocksPerTile>([&](auto b) INLINE {
        float* const y = sums + t * kSumsWidth + b * kOutputs;
        const Floats sum = fma(of_middle[b], middle, fma(found[b][t] * scale[b], x_scale, load(y)));
        store(y, fma(min[b], x_sum, sum));
      });
    });
    range += kRanges * kTokensPerTile;
  }
}

// A tile, and how many tokens it takes.
struct TileCode {
  void (*run)(Blocks, const float* factors, const Activations&, int64_t panel, int first, float* sums);
  int num_tokens;
};

// The tile for the next of `left` tokens. It may take more than those: what comes of the others is not stored.
template <int kBits, bool kIsFine>
TileCode tile_code(int64_t left, bool is_prepared) {
  constexpr int kMost = kIsFine ? std::min(kTokensPerTile, 4) : kTokensPerTile;  // twice the registers
  if (kMost > 4 && left > 4) {
    return {is_prepared ? tile<kMost, kBits, kIsFine, true> : tile<kMost, kBits, kIsFine, false>, kMost};
  }
  if (is_prepared) return {tile<4, kBits, kIsFine, true>, 4};
  if (left > 2) return {tile<4, kBits, kIsFine, false>, 4};
  if (left == 2) return {tile<2, kBits, kIsFine, false>, 2};
  return {tile<1, kBits, kIsFine, false>, 1};
}

// Products of a tile's outputs with any tokens.
class Products {
 public:
  // `room`: [num_groups * kFactors], where they are prepared: as is worth its time for more than one tile.
  Products(const Matrix& matrix, int64_t tile, const Activations& x, int64_t num_tokens, float* room)
      : blocks_(matrix, tile), x_(x), num_tokens_(num_tokens) {
    if (num_tokens <= kTokensPerTile) return;
    factors_ = room;
    matrix.bits == 4 ? prepare<4>(blocks_, room) : prepare<8>(blocks_, room);
  }

  // sums[t, 0:kTileOutputs] of tokens `token`, ...; how many there are.
  int run(int64_t token, float* sums) const {
    const TileCode code = choose(num_tokens_ - token);
    code.run(blocks_, factors_, x_, token / kTokensPerTile, static_cast<int>(token % kTokensPerTile), sums);
    return static_cast<int>(std::min<int64_t>(code.num_tokens, num_tokens_ - token));
  }

 private:
  TileCode choose(int64_t left) const {
    const bool is_prepared = factors_ != nullptr, is_fine = blocks_.matrix.is_fine;
    if (blocks_.matrix.bits == 4) {
      return is_fine ? tile_code<4, true>(left, is_prepared) : tile_code<4, false>(left, is_prepared);
    }
    return is_fine ? tile_code<8, true>(left, is_prepared) : tile_code<8, false>(left, is_prepared);
  }

  Blocks blocks_;
  const Activations& x_;
  int64_t num_tokens_;
  const float* factors_ = nullptr;
};

}  // namespace jaxserve
