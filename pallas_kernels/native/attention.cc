#include "attention.h"
#include "attention_decode.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "team.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int64_t kTileRowsWanted = 192;     // of a tile of a prompt: they share the work of laying keys out
constexpr int64_t kCostOfLayingOut = 24;     // of a key, in rows
constexpr int64_t kCostOfReading = 7;        // of a key that is read in place, in rows
constexpr int64_t kCostWorthSharing = 8192;  // in keys times rows, about 10 microseconds: waking a thread
constexpr int64_t kTokensTogether = 16;      // whose K and V one thread writes

// A tile, or some of its blocks.
struct Piece {
  int64_t tile, first_block, end_block;
  int64_t partials;  // where in memory the tile's are; -1: it has none
  int64_t cost;
};

// What a thread keeps for its next call.
struct Plan {
  std::vector<Tile> tiles;
  std::vector<Piece> pieces;
  std::vector<int64_t> split;     // tiles that are in pieces
  std::vector<int64_t> partials;  // where theirs are
  std::vector<float> memory;
};

void list_tiles(const Attention& a, int64_t num_seqs, std::vector<Tile>& tiles) {
  tiles.clear();
  const int64_t most_queries = std::max<int64_t>(1, kTileRowsWanted / a.group());
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t num_queries = a.cu_q_lens[seq + 1] - a.cu_q_lens[seq];
    for (int64_t first = 0; first < num_queries; first += most_queries) {
      Tile tile;
      tile.seq = seq;
      tile.first_query = first;
      tile.is_alone = num_queries == 1;
      tile.num_queries = std::min(most_queries, num_queries - first);
      tile.first_position = a.kv_lens[seq] - num_queries + first;
      tile.first_block = a.since(tile.first_position) / kBlockKeys;
      tile.end_block = (tile.first_position + tile.num_queries - 1) / kBlockKeys + 1;
      for (tile.head = 0; tile.head < a.num_kv_heads; ++tile.head) tiles.push_back(tile);
    }
  }
}

int64_t cost_of(const Attention& a, const Tile& tile) {
  const int64_t keys = tile.first_position + tile.num_queries - a.since(tile.first_position);
  return keys * (tile.num_rows(a) + (reads_in_place(a, tile) ? kCostOfReading : kCostOfLayingOut));
}

// Cuts what would keep a thread busy after the others are done; the costliest pieces come first.
void make_plan(const Attention& a, int64_t num_seqs, int64_t num_threads, Plan& plan) {
  list_tiles(a, num_seqs, plan.tiles);
  plan.pieces.clear();
  plan.split.clear();
  plan.partials.clear();
  int64_t total = 0, used = 0;
  for (const Tile& tile : plan.tiles) total += cost_of(a, tile);
  const int64_t most = num_threads == 1 ? total : std::max(total / (4 * num_threads), kCostWorthSharing / 2);
  for (size_t i = 0; i < plan.tiles.size(); ++i) {
    const Tile& tile = plan.tiles[i];
    const int64_t cost = cost_of(a, tile), num_blocks = tile.end_block - tile.first_block;
    const int64_t cuts = total < kCostWorthSharing ? 1 : std::clamp<int64_t>(cost / most, 1, num_blocks);
    for (int64_t cut = 0; cut < cuts; ++cut) {
      plan.pieces.push_back({static_cast<int64_t>(i), tile.first_block + cut * num_blocks / cuts,
                             tile.first_block + (cut + 1) * num_blocks / cuts, cuts == 1 ? -1 : used, cost / cuts});
    }
    if (cuts > 1) {
      plan.split.push_back(static_cast<int64_t>(i));
      plan.partials.push_back(used);
      used += num_blocks * Partial::size(a, tile.num_rows(a));
    }
  }
  if (static_cast<int64_t>(plan.memory.size()) < used) plan.memory.resize(used);
  std::stable_sort(plan.pieces.begin(), plan.pieces.end(),
                   [](const Piece& x, const Piece& y) { return x.cost > y.cost; });
}

void convert(const float* from, int64_t n, float* to) { std::memcpy(to, from, n * sizeof(float)); }

// To the nearest, ties to even; NaN stays NaN.
void convert(const float* from, int64_t n, BFloat16* to) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    to[i].bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded);
  }
}

void convert(const float* from, int64_t n, int8_t* to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = static_cast<int8_t>(std::nearbyint(std::max(-128.0f, std::min(127.0f, from[i]))));
  }
}

// Rows of the tokens [first, stop) of the step into their pages; v null in latent form.
template <typename T>
void write(const Attention& a, const float* k, const float* v, int64_t first, int64_t stop) {
  T* pool = reinterpret_cast<T*>(a.pool);
  const int64_t v_dim = v == nullptr ? 0 : a.v_dim, rest = a.row_dim - a.k_dim - v_dim;
  std::vector<float> turned(a.k_dim);
  int64_t seq = 0;
  for (int64_t token = first; token < stop; ++token) {
    while (a.cu_q_lens[seq + 1] <= token) ++seq;
    const int64_t position = a.kv_lens[seq] - a.cu_q_lens[seq + 1] + token;
    const int64_t page = a.page_indices[seq * a.pages_per_seq + position / a.page_size];
    for (int64_t head = 0; head < a.num_kv_heads; ++head) {
      const int64_t from = token * a.num_kv_heads + head;
      T* row = pool + ((page * a.num_kv_heads + head) * a.page_size + position % a.page_size) * a.row_dim;
      const float* own = k + from * a.k_dim;
      if (a.cos != nullptr) {
        rotate(a, token, own, a.k_dim, turned.data());
        own = turned.data();
      }
      convert(own, a.k_dim, row);
      if (v != nullptr) convert(v + from * v_dim, v_dim, row + a.k_dim);
      std::memset(row + a.k_dim + v_dim, 0, rest * sizeof(T));
    }
  }
}

void write(const Attention& a, const float* k, const float* v, int64_t first, int64_t stop) {
  switch (a.type) {
    case PoolType::kFloat: return write<float>(a, k, v, first, stop);
    case PoolType::kBFloat16: return write<BFloat16>(a, k, v, first, stop);
    case PoolType::kInt8: return write<int8_t>(a, k, v, first, stop);
  }
}

// Whether lengths fit each other and the page table: what they say is where memory is read and written.
bool fit(const Attention& a, int64_t num_seqs, int64_t num_tokens) {
  if (a.cu_q_lens[0] != 0 || a.cu_q_lens[num_seqs] > num_tokens) return false;
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t num_queries = static_cast<int64_t>(a.cu_q_lens[seq + 1]) - a.cu_q_lens[seq];
    const int64_t kv_len = a.kv_lens[seq];
    if (num_queries < 0) return false;
    if (num_queries > 0 && (kv_len < num_queries || kv_len > a.pages_per_seq * a.page_size)) return false;
  }
  return true;
}

void run(Team& team, const Attention& a, int64_t num_seqs, const float* k, const float* v) {
  const int64_t num_live = a.cu_q_lens[num_seqs];
  if (k != nullptr) {
    const int64_t num_parts = (num_live + kTokensTogether - 1) / kTokensTogether;
    const auto part = [&](int64_t i) {
      write(a, k, v, i * kTokensTogether, std::min(num_live, (i + 1) * kTokensTogether));
    };
    // A few rows are written sooner than another thread wakes up.
    if (num_parts < 8) {
      for (int64_t i = 0; i < num_parts; ++i) part(i);
    } else {
      team.run(num_parts, part);
    }
  }

  static thread_local Plan kept;
  Plan& plan = kept;
  make_plan(a, num_seqs, team.num_threads(), plan);
  float* const memory = plan.memory.data();
  const auto piece = [&](int64_t i) {
    static thread_local Scratch scratch;
    const Piece& p = plan.pieces[i];
    const Tile& tile = plan.tiles[p.tile];
    float* const partials = p.partials < 0 ? nullptr : memory + p.partials;
    if (reads_in_place(a, tile)) attend_alone(a, tile, p.first_block, p.end_block, partials, scratch);
    else attend(a, tile, p.first_block, p.end_block, partials, scratch);
  };
  int64_t total = 0;
  for (const Piece& p : plan.pieces) total += p.cost;
  const int64_t num_pieces = static_cast<int64_t>(plan.pieces.size());
  if (total < kCostWorthSharing) {
    for (int64_t i = 0; i < num_pieces; ++i) piece(i);
  } else {
    team.run(num_pieces, piece);
  }

  const auto joined = [&](int64_t i) {
    static thread_local Scratch scratch;
    join_blocks(a, plan.tiles[plan.split[i]], memory + plan.partials[i], scratch);
  };
  const int64_t num_split = static_cast<int64_t>(plan.split.size());
  constexpr int64_t kFloatsWorthSharing = 1 << 16;
  if (num_split > 0 && static_cast<int64_t>(plan.memory.size()) > kFloatsWorthSharing) {
    team.run(num_split, joined);
  } else {
    for (int64_t i = 0; i < num_split; ++i) joined(i);
  }
}

// q, out: float32 [num_tokens, num_q_heads, k_dim or v_dim]; what follows the others: k, v, sinks, those that
// there are, then cos and sin. The pool is written in place.
ffi::Error attention(ffi::ThreadPool pool, ffi::BufferR3<ffi::F32> q, ffi::AnyBuffer kv_pool,
                     ffi::BufferR0<ffi::S32> layer, ffi::BufferR0<ffi::S32> window, ffi::BufferR1<ffi::S32> kv_lens,
                     ffi::BufferR2<ffi::S32> page_indices, ffi::BufferR1<ffi::S32> cu_q_lens,
                     ffi::RemainingArgs others, ffi::Result<ffi::BufferR3<ffi::F32>> out,
                     ffi::Result<ffi::AnyBuffer> kv_pool_out, float scale, float soft_cap, int64_t v_start, bool has_k,
                     bool has_v, bool has_sinks, bool has_rope) {
  if (kv_pool.untyped_data() != kv_pool_out->untyped_data()) {
    return ffi::Error::Internal("ragged_paged_attention: the pool is not updated in place");
  }
  const auto shape = kv_pool.dimensions();  // [num_layers, num_pages, num_kv_heads, page_size, row_dim]
  const int64_t num_seqs = kv_lens.dimensions()[0], num_tokens = q.dimensions()[0];
  Attention a;
  a.num_q_heads = q.dimensions()[1];
  a.num_kv_heads = shape[2];
  a.k_dim = q.dimensions()[2];
  a.v_dim = out->dimensions()[2];
  a.v_start = v_start;
  a.page_size = shape[3];
  a.row_dim = shape[4];
  a.pages_per_seq = page_indices.dimensions()[1];
  a.scale = scale;
  a.soft_cap = soft_cap;
  a.window = *window.typed_data();
  const auto type = kv_pool.element_type();
  a.type = type == ffi::F32 ? PoolType::kFloat : type == ffi::BF16 ? PoolType::kBFloat16 : PoolType::kInt8;
  const int64_t index = *layer.typed_data();
  if (index < 0 || index >= shape[0]) return ffi::Error::InvalidArgument("ragged_paged_attention: layer");
  const int64_t layer_bytes = static_cast<int64_t>(kv_pool.size_bytes()) / shape[0];
  a.pool = static_cast<uint8_t*>(kv_pool.untyped_data()) + index * layer_bytes;
  a.q = q.typed_data();
  a.out = out->typed_data();
  a.kv_lens = kv_lens.typed_data();
  a.page_indices = page_indices.typed_data();
  a.cu_q_lens = cu_q_lens.typed_data();
  const float* arrays[5] = {};
  const bool has[5] = {has_k, has_v, has_sinks, has_rope, has_rope};
  size_t next = 0;
  for (int i = 0; i < 5; ++i) {
    if (!has[i]) continue;
    const auto array = others.get<ffi::Buffer<ffi::F32>>(next++);
    if (!array) return array.error();
    if (i == 3) a.half_dim = array->dimensions()[1];
    arrays[i] = array->typed_data();
  }
  a.sinks = arrays[2];
  a.cos = arrays[3];
  a.sin = arrays[4];
  if (!fit(a, num_seqs, num_tokens)) {
    return ffi::Error::InvalidArgument("ragged_paged_attention: kv_lens, cu_q_lens and page_indices do not fit");
  }
  Team team(pool);
  run(team, a, num_seqs, arrays[0], arrays[1]);
  const int64_t num_live = a.cu_q_lens[num_seqs], row = a.num_q_heads * a.v_dim;
  std::memset(a.out + num_live * row, 0, (num_tokens - num_live) * row * sizeof(float));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attention, jaxserve::attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR3<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("v_start")
                                  .Attr<bool>("has_k")
                                  .Attr<bool>("has_v")
                                  .Attr<bool>("has_sinks")
                                  .Attr<bool>("has_rope"));
