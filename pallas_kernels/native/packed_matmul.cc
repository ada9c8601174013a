#include "packed_matmul.h"

#include <algorithm>
#include <string>
#include <vector>

#include "team.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

// A weight and its result, as XLA hands them over.
struct Product {
  const uint8_t* values;
  const void* scales;
  const void* mins;  // or null
  bool is_half;      // scales and mins are float16
  int bits;
  int64_t num_blocks, num_groups, groups_per_scale;
  float* y;
  int64_t num_outputs;
};

template <int kBits, typename Scale>
void run_block(const Product& p, int64_t block, const Activations& x, int64_t num_tokens) {
  const Matrix<Scale> matrix{p.values, static_cast<const Scale*>(p.scales), static_cast<const Scale*>(p.mins),
                             p.num_groups, p.groups_per_scale};
  block_of_outputs<kBits>(matrix, block, x, num_tokens, p.y, p.num_outputs);
}

void run_block(const Product& p, int64_t block, const Activations& x, int64_t num_tokens) {
  if (p.bits == 4) {
    p.is_half ? run_block<4, uint16_t>(p, block, x, num_tokens) : run_block<4, float>(p, block, x, num_tokens);
  } else {
    p.is_half ? run_block<8, uint16_t>(p, block, x, num_tokens) : run_block<8, float>(p, block, x, num_tokens);
  }
}

// The part of a stacked array [num_layers, ...] that is layer `layer`; `rank` is that of one layer's.
const uint8_t* layer_of(const ffi::AnyBuffer& array, size_t rank, int64_t layer) {
  const uint8_t* data = static_cast<const uint8_t*>(array.untyped_data());
  if (array.dimensions().size() == rank) return data;
  return data + layer * static_cast<int64_t>(array.size_bytes()) / array.dimensions().front();
}

ffi::ErrorOr<Product> product(ffi::RemainingArgs& args, size_t& next, bool has_mins, int64_t layer,
                              ffi::RemainingRets& rets, size_t index) {
  const auto values = args.get<ffi::AnyBuffer>(next++);
  const auto scales = args.get<ffi::AnyBuffer>(next++);
  auto y = rets.get<ffi::BufferR2<ffi::F32>>(index);
  if (!values || !scales || !y) return ffi::Unexpected(ffi::Error::InvalidArgument("packed_matmul: operands"));
  Product p;
  const auto shape = values->dimensions();
  const size_t rank = shape.size();
  p.num_blocks = shape[rank - 3];
  p.num_groups = shape[rank - 2];
  p.bits = static_cast<int>(shape[rank - 1] * 8 / (kOutputs * kInputs));
  p.groups_per_scale = p.num_groups / scales->dimensions()[rank - 2];
  p.values = layer_of(*values, 3, layer);
  p.scales = layer_of(*scales, 3, layer);
  p.is_half = scales->element_type() == ffi::F16;
  p.mins = nullptr;
  if (has_mins) {
    const auto mins = args.get<ffi::AnyBuffer>(next++);
    if (!mins) return ffi::Unexpected(ffi::Error::InvalidArgument("packed_matmul: minima"));
    p.mins = layer_of(*mins, 3, layer);
  }
  p.y = (*y)->typed_data();
  p.num_outputs = (*y)->dimensions()[1];
  return p;
}

// x: float32 [num_tokens, in]; the first num_live rows are computed, the others are zeros.
ffi::Error packed_matmul(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR0<ffi::S32> layer,
                         ffi::BufferR0<ffi::S32> num_live, ffi::RemainingArgs weights, ffi::RemainingRets rets,
                         ffi::Span<const int64_t> has_mins) {
  Team team(pool);
  const int64_t num_tokens = x.dimensions()[0], num_inputs = x.dimensions()[1];
  const int64_t live = std::clamp<int64_t>(*num_live.typed_data(), 0, num_tokens);
  const int64_t num_groups = num_inputs / kInputs;

  std::vector<Product> products;
  size_t next = 0;
  for (size_t i = 0; i < has_mins.size(); ++i) {
    auto p = product(weights, next, has_mins[i] != 0, *layer.typed_data(), rets, i);
    if (!p) return p.error();
    products.push_back(*p);
    std::memset(p->y + live * p->num_outputs, 0, (num_tokens - live) * p->num_outputs * sizeof(float));
  }

  // Kept for the next call: most calls of a program have the same sizes.
  static thread_local std::vector<int8_t> values;
  static thread_local std::vector<float> scales, middles, sums;
  values.resize(live * num_inputs);
  scales.resize(live * num_groups);
  middles.resize(live * num_groups);
  sums.resize(live * num_groups);
  int8_t* const v = values.data();
  float *const s = scales.data(), *const c = middles.data(), *const m = sums.data();
  const float* const floats = x.typed_data();
  const auto quantize = [&](int64_t t) {
    const int64_t at = t * num_groups;
    quantize_row(floats + t * num_inputs, num_groups, v + t * num_inputs, s + at, c + at, m + at);
  };
  constexpr int64_t kRowsTogether = 16;
  if (live <= kRowsTogether) {
    for (int64_t t = 0; t < live; ++t) quantize(t);
  } else {
    team.run((live + kRowsTogether - 1) / kRowsTogether, [&](int64_t i) {
      const int64_t end = std::min(live, (i + 1) * kRowsTogether);
      for (int64_t t = i * kRowsTogether; t < end; ++t) quantize(t);
    });
  }

  int64_t num_blocks = 0;
  for (const Product& p : products) num_blocks += p.num_blocks;
  // A few pieces for each thread: the last to end is not far behind, and each reads a run of memory.
  const int64_t blocks_together = std::max<int64_t>(1, num_blocks / (4 * team.num_threads()));
  const Activations activations{v, s, c, m, num_groups};
  team.run((num_blocks + blocks_together - 1) / blocks_together, [&](int64_t i) {
    const int64_t end = std::min(num_blocks, (i + 1) * blocks_together);
    for (int64_t block = i * blocks_together; block < end; ++block) {
      int64_t own = block;
      size_t which = 0;
      while (own >= products[which].num_blocks) own -= products[which++].num_blocks;
      run_block(products[which], own, activations, live);
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
                                  .Attr<ffi::Span<const int64_t>>("has_mins"));
