// Attention of a sequence's only query. Its tile has the few rows of a group: laying keys out would cost more
// than they do. K and V are read as they lie: a score is summed over the lanes of products, and sixteen scores
// are reduced together; values are added up in registers.
#pragma once

#include "attention.h"
#include "attention_lanes.h"

namespace jaxserve {

constexpr int kStep = 2 * kLanes;  // elements of a Pair
constexpr int64_t kMostRowsAlone = 8;  // from a larger group on, laying out pays again
#if defined(JAXSERVE_AVX512_VNNI)
constexpr int kRowsAlone = 4, kPairsAlone = 2;  // 16 sums, then what is loaded, of 32 registers
#else
constexpr int kRowsAlone = 3, kPairsAlone = 1;  // 12 sums of 16 registers
#endif

inline bool reads_in_place(const Attention& a, const Tile& tile) {
  return tile.is_alone && a.group() <= kMostRowsAlone;
}

// The order in which `load_pair` gives elements; the rest behind whole pairs stays as it is.
template <typename T>
void arrange(float* row, int64_t dim) {
  if constexpr (!kAlternate<T>) return;
  float pair[kStep];
  for (; dim >= kStep; dim -= kStep, row += kStep) {
    for (int i = 0; i < kLanes; ++i) {
      pair[i] = row[2 * i];
      pair[kLanes + i] = row[2 * i + 1];
    }
    std::memcpy(row, pair, sizeof(pair));
  }
}

// Asks for a Pair's memory.
template <typename T>
inline void prefetch(const T* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  if (kStep * sizeof(T) > 64) _mm_prefetch(reinterpret_cast<const char*>(p + kLanes), _MM_HINT_T1);
}

// Scores of 16 keys, at `keys`, with R queries [R, k_width], which are 0 from k_dim on.
template <int R, typename T>
void score(const float* queries, int64_t k_width, const T* const* keys, const T* const* ahead, int64_t k_dim,
           float* scores) {
  Parts fours[R][4];
  for (int four = 0; four < 4; ++four) {
    const T *const *own = keys + 4 * four, *const *later = ahead + 4 * four;
    Parts sums[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[r][i] = no_parts();
    }
    int64_t d = 0;
    for (; d + kStep <= k_dim; d += kStep) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Pair k = load_pair(own[i] + d);
        prefetch(later[i] + d);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          sums[r][i] = add_products(sums[r][i], k.x, load(queries + r * k_width + d));
          sums[r][i] = add_products(sums[r][i], k.y, load(queries + r * k_width + d + kLanes));
        }
      }
    }
    for (; d < k_dim; d += kLanes) {
      const int rest = static_cast<int>(std::min<int64_t>(kLanes, k_dim - d));
      for (int i = 0; i < 4; ++i) {
        const Floats k = rest == kLanes ? load(own[i] + d) : load_part(own[i] + d, rest);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][i] = add_products(sums[r][i], k, load(queries + r * k_width + d));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) fours[r][four] = four_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(scores + r * kBlockKeys, all_sums(fours[r]));
}

// out[0:R, 0:32 N] = weights[0:R, first:stop] times what lies at `offset` of these keys.
template <int R, int N, typename T>
void weigh(const float* weights, const T* const* keys, const T* const* ahead, int64_t first, int64_t stop, int64_t offset, float* out,
           int64_t v_width) {
  Pair sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) sums[r][n] = {zeros(), zeros()};
  }
  for (int64_t key = first; key < stop; ++key) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const Pair v = load_pair(keys[key] + offset + n * kStep);
      prefetch(ahead[key] + offset + n * kStep);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Floats weight = splat(weights[r * kBlockKeys + key]);
        sums[r][n] = {fma(weight, v.x, sums[r][n].x), fma(weight, v.y, sums[r][n].y)};
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const Pair made = kAlternate<T> ? interleave(sums[r][n]) : sums[r][n];
      store(out + r * v_width + n * kStep, made.x);
      store(out + r * v_width + n * kStep + kLanes, made.y);
    }
  }
}

// One vector, of `rest` elements.
template <int R, typename T>
void weigh_rest(const float* weights, const T* const* keys, int64_t first, int64_t stop, int64_t offset, int rest,
                float* out, int64_t v_width) {
  Floats sums[R];
  for (int r = 0; r < R; ++r) sums[r] = zeros();
  for (int64_t key = first; key < stop; ++key) {
    const T* v = keys[key] + offset;
    const Floats x = rest == kLanes ? load(v) : load_part(v, rest);
    for (int r = 0; r < R; ++r) sums[r] = fma(splat(weights[r * kBlockKeys + key]), x, sums[r]);
  }
  for (int r = 0; r < R; ++r) store(out + r * v_width, sums[r]);
}

// What keys [first, stop) of a block make of R rows. `keys`: where each lies, up to a whole vector; `ahead`:
// where later keys lie.
template <int R, typename T>
void attend_rows(const Attention& a, const float* queries, const T* const* keys, const T* const* ahead,
                 int64_t first, int64_t stop, float* scores, Partial made) {
  const int64_t k_width = whole_vectors(a.k_dim) * kLanes, v_width = a.v_width();
  const int64_t skipped = first / kLanes * kLanes, num_vectors = whole_vectors(stop - skipped);
  for (int64_t key = skipped; key < stop; key += kLanes) {
    score<R>(queries, k_width, keys + key, ahead + key, a.k_dim, scores + key);
  }
  for (int r = 0; r < R; ++r) {
    soften(scores + r * kBlockKeys + skipped, num_vectors, first - skipped, stop - skipped, a.soft_cap,
           made.largest[r], made.sum[r]);
  }
  int64_t d = 0;
  for (; d + kPairsAlone * kStep <= a.v_dim; d += kPairsAlone * kStep) {
    weigh<R, kPairsAlone>(scores, keys, ahead, first, stop, a.v_start + d, made.out + d, v_width);
  }
  if constexpr (kPairsAlone > 1) {
    for (; d + kStep <= a.v_dim; d += kStep) {
      weigh<R, 1>(scores, keys, ahead, first, stop, a.v_start + d, made.out + d, v_width);
    }
  }
  for (; d < a.v_dim; d += kLanes) {
    const int rest = static_cast<int>(std::min<int64_t>(kLanes, a.v_dim - d));
    weigh_rest<R>(scores, keys, first, stop, a.v_start + d, rest, made.out + d, v_width);
  }
}

template <int R, typename T>
void attend_at_most(int num_rows, const Attention& a, const float* queries, const T* const* keys,
                    const T* const* ahead, int64_t first, int64_t stop, float* scores, Partial made) {
  if (num_rows == R) return attend_rows<R>(a, queries, keys, ahead, first, stop, scores, made);
  if constexpr (R > 1) attend_at_most<R - 1>(num_rows, a, queries, keys, ahead, first, stop, scores, made);
}

// As `attend`, of a tile of one query.
template <typename T>
void attend_alone(const Attention& a, const Tile& tile, int64_t first_block, int64_t end_block, float* partials,
                  Scratch& scratch) {
  const int64_t num_rows = a.group(), v_width = a.v_width(), k_width = whole_vectors(a.k_dim) * kLanes;
  float* parts[4];
  scratch.divide({num_rows * k_width, kRowsAlone * kBlockKeys, Partial::size(a, kRowsAlone),
                  Partial::size(a, num_rows)},
                 parts);
  const auto [queries, scores, fresh, state_memory] = parts;
  load_queries(a, tile, queries, k_width);
  for (int64_t r = 0; r < num_rows; ++r) arrange<T>(queries + r * k_width, a.k_dim);
  const Partial state = Partial::at(state_memory, num_rows);
  if (partials == nullptr) start(a, tile, state);

  const int64_t num_parts = (num_rows + kRowsAlone - 1) / kRowsAlone;
  const int64_t since = a.since(tile.first_position), end = tile.first_position + 1;
  const int64_t begin = std::max(since, first_block * kBlockKeys);
  Places<T> places(a, tile, begin);
  // Two blocks by turns: the one at hand, and the one to be asked for.
  const T* rows[2][kBlockKeys];
  const auto locate = [&](int64_t block, const T** to) {
    const int64_t base = block * kBlockKeys;
    const int64_t first = std::max<int64_t>(0, since - base), stop = std::min(kBlockKeys, end - base);
    for (int64_t key = first; key < stop; ++key) {
      to[key] = places.row();
      places.step();
    }
    // Beside them may be dead memory: another key's scores take the places that do not count.
    std::fill(to, to + first, to[first]);
    std::fill(to + stop, to + kBlockKeys, to[stop - 1]);
  };
  locate(first_block, rows[0]);
  for (int64_t block = first_block; block < end_block; ++block) {
    const int64_t base = block * kBlockKeys;
    const int64_t first = std::max<int64_t>(0, since - base), stop = std::min(kBlockKeys, end - base);
    const T** keys = rows[(block - first_block) % 2];
    const T** ahead = rows[(block - first_block + 1) % 2];
    const bool is_last = block + 1 == end_block;
    if (!is_last) locate(block + 1, ahead);
    for (int64_t part = 0; part < num_parts; ++part) {
      const int64_t row = part * num_rows / num_parts;
      const int m = static_cast<int>((part + 1) * num_rows / num_parts - row);
      Partial made = Partial::at(fresh, kRowsAlone);
      if (partials != nullptr) {
        made = Partial::at(partials + (block - tile.first_block) * Partial::size(a, num_rows), num_rows);
        made = made.from(row, v_width);
      }
      attend_at_most<kRowsAlone, T>(m, a, queries + row * k_width, keys, is_last || part > 0 ? keys : ahead,
                                    first, stop, scores, made);
      if (partials == nullptr) join(state.from(row, v_width), made, m, v_width);
    }
  }
  if (partials == nullptr) finish(a, tile, state);
}

inline void attend_alone(const Attention& a, const Tile& tile, int64_t first_block, int64_t end_block,
                         float* partials, Scratch& scratch) {
  switch (a.type) {
    case PoolType::kFloat: return attend_alone<float>(a, tile, first_block, end_block, partials, scratch);
    case PoolType::kBFloat16: return attend_alone<BFloat16>(a, tile, first_block, end_block, partials, scratch);
    case PoolType::kInt8: return attend_alone<int8_t>(a, tile, first_block, end_block, partials, scratch);
  }
}

}  // namespace jaxserve
