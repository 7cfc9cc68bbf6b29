// Attention by the bfloat16 dot product of AVX-512: the same bits for a query whatever is computed beside it.
//
// A file of its own, as all of it is compiled for that instruction set; nothing here is called where it is missing.
// Scores and weights of a query pass through its context chunk by chunk, from position 0 on; a chunk that other queries need
// and this one does not see adds nothing but zeros. (Milakov and Gimelshein 2018 for the running maximum.)

#include "attention.hpp"

#include <algorithm>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace paceline {

#if defined(__AVX512BF16__)

namespace {

constexpr float kUnseen = -1e30f;  // a score that weighs nothing
constexpr int64_t kMostHeadSize = 512;
constexpr int64_t kPanels = kChunk / kPanelTokens;

struct Chunk {
  const uint16_t* keys[kPanels + 1];    // of each panel, and of the first of the next chunk
  const uint16_t* values[kPanels + 1];  // likewise
  int64_t panels;
};

PACELINE_INLINE __m512bh halves(const uint16_t* from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); }

PACELINE_INLINE __m512bh pair_of(const uint16_t* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

// scores [kRows, kChunk]: of a panel's 32 tokens, from x [kRows, size]. ahead: what will be read next.
template <int kRows>
PACELINE_INLINE void score(const uint16_t* x, int64_t size, const uint16_t* keys, const uint16_t* ahead, float* scores) {
  __m512 low_sums[kRows], high_sums[kRows];
  for (int r = 0; r < kRows; ++r) low_sums[r] = high_sums[r] = _mm512_setzero_ps();
  for (int64_t k = 0; k < size; k += 2) {
    ask(ahead + k * kPanelTokens);
    ask(ahead + (k + 1) * kPanelTokens);
    const __m512bh low_keys = halves(keys + k * kPanelTokens), high_keys = halves(keys + (k + 1) * kPanelTokens);
    for (int r = 0; r < kRows; ++r) {
      const __m512bh both = pair_of(x + r * size + k);
      low_sums[r] = _mm512_dpbf16_ps(low_sums[r], low_keys, both);
      high_sums[r] = _mm512_dpbf16_ps(high_sums[r], high_keys, both);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    _mm512_storeu_ps(scores + r * kChunk, low_sums[r]);
    _mm512_storeu_ps(scores + r * kChunk + kWidth, high_sums[r]);
  }
}

// sums [kRows, size] = sums times `kept` of each row plus weights [kRows, kChunk] times the chunk's values.
template <int kRows>
PACELINE_INLINE void weigh(const uint16_t* weights, const float* kept, int64_t size, const Chunk& chunk, float* sums) {
  for (int64_t d = 0; d < size; d += kPanelSize) {
    __m512 low_sums[kRows], high_sums[kRows];
    for (int r = 0; r < kRows; ++r) {
      const __m512 factor = _mm512_set1_ps(kept[r]);
      low_sums[r] = _mm512_mul_ps(_mm512_loadu_ps(sums + r * size + d), factor);
      high_sums[r] = _mm512_mul_ps(_mm512_loadu_ps(sums + r * size + d + kWidth), factor);
    }
    for (int64_t p = 0; p < chunk.panels; ++p) {
      const uint16_t* const values = chunk.values[p] + 2 * d;
      const uint16_t* const ahead = chunk.values[p + 1] + 2 * d;
      for (int64_t t = 0; t < kPanelTokens; t += 2) {
        ask(ahead + t * size);
        ask(ahead + t * size + kPanelSize);
        const __m512bh low_values = halves(values + t * size), high_values = halves(values + t * size + kPanelSize);
        for (int r = 0; r < kRows; ++r) {
          const __m512bh both = pair_of(weights + r * kChunk + p * kPanelTokens + t);
          low_sums[r] = _mm512_dpbf16_ps(low_sums[r], low_values, both);
          high_sums[r] = _mm512_dpbf16_ps(high_sums[r], high_values, both);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      _mm512_storeu_ps(sums + r * size + d, low_sums[r]);
      _mm512_storeu_ps(sums + r * size + d + kWidth, high_sums[r]);
    }
  }
}

// A query's progress through its context.
struct Running {
  float top = kUnseen, weight = 0.0f;
};

// Turns a row of scores into weights; returns what is kept of the sums so far. seen: tokens of the chunk; count: of its panels.
PACELINE_INLINE float weights_of(float* scores, int64_t seen, int64_t count, float scale, uint16_t* weights, Running& row) {
  const auto lanes = [&](int64_t t) {
    return static_cast<__mmask16>(seen >= t + kWidth ? 0xFFFF : (1 << std::max<int64_t>(seen - t, 0)) - 1);
  };
  __m512 top = _mm512_set1_ps(row.top);
  for (int64_t t = 0; t < count; t += kWidth) {
    const __m512 seen_scores = _mm512_mask_loadu_ps(_mm512_set1_ps(kUnseen), lanes(t), scores + t);
    _mm512_storeu_ps(scores + t, seen_scores);
    top = _mm512_max_ps(top, seen_scores);
  }
  const float next = _mm512_reduce_max_ps(top);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t t = 0; t < count; t += kWidth) {
    const Lane behind = load(scores + t) - next;
    const __m512 weight = _mm512_maskz_mov_ps(lanes(t), reinterpret_cast<__m512>(exponential(behind * scale)));
    sum = _mm512_add_ps(sum, weight);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + t), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weight)));
  }
  const float kept = exponential(Lane{} + (row.top - next) * scale)[0];
  row.weight = row.weight * kept + _mm512_reduce_add_ps(sum);
  row.top = next;
  return kept;
}

template <int kRows>
void attend(const AttentionShape& shape, const Queries& queries) {
  const int64_t size = shape.head_size, group = shape.group(), panel = shape.panel_halves();
  alignas(64) uint16_t x[kRows * kMostHeadSize];
  alignas(64) float scores[kRows * kChunk], sums[kRows * kMostHeadSize];
  alignas(64) uint16_t weights[kRows * kChunk];
  Running rows[kRows];
  int64_t seen[kRows];
  float kept[kRows];
  const auto place = [&](int r) {
    const int64_t row = queries.first + r;
    return (row / group * shape.heads + row % group) * size;
  };
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(x + r * size, queries.x + place(r), static_cast<size_t>(size) * sizeof(uint16_t));
    seen[r] = queries.context + (queries.first + r) / group;
  }
  std::fill_n(sums, kRows * size, 0.0f);
  const int64_t most = seen[kRows - 1];
  const auto keys_at = [&](int64_t t) {
    const int64_t at = std::min(t, most - 1), block = queries.blocks[at / shape.block_tokens];
    return queries.cache + block * shape.block_step + at % shape.block_tokens / kPanelTokens * panel;
  };
  const int64_t behind_keys = shape.block_tokens * size;
  for (int64_t begin = 0; begin < most; begin += kChunk) {
    Chunk chunk;
    chunk.panels = std::min(kPanels, (most - begin + kPanelTokens - 1) / kPanelTokens);
    for (int64_t p = 0; p <= chunk.panels; ++p) {
      chunk.keys[p] = keys_at(begin + p * kPanelTokens);
      chunk.values[p] = chunk.keys[p] + behind_keys;
    }
    for (int64_t p = 0; p < chunk.panels; ++p) {
      const bool is_last = p + 1 == chunk.panels;
      score<kRows>(x, size, chunk.keys[p], is_last ? chunk.values[0] : chunk.keys[p + 1], scores + p * kPanelTokens);
    }
    for (int r = 0; r < kRows; ++r)
      kept[r] = weights_of(scores + r * kChunk, seen[r] - begin, chunk.panels * kPanelTokens, shape.scale,
                           weights + r * kChunk, rows[r]);
    chunk.values[chunk.panels] = chunk.keys[chunk.panels];  // what is read next
    weigh<kRows>(weights, kept, size, chunk, sums);
  }
  for (int r = 0; r < kRows; ++r) {
    const __m512 share = _mm512_set1_ps(1.0f / rows[r].weight);
    for (int64_t d = 0; d < size; d += kWidth) {
      const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(sums + r * size + d), _mm512_setzero_ps());  // -0 becomes 0
      const __m256bh mean = _mm512_cvtneps_pbh(_mm512_mul_ps(sum, share));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(queries.y + place(r) + d), reinterpret_cast<__m256i>(mean));
    }
  }
}

template <int kRows = kMostQueries>
void attend_few(const AttentionShape& shape, const Queries& queries) {
  if constexpr (kRows > 1)
    if (queries.count < kRows) return attend_few<kRows - 1>(shape, queries);
  attend<kRows>(shape, queries);
}

}  // namespace

const bool kAttentionBuilt = true;

void attend_dot(const AttentionShape& shape, const Queries& queries) { attend_few(shape, queries); }

#else

const bool kAttentionBuilt = false;

void attend_dot(const AttentionShape&, const Queries&) {}

#endif

}  // namespace paceline
