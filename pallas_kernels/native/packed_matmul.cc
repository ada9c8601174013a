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

// Room that a thread keeps for its next call: most calls of a program have the same sizes.
struct Scratch {
  std::vector<int8_t> values, fine;
  std::vector<float> scales, middles, sums;

  void resize(int64_t num_tokens, int64_t num_groups, bool is_fine) {
    values.resize(num_tokens * num_groups * kInputs);
    if (is_fine) fine.resize(num_tokens * num_groups * kInputs);
    for (std::vector<float>* of_groups : {&scales, &middles, &sums}) of_groups->resize(num_tokens * num_groups);
  }
};

// The activations of a call, before they are rounded.
struct Inputs {
  const float* x;      // [num_tokens, size]
  const float* other;  // of a norm: its weight [size]; of a gate: what it is multiplied with, like x
  Before before;
  float eps;
  int64_t size;

  void quantize(int64_t token, Activations to) const {
    const int64_t row = token * size, group = row / kInputs;
    const float* from = x + row;
    if (before != Before::kNothing) {
      static thread_local std::vector<float> kept;
      kept.resize(size);
      float* const made = kept.data();
      if (before == Before::kRmsNorm) rms_norm(from, other, eps, size, made);
      else gate(before, from, other + row, size, made);
      from = made;
    }
    quantize_row(from, to.num_groups, const_cast<int8_t*>(to.values) + row,
                 to.fine == nullptr ? nullptr : const_cast<int8_t*>(to.fine) + row,
                 const_cast<float*>(to.scales) + group, const_cast<float*>(to.middles) + group,
                 const_cast<float*>(to.sums) + group);
  }
};

// x: float32 [num_tokens, in]; the first num_live rows are computed, the others left alone. What follows: the
// norm's weight or the gate's other factor, and the residual, those that there are; then the weights' arrays.
ffi::Error packed_matmul(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR0<ffi::S32> layer,
                         ffi::BufferR0<ffi::S32> num_live, ffi::RemainingArgs args, ffi::RemainingRets rets,
                         ffi::Span<const int64_t> has_mins, int64_t before, float eps, bool has_residual,
                         bool is_fine) {
  Team team(pool);
  const int64_t num_tokens = x.dimensions()[0], index = *layer.typed_data();
  const int64_t live = std::clamp<int64_t>(*num_live.typed_data(), 0, num_tokens);
  size_t next = 0;
  const auto floats = [&](bool is_there) -> const float* {
    if (!is_there) return nullptr;
    return static_cast<const float*>(args.get<ffi::AnyBuffer>(next++)->untyped_data());
  };
  Inputs inputs{x.typed_data(), nullptr, static_cast<Before>(before), eps, x.dimensions()[1]};
  inputs.other = floats(inputs.before != Before::kNothing);
  const float* const residual = floats(has_residual);

  std::vector<Matrix> matrices;
  int64_t num_blocks = 0;
  for (size_t i = 0; i < has_mins.size(); ++i) {
    const auto values = args.get<ffi::AnyBuffer>(next++), scales = args.get<ffi::AnyBuffer>(next++);
    auto y = rets.get<ffi::BufferR2<ffi::F32>>(i);
    if (!values || !scales || !y) return ffi::Error::InvalidArgument("packed_matmul: operands");
    const auto shape = values->dimensions();
    const size_t rank = shape.size();
    if (rank == 4 && (index < 0 || index >= shape[0])) return ffi::Error::InvalidArgument("packed_matmul: layer");
    Matrix m;
    m.values = layer_of(*values, 3, index);
    m.scales = layer_of(*scales, 3, index);
    m.mins = has_mins[i] != 0 ? layer_of(*args.get<ffi::AnyBuffer>(next++), 3, index) : nullptr;
    m.is_half = scales->element_type() == ffi::F16;
    m.bits = static_cast<int>(shape[rank - 1] * 8 / (kOutputs * kInputs));
    m.num_blocks = shape[rank - 3];
    m.num_groups = shape[rank - 2];
    m.groups_per_scale = m.num_groups / scales->dimensions()[rank - 2];
    m.y = (*y)->typed_data();
    m.residual = residual;
    m.num_outputs = (*y)->dimensions()[1];
    num_blocks += m.num_blocks;
    matrices.push_back(m);
  }

  static thread_local Scratch scratch;
  const int64_t num_groups = inputs.size / kInputs;
  scratch.resize(live, num_groups, is_fine);
  const Activations activations{scratch.values.data(), is_fine ? scratch.fine.data() : nullptr,
                                scratch.scales.data(), scratch.middles.data(), scratch.sums.data(), num_groups};
  const int64_t rows_together = std::max<int64_t>(1, kFloatsTogether / inputs.size);
  team.run((live + rows_together - 1) / rows_together, [&](int64_t i) {
    const int64_t end = std::min(live, (i + 1) * rows_together);
    for (int64_t t = i * rows_together; t < end; ++t) inputs.quantize(t, activations);
  });

  // A few pieces for each thread: the last to end is not far behind, and each reads a run of memory.
  const int64_t blocks_together = std::max<int64_t>(1, num_blocks / (4 * team.num_threads()));
  team.run((num_blocks + blocks_together - 1) / blocks_together, [&](int64_t i) {
    const int64_t end = std::min(num_blocks, (i + 1) * blocks_together);
    for (int64_t block = i * blocks_together; block < end; ++block) {
      int64_t own = block;
      size_t which = 0;
      while (own >= matrices[which].num_blocks) own -= matrices[which++].num_blocks;
      block_of_outputs(matrices[which], own, activations, live);
    }
  });
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
                                  .Attr<bool>("is_fine"));
