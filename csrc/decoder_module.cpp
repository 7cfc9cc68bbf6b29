// paceline._decoder: the forward pass of a small Llama-like decoder on the CPU, over rows of a key-value cache.
//
// A drafter's pass over a few tokens is some 0.3 million multiplications and, in torch, some 50 calls that cost more.
// Here it is one call, float32, on one thread. Weights are packed once into panels of kPanel outputs, so that a product
// streams them in order; attention reads each token's own row up to its position, so nothing is padded or masked.
// What it computes decides which tokens are drafted, never which are accepted: the last bits do not matter.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define PACELINE_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PACELINE_SIMD
#endif
#define PACELINE_INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t kWidth = 16;
constexpr int64_t kLanes = 4;
constexpr int64_t kPanel = kWidth * kLanes;

typedef float Lane __attribute__((vector_size(64)));
typedef int32_t LaneInt __attribute__((vector_size(64)));

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Store = nb::ndarray<float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;  // [rows, positions, kv heads, head_dim]
using Out = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using LayerArrays = std::tuple<Matrix, std::optional<Vector>, Matrix, std::optional<Vector>, Matrix, Matrix>;

PACELINE_INLINE Lane load(const float* from) {
  Lane value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

PACELINE_INLINE void store(float* to, Lane value) { std::memcpy(to, &value, sizeof value); }

PACELINE_INLINE float sum(Lane value) {
  float parts[kWidth];
  store(parts, value);
  for (int64_t half = kWidth / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
}

// exp(x) for x <= 88, within 2e-7 of it; 0 far below. 2^n times a polynomial in the rest.
PACELINE_INLINE Lane exponential(Lane x) {
  x = x < -87.0f ? Lane{} - 87.0f : x;
  x = x > 88.0f ? Lane{} + 88.0f : x;
  const Lane scaled = x * 1.44269504f + 12582912.0f;  // its low bits are the nearest integer
  const LaneInt whole = reinterpret_cast<LaneInt>(scaled);
  const Lane rest = x - (scaled - 12582912.0f) * 0.693147181f;
  Lane p = rest * (1.0f / 720) + 1.0f / 120;
  p = p * rest + 1.0f / 24;
  p = p * rest + 1.0f / 6;
  p = p * rest + 0.5f;
  p = p * rest + 1.0f;
  p = p * rest + 1.0f;
  return reinterpret_cast<Lane>(reinterpret_cast<LaneInt>(p) + (whole << 23));
}

// A weight [outputs, inputs] as panels [outputs / kPanel][inputs][kPanel], the last one filled up with zeros.
struct Packed {
  int64_t outputs = 0, inputs = 0;
  std::vector<float> panels, bias;

  Packed() = default;
  Packed(const Matrix& weight, const std::optional<Vector>& added)
      : outputs(static_cast<int64_t>(weight.shape(0))), inputs(static_cast<int64_t>(weight.shape(1))) {
    panels.assign(static_cast<size_t>(padded() * inputs), 0.0f);
    bias.assign(static_cast<size_t>(padded()), 0.0f);
    for (int64_t o = 0; o < outputs; ++o)
      for (int64_t k = 0; k < inputs; ++k)
        panels[static_cast<size_t>((o / kPanel * inputs + k) * kPanel + o % kPanel)] = weight.data()[o * inputs + k];
    if (added) std::copy_n(added->data(), outputs, bias.begin());
  }

  int64_t padded() const { return (outputs + kPanel - 1) / kPanel * kPanel; }
};

// kTokens rows of x times one panel. y += where kAdd, y = otherwise.
template <int kTokens>
PACELINE_INLINE void multiply_panel(const float* x, int64_t x_stride, const float* panel, int64_t inputs,
                                    const float* bias, float* y, int64_t y_stride) {
  Lane acc[kTokens][kLanes];
  for (int t = 0; t < kTokens; ++t)
    for (int j = 0; j < kLanes; ++j) acc[t][j] = load(bias + j * kWidth);
  for (int64_t k = 0; k < inputs; ++k) {
    Lane w[kLanes];
    for (int j = 0; j < kLanes; ++j) w[j] = load(panel + k * kPanel + j * kWidth);
    for (int t = 0; t < kTokens; ++t) {
      const float value = x[t * x_stride + k];
      for (int j = 0; j < kLanes; ++j) acc[t][j] += w[j] * value;
    }
  }
  for (int t = 0; t < kTokens; ++t)
    for (int j = 0; j < kLanes; ++j) store(y + t * y_stride + j * kWidth, acc[t][j]);
}

// y [tokens, weight.padded()] = x [tokens, weight.inputs] times the weight, plus its bias.
PACELINE_SIMD void multiply(const float* x, int64_t tokens, const Packed& weight, float* y) {
  const int64_t stride = weight.padded();
  for (int64_t first = 0; first < stride; first += kPanel) {
    const float* panel = weight.panels.data() + first * weight.inputs;
    const float* bias = weight.bias.data() + first;
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4)
      multiply_panel<4>(x + t * weight.inputs, weight.inputs, panel, weight.inputs, bias, y + t * stride + first,
                        stride);
    for (; t < tokens; ++t)
      multiply_panel<1>(x + t * weight.inputs, weight.inputs, panel, weight.inputs, bias, y + t * stride + first,
                        stride);
  }
}

// RMS norm without its weight, and smaller by sqrt(size): both are in the weights that follow.
PACELINE_SIMD void normalise(const float* x, int64_t size, float eps, float* y) {
  Lane squares{};
  for (int64_t i = 0; i < size; i += kWidth) {
    const Lane value = load(x + i);
    squares += value * value;
  }
  const float factor = 1.0f / std::sqrt(sum(squares) + eps);
  for (int64_t i = 0; i < size; i += kWidth) store(y + i, load(x + i) * factor);
}

// out [size] = silu(gate) * up
PACELINE_SIMD void gate(const float* gates, const float* ups, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += kWidth) {
    const Lane value = load(gates + i);
    store(out + i, value / (1.0f + exponential(-value)) * load(ups + i));
  }
}

PACELINE_SIMD void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = head[i], second = head[i + half];
    head[i] = first * cos[i] - second * sin[i];
    head[i + half] = second * cos[i] + first * sin[i];
  }
}

// out [kCount * kWidth] = share * sum over i of scores[i] * values[i]
template <int kCount>
PACELINE_INLINE void mix(const float* values, const float* scores, int64_t count, int64_t stride, float share,
                         float* out) {
  Lane even[kCount] = {}, odd[kCount] = {};
  int64_t i = 0;
  for (; i + 2 <= count; i += 2)
    for (int j = 0; j < kCount; ++j) {
      even[j] += load(values + i * stride + j * kWidth) * scores[i];
      odd[j] += load(values + (i + 1) * stride + j * kWidth) * scores[i + 1];
    }
  if (i < count)
    for (int j = 0; j < kCount; ++j) even[j] += load(values + i * stride + j * kWidth) * scores[i];
  for (int j = 0; j < kCount; ++j) store(out + j * kWidth, (even[j] + odd[j]) * share);
}

// Sums of 16 vectors, one in each place, by halves: after a round each vector holds the sums of twice as many.
PACELINE_INLINE Lane sum_each(Lane* vectors) {
  const LaneInt even8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  const LaneInt even4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
  const LaneInt even2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  const LaneInt even1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
  for (int i = 0; i < 8; ++i)
    vectors[i] = __builtin_shuffle(vectors[i], vectors[i + 8], even8) + __builtin_shuffle(vectors[i], vectors[i + 8], even8 + 8);
  for (int i = 0; i < 4; ++i)
    vectors[i] = __builtin_shuffle(vectors[i], vectors[i + 4], even4) + __builtin_shuffle(vectors[i], vectors[i + 4], even4 + 4);
  for (int i = 0; i < 2; ++i)
    vectors[i] = __builtin_shuffle(vectors[i], vectors[i + 2], even2) + __builtin_shuffle(vectors[i], vectors[i + 2], even2 + 2);
  return __builtin_shuffle(vectors[0], vectors[1], even1) + __builtin_shuffle(vectors[0], vectors[1], even1 + 1);
}

// One query head over `count` keys and values that lie `stride` floats apart. scores: room for count + kWidth.
PACELINE_SIMD void attend(const float* query, const float* keys, const float* values, int64_t count, int64_t stride,
                          int64_t head_dim, float scaling, float* scores, float* out) {
  const Lane places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Lane lowest = Lane{} - 3.0e38f;
  Lane tops = lowest;
  for (int64_t i = 0; i < count; i += kWidth) {
    const int64_t left = std::min(kWidth, count - i);
    Lane dots[kWidth];
    for (int64_t place = 0; place < kWidth; ++place) {
      const float* key = keys + (i + std::min(place, left - 1)) * stride;
      Lane dot = load(query) * load(key);
      for (int64_t d = kWidth; d < head_dim; d += kWidth) dot += load(query + d) * load(key + d);
      dots[place] = dot;
    }
    Lane found = sum_each(dots) * scaling;
    found = places < static_cast<float>(left) ? found : lowest;
    tops = found > tops ? found : tops;
    store(scores + i, found);
  }
  float parts[kWidth];
  store(parts, tops);
  const float top = *std::max_element(parts, parts + kWidth);
  Lane total{};
  for (int64_t i = 0; i < count; i += kWidth) {
    Lane weights = exponential(load(scores + i) - top);
    weights = load(scores + i) > lowest ? weights : Lane{};
    store(scores + i, weights);
    total += weights;
  }
  const float share = 1.0f / sum(total);
  for (int64_t d = 0; d < head_dim; d += kWidth * kLanes) {
    const int64_t lanes = std::min(kLanes, (head_dim - d) / kWidth);
    if (lanes == kLanes)
      mix<kLanes>(values + d, scores, count, stride, share, out + d);
    else
      for (int64_t lane = 0; lane < lanes; ++lane)
        mix<1>(values + d + lane * kWidth, scores, count, stride, share, out + d + lane * kWidth);
  }
}

struct Layer {
  Packed qkv, output, gate_up, down;
};

class Decoder {
 public:
  Decoder(const Matrix& embedding, const Matrix& head, const Vector& norm, const std::vector<LayerArrays>& layers,
          const Matrix& cos, const Matrix& sin, float eps, float scaling, int64_t kv_heads)
      : hidden_(static_cast<int64_t>(embedding.shape(1))),
        half_(static_cast<int64_t>(cos.shape(1))),
        kv_heads_(kv_heads),
        eps_(eps),
        scaling_(scaling),
        embedding_(copy(embedding)),
        norm_(norm.data(), norm.data() + norm.shape(0)),
        cos_(copy(cos)),
        sin_(copy(sin)),
        head_(head, std::nullopt) {
    vocab_ = static_cast<int64_t>(embedding.shape(0));
    positions_ = static_cast<int64_t>(cos.shape(0));
    for (const auto& [qkv, qkv_bias, output, output_bias, gate_up, down] : layers)
      layers_.push_back({Packed(qkv, qkv_bias), Packed(output, output_bias), Packed(gate_up, std::nullopt),
                         Packed(down, std::nullopt)});
  }

  // Runs token ids[t] of cache row rows[t] at positions[t]; a row's tokens ascend. Fills keys and values, one array a
  // layer, and logits [len(last), vocab] of the tokens `last`.
  void decode(const Ids& ids, const Ids& rows, const Ids& positions, const Ids& last, const std::vector<Store>& keys,
              const std::vector<Store>& values, const Out& logits) const {
    check(ids, rows, positions, last, keys, values, logits);
    nb::gil_scoped_release release;
    const int64_t count = static_cast<int64_t>(ids.shape(0));
    std::vector<float> x(static_cast<size_t>(count * hidden_)), normed(x.size()), wide, mixed;
    for (int64_t t = 0; t < count; ++t)
      std::copy_n(embedding_.data() + ids.data()[t] * hidden_, hidden_, x.data() + t * hidden_);
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      normalise_all(x, count, normed);
      attend_all(layers_[layer], normed, rows, positions, keys[layer], values[layer], wide, mixed);
      add_product(mixed, count, layers_[layer].output, wide, x);
      normalise_all(x, count, normed);
      gate_all(layers_[layer], normed, count, wide, mixed);
      add_product(mixed, count, layers_[layer].down, wide, x);
    }
    const int64_t wanted = static_cast<int64_t>(last.shape(0));
    for (int64_t i = 0; i < wanted; ++i) {
      float* row = normed.data() + i * hidden_;
      normalise(x.data() + last.data()[i] * hidden_, hidden_, eps_, row);
      for (int64_t k = 0; k < hidden_; ++k) row[k] *= norm_[static_cast<size_t>(k)];
    }
    wide.resize(static_cast<size_t>(wanted * head_.padded()));
    multiply(normed.data(), wanted, head_, wide.data());
    const int64_t width = static_cast<int64_t>(logits.shape(1));
    for (int64_t i = 0; i < wanted; ++i)
      std::copy_n(wide.data() + i * head_.padded(), width, logits.data() + i * width);
  }

 private:
  static std::vector<float> copy(const Matrix& from) { return {from.data(), from.data() + from.size()}; }

  void normalise_all(const std::vector<float>& x, int64_t count, std::vector<float>& normed) const {
    for (int64_t t = 0; t < count; ++t) normalise(x.data() + t * hidden_, hidden_, eps_, normed.data() + t * hidden_);
  }

  // x += mixed [count, weight.inputs] times the weight.
  void add_product(const std::vector<float>& mixed, int64_t count, const Packed& weight, std::vector<float>& wide,
                   std::vector<float>& x) const {
    wide.resize(static_cast<size_t>(count * weight.padded()));
    multiply(mixed.data(), count, weight, wide.data());
    for (int64_t t = 0; t < count; ++t)
      for (int64_t k = 0; k < hidden_; ++k) x[static_cast<size_t>(t * hidden_ + k)] += wide[static_cast<size_t>(t * weight.padded() + k)];
  }

  // mixed [count, num_heads * head_dim]: queries, keys and values of the tokens, then each query over its row.
  void attend_all(const Layer& layer, const std::vector<float>& normed, const Ids& rows, const Ids& positions,
                  const Store& keys, const Store& values, std::vector<float>& wide, std::vector<float>& mixed) const {
    const int64_t count = static_cast<int64_t>(rows.shape(0)), head_dim = 2 * half_, stride = kv_heads_ * head_dim;
    const int64_t heads = layer.qkv.outputs / head_dim - 2 * kv_heads_, width = layer.qkv.padded();
    const int64_t row_stride = static_cast<int64_t>(keys.shape(1)) * stride;
    wide.resize(static_cast<size_t>(count * width));
    mixed.resize(static_cast<size_t>(count * heads * head_dim));
    multiply(normed.data(), count, layer.qkv, wide.data());
    int64_t longest = 0;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t position = positions.data()[t], slot = rows.data()[t] * row_stride + position * stride;
      float* own = wide.data() + t * width;
      for (int64_t h = 0; h < heads + kv_heads_; ++h)
        rotate(own + h * head_dim, cos_.data() + position * half_, sin_.data() + position * half_, half_);
      std::copy_n(own + heads * head_dim, stride, keys.data() + slot);
      std::copy_n(own + (heads + kv_heads_) * head_dim, stride, values.data() + slot);
      longest = std::max(longest, position + 1);
    }
    std::vector<float> scores(static_cast<size_t>(longest + kWidth));
    for (int64_t t = 0; t < count; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t begin = rows.data()[t] * row_stride + h / (heads / kv_heads_) * head_dim;
        attend(wide.data() + t * width + h * head_dim, keys.data() + begin, values.data() + begin,
               positions.data()[t] + 1, stride, head_dim, scaling_, scores.data(),
               mixed.data() + (t * heads + h) * head_dim);
      }
  }

  void gate_all(const Layer& layer, const std::vector<float>& normed, int64_t count, std::vector<float>& wide,
                std::vector<float>& mixed) const {
    const int64_t size = layer.down.inputs, width = layer.gate_up.padded();
    wide.resize(static_cast<size_t>(count * width));
    mixed.resize(static_cast<size_t>(count * size));
    multiply(normed.data(), count, layer.gate_up, wide.data());
    for (int64_t t = 0; t < count; ++t)
      gate(wide.data() + t * width, wide.data() + t * width + size, size, mixed.data() + t * size);
  }

  void check(const Ids& ids, const Ids& rows, const Ids& positions, const Ids& last, const std::vector<Store>& keys,
             const std::vector<Store>& values, const Out& logits) const {
    const size_t count = ids.shape(0);
    bool fits = rows.shape(0) == count && positions.shape(0) == count && last.shape(0) == logits.shape(0) &&
                last.shape(0) <= count && keys.size() == layers_.size() && values.size() == layers_.size() &&
                static_cast<int64_t>(logits.shape(1)) <= head_.outputs;
    for (size_t layer = 0; fits && layer < keys.size(); ++layer)
      for (size_t axis = 0; axis < 4; ++axis) fits = fits && keys[layer].shape(axis) == values[layer].shape(axis) &&
                                                     keys[layer].shape(axis) == keys[0].shape(axis);
    fits = fits && static_cast<int64_t>(keys[0].shape(2)) == kv_heads_ &&
           static_cast<int64_t>(keys[0].shape(3)) == 2 * half_;
    for (size_t t = 0; fits && t < count; ++t)
      fits = within(ids.data()[t], vocab_) && within(rows.data()[t], static_cast<int64_t>(keys[0].shape(0))) &&
             within(positions.data()[t], std::min(positions_, static_cast<int64_t>(keys[0].shape(1))));
    for (size_t i = 0; fits && i < last.shape(0); ++i) fits = within(last.data()[i], static_cast<int64_t>(count));
    if (!fits) throw std::invalid_argument("decode: arrays do not fit the model, the cache or each other");
  }

  static bool within(int64_t value, int64_t limit) { return 0 <= value && value < limit; }

  int64_t hidden_, half_, kv_heads_, vocab_ = 0, positions_ = 0;
  float eps_, scaling_;
  std::vector<float> embedding_, norm_, cos_, sin_;
  Packed head_;
  std::vector<Layer> layers_;
};

}  // namespace

NB_MODULE(_decoder, m) {
  nb::class_<Decoder>(m, "Decoder")
      .def(nb::init<const Matrix&, const Matrix&, const Vector&, const std::vector<LayerArrays>&, const Matrix&,
                    const Matrix&, float, float, int64_t>(),
           "embedding"_a, "head"_a, "norm"_a, "layers"_a, "cos"_a, "sin"_a, "eps"_a, "scaling"_a, "num_kv_heads"_a)
      .def("decode", &Decoder::decode, "ids"_a, "rows"_a, "positions"_a, "last"_a, "keys"_a, "values"_a, "logits"_a);
}
