#include "packed_matmul.h"

#include <algorithm>
#include <vector>

#include "team.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int64_t kFloatsTogether = 8192;  // that one thread prepares: some microseconds

// The part of a stacked array [num_layers, ...] that is layer `layer`; `rank` is that of one layer's.
const uint8_t* layer_of(const ffi::AnyBuffer& array, size_t rank, int64_t layer) {
  const uint8_t* data = static_cast<const uint8_t*>(array.untyped_data());
  if (array.dimensions().size() == rank) return data;
  return data + layer * static_cast<int64_t>(array.size_bytes()) / array.dimensions().front();
}

// Memory that is kept for the next call: most calls of a program have the same sizes.
struct Room {
  std::vector<int8_t> values, fine;
  std::vector<float> ranges;

  Activations activations(int64_t num_tokens, int64_t num_groups, bool is_fine) {
    const int64_t num_panels = (num_tokens + kTokensPerTile - 1) / kTokensPerTile;
    const int64_t places = num_panels * num_groups * kTokensPerTile;
    values.resize(places * kInputs);
    if (is_fine) fine.resize(places * kInputs);
    ranges.resize(places * kRanges);
    return {values.data(), is_fine ? fine.data() : nullptr, ranges.data(), num_groups};
  }
};

// A thread's own, aligned as vectors are: float [size].
template <int kWhich>
float* own_floats(int64_t size) {
  static thread_local std::vector<float> kept;
  if (static_cast<int64_t>(kept.size()) < size + kOutputs) kept.resize(size + kOutputs);
  const uintptr_t place = reinterpret_cast<uintptr_t>(kept.data());
  return reinterpret_cast<float*>((place + 63) / 64 * 64);
}

// The activations of a call, before they are rounded.
struct Inputs {
  const float* x;      // [num_tokens, size]
  const float* other;  // of a norm: its weight [size]; of a gate: what it is multiplied with, like x
  Before before;
  float eps;
  int64_t size;

  void quantize(int64_t token, const Activations& to) const {
    const float* from = x + token * size;
    if (before != Before::kNothing) {
      float* const made = own_floats<0>(size);
      if (before == Before::kRmsNorm) rms_norm(from, other, eps, size, made);
      else gate(before, from, other + token * size, size, made);
      from = made;
    }
    for (int64_t g = 0; g < to.num_groups; ++g) quantize_group(from + g * kInputs, to, token, g);
  }

  // The first num_tokens. Threads take whole panels, so that none writes beside another.
  void quantize_all(Team& team, int64_t num_tokens, const Activations& to) const {
    const int64_t panels = std::max<int64_t>(1, kFloatsTogether / (size * kTokensPerTile));
    const int64_t rows_together = panels * kTokensPerTile;
    team.run((num_tokens + rows_together - 1) / rows_together, [&](int64_t i) {
      const int64_t end = std::min(num_tokens, (i + 1) * rows_together);
      for (int64_t t = i * rows_together; t < end; ++t) quantize(t, to);
    });
  }
};

// f(i) for each i in [0, n), a few pieces for each thread: the last to end is not far behind, and each reads a
// run of memory.
template <typename F>
void by_pieces(Team& team, int64_t n, const F& f) {
  const int64_t together = std::max<int64_t>(1, n / (4 * team.num_threads()));
  team.run((n + together - 1) / together, [&](int64_t piece) {
    const int64_t end = std::min(n, (piece + 1) * together);
    for (int64_t i = piece * together; i < end; ++i) f(i);
  });
}

// y[0:num_tokens] of a tile's outputs.
void multiply(const Matrix& matrix, int64_t tile, const Activations& x, int64_t num_tokens) {
  const Products products(matrix, tile, x, num_tokens, own_floats<1>(matrix.num_groups * kFactors));
  alignas(64) float sums[kTokensPerTile * kSumsWidth];
  for (int64_t token = 0; token < num_tokens;) {
    const int size = products.run(token, sums);
    for (int t = 0; t < size; ++t, ++token) {
      for (int b = 0; b < kBlocksPerTile; ++b) {
        const int64_t output = (tile * kBlocksPerTile + b) * kOutputs;
        const int num_outputs = static_cast<int>(std::min<int64_t>(kOutputs, matrix.num_outputs - output));
        if (num_outputs <= 0) break;
        const int64_t at = token * matrix.num_outputs + output;
        Floats y = load(sums + t * kSumsWidth + b * kOutputs);
        if (num_outputs == kOutputs) {
          if (matrix.residual != nullptr) y = y + load(matrix.residual + at);
          store(matrix.y + at, y);
        } else {
          if (matrix.residual != nullptr) y = y + load_part(matrix.residual + at, num_outputs);
          store_part(matrix.y + at, y, num_outputs);
        }
      }
    }
  }
}

// activation(gate) * up of outputs 32 group, ..., rounded at once: a group of what the next product takes.
void gated_group(const Matrix& gate_matrix, const Matrix& up_matrix, Before activation, int64_t group,
                 const Activations& x, int64_t num_tokens, const Activations& to) {
  constexpr int kTiles = kInputs / kTileOutputs;
  const int64_t factors = gate_matrix.num_groups * kFactors;
  float* const room = own_floats<1>(2 * kTiles * factors);
  alignas(64) float gates[kTokensPerTile * kSumsWidth], ups[kTokensPerTile * kSumsWidth], made[kInputs];
  struct Tiles { Products gate, up; };
  std::vector<Tiles> tiles;
  tiles.reserve(kTiles);
  for (int64_t i = 0; i < kTiles; ++i) {
    const int64_t tile = group * kTiles + i;
    tiles.push_back({Products(gate_matrix, tile, x, num_tokens, room + 2 * i * factors),
                     Products(up_matrix, tile, x, num_tokens, room + (2 * i + 1) * factors)});
  }
  for (int64_t token = 0; token < num_tokens;) {
    int size = 0;
    for (int i = 0; i < kTiles; ++i) {
      size = tiles[i].gate.run(token, gates + i * kTileOutputs);
      tiles[i].up.run(token, ups + i * kTileOutputs);
    }
    for (int t = 0; t < size; ++t, ++token) {
      gate(activation, gates + t * kSumsWidth, ups + t * kSumsWidth, kInputs, made);
      quantize_group(made, to, token, group);
    }
  }
}

// The arrays of a stacked weight, and what is computed with them.
class Operands {
 public:
  Operands(ffi::RemainingArgs args, int64_t layer) : args_(args), layer_(layer) {}

  const float* floats() { return static_cast<const float*>(args_.get<ffi::AnyBuffer>(next_++)->untyped_data()); }

  // False where the arrays are not those of a weight.
  bool matrix(bool has_mins, bool is_fine, float* y, const float* residual, int64_t num_outputs, Matrix& m) {
    const auto values = args_.get<ffi::AnyBuffer>(next_++), scales = args_.get<ffi::AnyBuffer>(next_++);
    if (!values || !scales) return false;
    const auto shape = values->dimensions();
    const size_t rank = shape.size();
    if (rank == 4 && (layer_ < 0 || layer_ >= shape[0])) return false;
    m.values = layer_of(*values, 3, layer_);
    m.scales = layer_of(*scales, 3, layer_);
    m.mins = has_mins ? layer_of(*args_.get<ffi::AnyBuffer>(next_++), 3, layer_) : nullptr;
    m.is_fine = is_fine;
    m.is_half = scales->element_type() == ffi::F16;
    m.bits = static_cast<int>(shape[rank - 1] * 8 / (kOutputs * kInputs));
    m.num_blocks = shape[rank - 3];
    m.num_groups = shape[rank - 2];
    m.groups_per_scale = m.num_groups / scales->dimensions()[rank - 2];
    m.y = y;
    m.residual = residual;
    m.num_outputs = num_outputs;
    return true;
  }

 private:
  ffi::RemainingArgs args_;
  int64_t layer_;
  size_t next_ = 0;
};

// x: float32 [num_tokens, in]; the first num_live rows are computed, the others left alone. What follows: the
// norm's weight or the gate's other factor, and the residual, those that there are; then the weights' arrays.
ffi::Error packed_matmul(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR0<ffi::S32> layer,
                         ffi::BufferR0<ffi::S32> num_live, ffi::RemainingArgs args, ffi::RemainingRets rets,
                         ffi::Span<const int64_t> has_mins, int64_t before, float eps, bool has_residual,
                         ffi::Span<const int64_t> is_fine) {
  Team team(pool);
  const int64_t live = std::clamp<int64_t>(*num_live.typed_data(), 0, x.dimensions()[0]);
  Operands operands(args, *layer.typed_data());
  Inputs inputs{x.typed_data(), nullptr, static_cast<Before>(before), eps, x.dimensions()[1]};
  if (inputs.before != Before::kNothing) inputs.other = operands.floats();
  const float* const residual = has_residual ? operands.floats() : nullptr;
  std::vector<Matrix> matrices(has_mins.size());
  int64_t num_tiles = 0;
  bool any_fine = false;
  for (size_t i = 0; i < has_mins.size(); ++i) {
    auto y = rets.get<ffi::BufferR2<ffi::F32>>(i);
    if (!y) return ffi::Error::InvalidArgument("packed_matmul: results");
    any_fine |= is_fine[i] != 0;
    if (!operands.matrix(has_mins[i] != 0, is_fine[i] != 0, (*y)->typed_data(), residual, (*y)->dimensions()[1],
                         matrices[i])) {
      return ffi::Error::InvalidArgument("packed_matmul: weights, or the layer");
    }
    num_tiles += matrices[i].num_tiles();
  }

  static thread_local Room room;
  const Activations activations = room.activations(live, inputs.size / kInputs, any_fine);
  inputs.quantize_all(team, live, activations);
  by_pieces(team, num_tiles, [&](int64_t tile) {
    size_t which = 0;
    while (tile >= matrices[which].num_tiles()) tile -= matrices[which++].num_tiles();
    multiply(matrices[which], tile, activations, live);
  });
  return ffi::Error::Success();
}

// x: float32 [num_tokens, in], of which the first num_live rows are computed. What follows: as above, up to
// the residual, those that there are; then the arrays of gate, up and down.
ffi::Error packed_mlp(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR0<ffi::S32> layer,
                      ffi::BufferR0<ffi::S32> num_live, ffi::RemainingArgs args,
                      ffi::Result<ffi::BufferR2<ffi::F32>> y, ffi::Span<const int64_t> has_mins, int64_t before,
                      float eps, bool has_residual, int64_t activation) {
  Team team(pool);
  const int64_t live = std::clamp<int64_t>(*num_live.typed_data(), 0, x.dimensions()[0]);
  Operands operands(args, *layer.typed_data());
  Inputs inputs{x.typed_data(), nullptr, static_cast<Before>(before), eps, x.dimensions()[1]};
  if (inputs.before != Before::kNothing) inputs.other = operands.floats();
  const float* const residual = has_residual ? operands.floats() : nullptr;
  Matrix gate_matrix, up_matrix, down;
  if (!operands.matrix(has_mins[0] != 0, false, nullptr, nullptr, 0, gate_matrix) ||
      !operands.matrix(has_mins[1] != 0, false, nullptr, nullptr, 0, up_matrix) ||
      !operands.matrix(has_mins[2] != 0, false, y->typed_data(), residual, y->dimensions()[1], down)) {
    return ffi::Error::InvalidArgument("packed_mlp: weights, or the layer");
  }

  static thread_local Room room, hidden_room;
  const Activations activations = room.activations(live, inputs.size / kInputs, false);
  const Activations hidden = hidden_room.activations(live, down.num_groups, false);
  inputs.quantize_all(team, live, activations);
  by_pieces(team, down.num_groups, [&](int64_t group) {
    gated_group(gate_matrix, up_matrix, static_cast<Before>(activation), group, activations, live, hidden);
  });
  by_pieces(team, down.num_tiles(), [&](int64_t tile) { multiply(down, tile, hidden, live); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_packed_matmul, jaxserve::packed_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("has_mins")
                                  .Attr<int64_t>("before")
                                  .Attr<float>("eps")
                                  .Attr<bool>("has_residual")
                                  .Attr<ffi::Span<const int64_t>>("is_fine"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_packed_mlp, jaxserve::packed_mlp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("has_mins")
                                  .Attr<int64_t>("before")
                                  .Attr<float>("eps")
                                  .Attr<bool>("has_residual")
                                  .Attr<int64_t>("activation"));
