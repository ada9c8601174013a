// Ragged paged attention: see pallas_kernels/ragged_paged_attention.
//
// A tile is a run of a sequence's queries with one key-value head and all query heads that share it; its rows
// are (query, head of the group). It walks blocks of keys, cut from position 0 on whatever the batch. A
// block's K is transposed into scratch, so that one load serves 16 keys; its V is laid out there as floats. A
// row's softmax in a block is about the block's own maximum, and blocks are joined in order. So a row's
// arithmetic is the same in any tile, batch and chunk of the prompt, and however blocks spread over threads.
// But for a sequence's only query: attention_decode.h adds products up in another order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention_math.h"
#include "isa.h"

namespace jaxserve {

constexpr int kLanes = 16;
constexpr int64_t kBlockKeys = 64;  // K and V of a block, heads of 64, stay in the first-level cache
constexpr int64_t kKeysAhead = 64;  // how far before its use a key is asked for
#if defined(JAXSERVE_AVX512_VNNI)
constexpr int kTileRows = 6, kTileVectors = 4;  // 24 sums, 4 vectors and a number, of 32 registers
#else
constexpr int kTileRows = 6, kTileVectors = 1;  // 12 sums, 2 halves and a number, of 16 registers
#endif
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline int64_t whole_vectors(int64_t n) { return (n + kLanes - 1) / kLanes; }

enum class PoolType { kFloat, kBFloat16, kInt8 };

// A call's sizes and arrays.
struct Attention {
  int64_t num_q_heads, num_kv_heads, k_dim, v_dim, v_start;
  int64_t page_size, row_dim, pages_per_seq;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;
  PoolType type;
  uint8_t* pool;       // this layer's [num_pages, num_kv_heads, page_size, row_dim]
  const float* q;      // [num_tokens, num_q_heads, k_dim]
  const float* sinks;  // [num_q_heads], or null
  const float *cos, *sin;  // [num_tokens, half_dim] each, or null: q and k come as they are used
  int64_t half_dim = 0;    // of what turns
  float* out;          // [num_tokens, num_q_heads, v_dim]
  const int32_t* kv_lens;
  const int32_t* page_indices;  // [num_seqs, pages_per_seq]
  const int32_t* cu_q_lens;

  int64_t group() const { return num_q_heads / num_kv_heads; }
  int64_t v_width() const { return whole_vectors(v_dim) * kLanes; }
  // The first key that the query at `position` sees.
  int64_t since(int64_t position) const { return std::max<int64_t>(0, position - window + 1); }
};

struct Tile {
  int64_t seq, head;  // head: of keys and values
  int64_t first_query, num_queries;
  int64_t first_position;          // of its first query in the sequence
  int64_t first_block, end_block;  // that some of its queries see
  bool is_alone;                   // the sequence has no other query in the call

  int64_t num_rows(const Attention& a) const { return num_queries * a.group(); }
};

// What a run of keys makes of some rows: the largest score, the sum of e^(score - largest), and these weights
// times V, [rows, v_width]. Minus infinity and zeros where no key was seen.
struct Partial {
  float *largest, *sum, *out;

  static int64_t size(const Attention& a, int64_t num_rows) { return num_rows * (2 + a.v_width()); }
  Partial from(int64_t row, int64_t v_width) const {
    return {largest + row, sum + row, out + row * v_width};
  }
  static Partial at(float* memory, int64_t num_rows) {
    return {memory, memory + num_rows, memory + 2 * num_rows};
  }
};

// c[0:M, 0:16 N] = a[0:M, 0:depth] * b[0:depth, 0:16 N].
template <int M, int N>
inline void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                     int64_t c_stride) {
  Floats sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[m][n] = zeros();
  }
  for (int64_t d = 0; d < depth; ++d, b += b_stride) {
    Floats row[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) row[n] = load(b + kLanes * n);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Floats x = splat(a[m * a_stride + d]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = fma(x, row[n], sums[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(c + m * c_stride + kLanes * n, sums[m][n]);
  }
}

template <int M>
void multiply_columns(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                      int64_t c_stride, int64_t num_vectors) {
  int64_t n = 0;
  for (; n + kTileVectors <= num_vectors; n += kTileVectors) {
    multiply<M, kTileVectors>(a, a_stride, b + kLanes * n, b_stride, depth, c + kLanes * n, c_stride);
  }
  if constexpr (kTileVectors > 1) {
    for (; n < num_vectors; ++n) {
      multiply<M, 1>(a, a_stride, b + kLanes * n, b_stride, depth, c + kLanes * n, c_stride);
    }
  }
}

using Multiply = void (*)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t, int64_t);
constexpr Multiply kMultiply[kTileRows + 1] = {nullptr,
                                               multiply_columns<1>,
                                               multiply_columns<2>,
                                               multiply_columns<3>,
                                               multiply_columns<4>,
                                               multiply_columns<5>,
                                               multiply_columns<6>};

// Scores of whole vectors, of which keys [first, stop) count, become weights; the others' are 0.
inline void soften(float* scores, int64_t num_vectors, int64_t first, int64_t stop, float soft_cap, float& largest,
                   float& sum) {
  Floats most = splat(kNothing);
  for (int64_t i = 0; i < num_vectors; ++i) {
    Floats x = load(scores + kLanes * i);
    if (soft_cap > 0.0f) x = splat(soft_cap) * tanh(x / splat(soft_cap));
    const int64_t from = first - kLanes * i, to = stop - kLanes * i;
    if (from > 0 || to < kLanes) {
      x = keep_lanes(x, static_cast<int>(std::clamp<int64_t>(from, 0, kLanes)),
                     static_cast<int>(std::clamp<int64_t>(to, 0, kLanes)));
    }
    store(scores + kLanes * i, x);
    most = max(most, x);
  }
  largest = max_lane(most);
  const Floats offset = splat(largest == kNothing ? 0.0f : largest);
  Floats total = zeros();
  for (int64_t i = 0; i < num_vectors; ++i) {
    const Floats p = exp_negative(load(scores + kLanes * i) - offset);
    store(scores + kLanes * i, p);
    total = total + p;
  }
  sum = sum_lanes(total);
}

// Joins what later keys made of some rows, at most 16, to what earlier ones did.
inline void join(Partial state, Partial made, int num_rows, int64_t v_width) {
  float numbers[6][kLanes];  // so that all rows share the exponentials
  auto& [largest, sum, next_largest, next_sum, old_scale, scale] = numbers;
  for (int r = 0; r < kLanes; ++r) {
    const int own = std::min(r, num_rows - 1);
    largest[r] = state.largest[own];
    sum[r] = state.sum[own];
    next_largest[r] = made.largest[own];
    next_sum[r] = made.sum[own];
  }
  const Floats most = max(load(largest), load(next_largest));
  const Floats offset = where_less(splat(kNothing), most, most, zeros());
  const Floats first = exp_negative(load(largest) - offset), second = exp_negative(load(next_largest) - offset);
  store(largest, most);
  store(sum, fma(load(sum), first, load(next_sum) * second));
  store(old_scale, first);
  store(scale, second);
  for (int r = 0; r < num_rows; ++r) {
    state.largest[r] = largest[r];
    state.sum[r] = sum[r];
    float* out = state.out + r * v_width;
    const float* next = made.out + r * v_width;
    const Floats x = splat(old_scale[r]), y = splat(scale[r]);
    for (int64_t d = 0; d < v_width; d += kLanes) store(out + d, fma(load(out + d), x, load(next + d) * y));
  }
}

// Room to work in, kept by each thread.
struct Scratch {
  std::vector<float> memory;

  // Floats for each part, as many as asked for, one behind the other.
  template <size_t N>
  void divide(const int64_t (&sizes)[N], float* (&parts)[N]) {
    int64_t total = kLanes;  // to begin at a cache line
    for (int64_t size : sizes) total += whole_vectors(size) * kLanes;
    if (static_cast<int64_t>(memory.size()) < total) memory.resize(total);
    constexpr uintptr_t kLine = kLanes * sizeof(float);
    float* next = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + kLine - 1) / kLine * kLine);
    for (size_t i = 0; i < N; ++i) {
      parts[i] = next;
      next += whole_vectors(sizes[i]) * kLanes;
    }
  }
};

// Where one position after another of a sequence lies in the pool.
template <typename T>
class Places {
 public:
  Places(const Attention& a, const Tile& tile, int64_t position)
      : a_(a),
        pages_(a.page_indices + tile.seq * a.pages_per_seq + position / a.page_size),
        head_(tile.head),
        offset_(position % a.page_size) {}

  const T* row() const {
    const T* pool = reinterpret_cast<const T*>(a_.pool);
    return pool + ((*pages_ * a_.num_kv_heads + head_) * a_.page_size + offset_) * a_.row_dim;
  }
  void step() {
    if (++offset_ < a_.page_size) return;
    offset_ = 0;
    ++pages_;
  }

 private:
  const Attention& a_;
  const int32_t* pages_;
  const int64_t head_;
  int64_t offset_;
};

// K and V of the keys [first, stop) of a block: keys [k_dim, block] and values [block, v_width]. What lies
// beside these keys may be dead: it is not read. Their lanes of `keys` are stale or another key's, but for the
// caller to mask; their rows of `values` are stale.
template <typename T>
void lay_out(const Attention& a, const Tile& tile, int64_t block, int64_t first, int64_t stop, float* keys,
             float* values) {
  const int64_t v_width = a.v_width(), base = block * kBlockKeys;
  const int64_t end = tile.first_position + tile.num_queries;
  const int k_rest = static_cast<int>(a.k_dim % kLanes), v_rest = static_cast<int>(a.v_dim % kLanes);
  Places<T> places(a, tile, base + first), ahead(a, tile, std::min(end - 1, base + first + kKeysAhead));
  for (int64_t start = first / kLanes * kLanes; start < stop; start += kLanes) {
    const int from = static_cast<int>(std::max<int64_t>(0, first - start));
    const int to = static_cast<int>(std::min<int64_t>(kLanes, stop - start));
    const T* rows[kLanes];
    for (int i = from; i < to; ++i) {
      rows[i] = places.row();
      places.step();
      if (base + start + i + kKeysAhead >= end) continue;
      const char* line = reinterpret_cast<const char*>(ahead.row());
      for (int64_t byte = 0; byte < a.row_dim * static_cast<int64_t>(sizeof(T)); byte += 64) {
        _mm_prefetch(line + byte, _MM_HINT_T1);
      }
      ahead.step();
    }
    for (int i = 0; i < from; ++i) rows[i] = rows[from];
    for (int i = to; i < kLanes; ++i) rows[i] = rows[from];
    Floats square[kLanes];
    int64_t d = 0;
    for (; d + kLanes <= a.k_dim; d += kLanes) {
      for (int i = 0; i < kLanes; ++i) square[i] = load(rows[i] + d);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(keys + (d + i) * kBlockKeys + start, square[i]);
    }
    if (k_rest > 0) {
      for (int i = 0; i < kLanes; ++i) square[i] = load_part(rows[i] + d, k_rest);
      transpose(square);
      for (int i = 0; i < k_rest; ++i) store(keys + (d + i) * kBlockKeys + start, square[i]);
    }
    for (int i = from; i < to; ++i) {
      const T* v = rows[i] + a.v_start;
      float* out = values + (start + i) * v_width;
      int64_t e = 0;
      for (; e + kLanes <= a.v_dim; e += kLanes) store(out + e, load(v + e));
      if (v_rest > 0) store(out + e, load_part(v + e, v_rest));
    }
  }
}

inline void lay_out(const Attention& a, const Tile& tile, int64_t block, int64_t first, int64_t stop, float* keys,
                    float* values) {
  switch (a.type) {
    case PoolType::kFloat: return lay_out<float>(a, tile, block, first, stop, keys, values);
    case PoolType::kBFloat16: return lay_out<BFloat16>(a, tile, block, first, stop, keys, values);
    case PoolType::kInt8: return lay_out<int8_t>(a, tile, block, first, stop, keys, values);
  }
}

// A row of `from` [dim], turned by the angles of `token`: element i of the first half of those that turn with
// element i of the second.
inline void rotate(const Attention& a, int64_t token, const float* from, int64_t dim, float* to) {
  const float *cos = a.cos + token * a.half_dim, *sin = a.sin + token * a.half_dim;
  const float* second = from + a.half_dim;
  for (int64_t i = 0; i < a.half_dim; ++i) {
    to[i] = from[i] * cos[i] - second[i] * sin[i];
    to[a.half_dim + i] = second[i] * cos[i] + from[i] * sin[i];
  }
  std::copy(from + 2 * a.half_dim, from + dim, to + 2 * a.half_dim);
}

// The tile's rows of q, turned and scaled: [rows, k_width], 0 from k_dim on.
inline void load_queries(const Attention& a, const Tile& tile, float* queries, int64_t k_width) {
  const int64_t group = a.group(), token = a.cu_q_lens[tile.seq] + tile.first_query;
  for (int64_t i = 0; i < tile.num_queries; ++i) {
    const float* q = a.q + ((token + i) * a.num_q_heads + tile.head * group) * a.k_dim;
    for (int64_t r = 0; r < group; ++r, q += a.k_dim, queries += k_width) {
      if (a.cos != nullptr) rotate(a, token + i, q, a.k_dim, queries);
      else std::copy_n(q, a.k_dim, queries);
      for (int64_t d = 0; d < a.k_dim; ++d) queries[d] *= a.scale;
      std::fill(queries + a.k_dim, queries + k_width, 0.0f);
    }
  }
}

// A row before any key; a sink is a key without a value.
inline void start(const Attention& a, const Tile& tile, Partial state) {
  const int64_t group = a.group(), num_rows = tile.num_rows(a);
  for (int64_t r = 0; r < num_rows; ++r) {
    state.largest[r] = a.sinks == nullptr ? kNothing : a.sinks[tile.head * group + r % group];
    state.sum[r] = a.sinks == nullptr ? 0.0f : 1.0f;
  }
  std::fill_n(state.out, num_rows * a.v_width(), 0.0f);
}

inline void finish(const Attention& a, const Tile& tile, Partial state) {
  const int64_t group = a.group(), num_rows = tile.num_rows(a), v_width = a.v_width();
  const int64_t token = a.cu_q_lens[tile.seq] + tile.first_query;
  for (int64_t r = 0; r < num_rows; ++r) {
    float* out = a.out + ((token + r / group) * a.num_q_heads + tile.head * group + r % group) * a.v_dim;
    const Floats sum = splat(state.sum[r] == 0.0f ? 1.0f : state.sum[r]);
    int64_t d = 0;
    for (; d + kLanes <= a.v_dim; d += kLanes) store(out + d, load(state.out + r * v_width + d) / sum);
    if (d < a.v_dim) store_part(out + d, load(state.out + r * v_width + d) / sum, static_cast<int>(a.v_dim - d));
  }
}

// Blocks [first_block, end_block) of a tile. `partials` null: all of the tile's, joined and written to the
// output; else what each block made is left there, for `join_blocks`.
inline void attend(const Attention& a, const Tile& tile, int64_t first_block, int64_t end_block, float* partials,
                   Scratch& scratch) {
  const int64_t group = a.group(), num_rows = tile.num_rows(a);
  const int64_t v_width = a.v_width();
  float* parts[6];
  scratch.divide({a.k_dim * kBlockKeys, kBlockKeys * v_width, num_rows * a.k_dim, kTileRows * kBlockKeys,
                  Partial::size(a, kTileRows), Partial::size(a, num_rows)},
                 parts);
  const auto [keys, values, queries, scores, fresh, state_memory] = parts;
  load_queries(a, tile, queries, a.k_dim);
  const Partial state = Partial::at(state_memory, num_rows);
  if (partials == nullptr) start(a, tile, state);

  // As many rows at a time as registers hold, in equal parts.
  const int64_t num_parts = (num_rows + kTileRows - 1) / kTileRows;
  const int64_t last_position = tile.first_position + tile.num_queries - 1;
  for (int64_t block = first_block; block < end_block; ++block) {
    const int64_t base = block * kBlockKeys;
    lay_out(a, tile, block, std::max<int64_t>(0, a.since(tile.first_position) - base),
            std::min(kBlockKeys, last_position + 1 - base), keys, values);
    for (int64_t part = 0; part < num_parts; ++part) {
      const int64_t row = part * num_rows / num_parts;
      const int m = static_cast<int>((part + 1) * num_rows / num_parts - row);
      const auto position = [&](int64_t r) { return tile.first_position + r / group; };
      // Keys of the block that some of these rows see.
      const int64_t first = std::max<int64_t>(0, a.since(position(row)) - base);
      const int64_t stop = std::min(kBlockKeys, position(row + m - 1) + 1 - base);
      Partial made = Partial::at(fresh, kTileRows);
      if (partials != nullptr) {
        made = Partial::at(partials + (block - tile.first_block) * Partial::size(a, num_rows), num_rows);
        made = made.from(row, v_width);
      }
      if (first >= stop) {
        if (partials == nullptr) continue;
        std::fill_n(made.largest, m, kNothing);
        std::fill_n(made.sum, m, 0.0f);
        std::fill_n(made.out, m * v_width, 0.0f);
        continue;
      }
      const int64_t vector = first / kLanes, num_vectors = whole_vectors(stop) - vector;
      const int64_t skipped = vector * kLanes;
      kMultiply[m](queries + row * a.k_dim, a.k_dim, keys + skipped, kBlockKeys, a.k_dim, scores + skipped,
                   kBlockKeys, num_vectors);
      for (int r = 0; r < m; ++r) {
        const int64_t p = position(row + r);
        soften(scores + r * kBlockKeys + skipped, num_vectors, std::max<int64_t>(0, a.since(p) - base) - skipped,
               std::min(kBlockKeys, p + 1 - base) - skipped, a.soft_cap, made.largest[r], made.sum[r]);
      }
      kMultiply[m](scores + first, kBlockKeys, values + first * v_width, v_width, stop - first, made.out, v_width,
                   v_width / kLanes);
      if (partials != nullptr) continue;
      join(state.from(row, v_width), made, m, v_width);
    }
  }
  if (partials == nullptr) finish(a, tile, state);
}

// Joins what the blocks of a tile made, in their order, and writes the output.
inline void join_blocks(const Attention& a, const Tile& tile, float* partials, Scratch& scratch) {
  const int64_t num_rows = tile.num_rows(a), v_width = a.v_width();
  float* parts[1];
  scratch.divide({Partial::size(a, num_rows)}, parts);
  const Partial state = Partial::at(parts[0], num_rows);
  start(a, tile, state);
  for (int64_t block = tile.first_block; block < tile.end_block; ++block) {
    const Partial made = Partial::at(partials, num_rows);
    partials += Partial::size(a, num_rows);
    for (int64_t r = 0; r < num_rows; r += kLanes) {
      const int m = static_cast<int>(std::min<int64_t>(kLanes, num_rows - r));
      join(state.from(r, v_width), made.from(r, v_width), m, v_width);
    }
  }
  finish(a, tile, state);
}

}  // namespace jaxserve
