// What the small decoder does between its products, for vectors of any number of floats that divides 16 (simd.hpp, avx2.hpp).

#pragma once

#include <algorithm>
#include <cmath>

#include "decoder.hpp"
#include "simd.hpp"

namespace paceline {

template <class Vector>
constexpr int64_t kFloats = sizeof(Vector) / sizeof(float);

template <class Vector>
PACELINE_INLINE float sum(Vector value) {
  float parts[kFloats<Vector>];
  store(parts, value);
  for (int64_t half = kFloats<Vector> / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
}

// RMS norm without its weight, and smaller by sqrt(size): both are in the weights that follow.
template <class Vector>
PACELINE_INLINE void normalise(const float* x, int64_t size, float eps, float* y) {
  Vector squares{};
  for (int64_t i = 0; i < size; i += kFloats<Vector>) {
    const auto value = load_as<Vector>(x + i);
    squares += value * value;
  }
  const float factor = 1.0f / std::sqrt(sum(squares) + eps);
  for (int64_t i = 0; i < size; i += kFloats<Vector>) store(y + i, load_as<Vector>(x + i) * factor);
}

// out [size] = silu(gate) * up
template <class Vector>
PACELINE_INLINE void gate(const float* gates, const float* ups, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += kFloats<Vector>) {
    const auto value = load_as<Vector>(gates + i);
    store(out + i, value / (1.0f + exponential(-value)) * load_as<Vector>(ups + i));
  }
}

// scores of kHeads queries over kBlocks times so many keys as a vector has floats, from key `first` on; scores of a head lie
// `stride` apart.
template <class Vector, int kHeads, int kBlocks>
PACELINE_INLINE void score(const Attention& job, int64_t first_key, const float* queries, float* scores) {
  const int64_t half = job.head_dim / 2;
  const uint32_t* blocks[kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    const int64_t key = first_key + b * kFloats<Vector>;
    blocks[b] = job.keys + key / kWidth * kWidth * half + key % kWidth;
  }
  Vector first[kHeads][kBlocks] = {}, second[kHeads][kBlocks] = {};
  for (int64_t d = 0; d < half; ++d)
    for (int b = 0; b < kBlocks; ++b) {
      ask(blocks[b] + d * kWidth + kAheadWords);
      const auto words = load_as<WordsOf<Vector>>(blocks[b] + d * kWidth);
      for (int h = 0; h < kHeads; ++h) {
        first[h][b] += low(words) * queries[2 * h * half + d];
        second[h][b] += high(words) * queries[(2 * h + 1) * half + d];
      }
    }
  for (int h = 0; h < kHeads; ++h)
    for (int b = 0; b < kBlocks; ++b)
      store(scores + h * job.stride + first_key + b * kFloats<Vector>, (first[h][b] + second[h][b]) * job.scaling);
}

// Turns `count` scores into weights, zeros behind them; returns 1 / their sum.
template <class Vector>
PACELINE_INLINE float weigh(float* scores, int64_t count) {
  constexpr int64_t kStep = kFloats<Vector>;
  float ascending[kStep];
  for (int64_t i = 0; i < kStep; ++i) ascending[i] = static_cast<float>(i);
  const auto places = load_as<Vector>(ascending);
  const Vector lowest = Vector{} - 3.0e38f;
  Vector tops = lowest;
  for (int64_t i = 0; i < count; i += kStep) {
    auto found = load_as<Vector>(scores + i);
    found = places < static_cast<float>(count - i) ? found : lowest;
    tops = found > tops ? found : tops;
    store(scores + i, found);
  }
  float parts[kStep];
  store(parts, tops);
  const float top = *std::max_element(parts, parts + kStep);
  Vector total{};
  for (int64_t i = 0; i < count; i += kStep) {
    const auto found = load_as<Vector>(scores + i);
    Vector weights = exponential(found - top);
    weights = found > lowest ? weights : Vector{};
    store(scores + i, weights);
    total += weights;
  }
  return 1.0f / sum(total);
}

// out of each head [kCount vectors] = its share * sum over positions of weight * value.
template <class Vector, int kHeads, int kCount>
PACELINE_INLINE void mix(const Attention& job, int64_t dim, const float* shares, float* out) {
  Vector acc[kHeads][kCount] = {};
  for (int64_t i = 0; i < job.count; i += 2)
    for (int j = 0; j < kCount; ++j) {
      const uint32_t* const from = job.values + i / 2 * job.head_dim + dim + j * kFloats<Vector>;
      ask(from + kAheadWords);
      const auto words = load_as<WordsOf<Vector>>(from);
      for (int h = 0; h < kHeads; ++h) {
        acc[h][j] += low(words) * job.scores[h * job.stride + i];
        acc[h][j] += high(words) * job.scores[h * job.stride + i + 1];
      }
    }
  for (int h = 0; h < kHeads; ++h)
    for (int j = 0; j < kCount; ++j) store(out + h * job.head_dim + dim + j * kFloats<Vector>, acc[h][j] * shares[h]);
}

// kHeads query heads from `head` on.
template <class Vector, int kHeads>
PACELINE_INLINE void attend_heads(const Attention& job, int64_t head) {
  constexpr int64_t kStep = kFloats<Vector>;
  constexpr int kAtOnce = 4;
  const float* const queries = job.queries + head * job.head_dim;
  float* const out = job.out + head * job.head_dim;
  int64_t i = 0;
  for (; i + kStep < job.count; i += 2 * kStep) score<Vector, kHeads, 2>(job, i, queries, job.scores);
  if (i < job.count) score<Vector, kHeads, 1>(job, i, queries, job.scores);
  float shares[kHeads];
  for (int h = 0; h < kHeads; ++h) shares[h] = weigh<Vector>(job.scores + h * job.stride, job.count);
  int64_t d = 0;
  for (; d + kAtOnce * kStep <= job.head_dim; d += kAtOnce * kStep) mix<Vector, kHeads, kAtOnce>(job, d, shares, out);
  for (; d < job.head_dim; d += kStep) mix<Vector, kHeads, 1>(job, d, shares, out);
}

template <class Vector>
PACELINE_INLINE void attend(const Attention& job) {
  int64_t h = 0;
  for (; h + 2 <= job.heads; h += 2) attend_heads<Vector, 2>(job, h);
  if (h < job.heads) attend_heads<Vector, 1>(job, h);
}

}  // namespace paceline
