// A small Llama-like decoder's forward pass on the CPU, with its own key-value cache: one row per response.
//
// Keys and values are bfloat16, weights too or, of large models, integers of 8 bits; arithmetic is float32, or in
// integers where the processor has a dot product of octets (decoder_dot.cpp). Weights are packed once into panels of
// outputs, so that a product streams them in order; keys lie in blocks of 16 positions, so that 16 scores are made side
// by side, and the query heads that share a key head read it once. Nothing is padded or masked.
// What it computes decides which tokens are drafted, never which are accepted: the last bits do not matter.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace paceline {

// A weight [outputs, inputs], row by row.
struct MatrixView {
  const float* data;
  int64_t outputs, inputs;
};

// How a model's weights are kept; kInt8Dot: in 8 bits, for the dot product of octets.
enum class Storage { kBfloat16, kInt8, kInt8Dot };

// A weight as panels of 64 outputs, the last one filled up with zeros: words [panels][inputs][32] of two bfloat16, or
// [panels][inputs][16] of four outputs' octets with a scale for each output of kGroup inputs, scales [panels][groups][64].
// For the dot product a word holds four inputs' octets of one output, each 128 more than the weight:
// [panels][inputs / 4][64].
struct PackedWeight {
  static constexpr int64_t kPanel = 64, kGroup = 64;

  PackedWeight(const MatrixView& weight, const float* added, Storage storage);  // added: the bias, nullptr without one

  int64_t outputs, inputs, padded;
  Storage storage;
  std::vector<uint32_t> words;
  std::vector<float> scales, bias;

  int64_t groups() const { return (inputs + kGroup - 1) / kGroup; }

 private:
  void pack_words(const MatrixView& weight);
  template <typename Put>
  void pack_octets(const MatrixView& weight, float unit, const Put& put);
};

// Rows of activations in 8 bits, with a scale for each kGroup inputs.
struct Octets {
  std::vector<int8_t> values;    // [rows, inputs]
  std::vector<float> scales;     // [rows, groups]
  std::vector<int32_t> offsets;  // [rows, groups], what the 128 in each of a weight's octets adds, negated
};

// Whether the processor, and the compiler when this was built, have the dot product of octets (decoder_dot.cpp).
bool has_octet_dot();
extern const bool kOctetDotBuilt;
// By it:
void narrow_rows(const float* x, int64_t count, int64_t inputs, Octets& rows);
// A panel's outputs of all rows, from output `first` on: in place of y or added to it.
void multiply_octets(const Octets& x, int64_t count, const PackedWeight& weight, int64_t first, bool add, float* y);

// Outputs first..end, whole panels, of all rows, by AVX2 (decoder_avx2.cpp): in place of y or added to it.
extern const bool kDecoderAvx2Built;
void multiply_avx2(const float* x, int64_t count, const PackedWeight& weight, int64_t first, int64_t end, bool add, float* y);

// All query heads of a key head over its first `count` keys and values, as LayerStack keeps them.
struct Attention {
  int64_t heads;
  const float* queries;  // [heads, head_dim]
  const uint32_t *keys, *values;
  int64_t count, head_dim;
  float scaling;
  float* scores;  // room for two heads, `stride` apart
  int64_t stride;
  float* out;  // [heads, head_dim]
};

// What is done between the products (decoder_vectors.hpp).
struct Between {
  void (*normalise)(const float* x, int64_t size, float eps, float* y);
  void (*gate)(const float* gates, const float* ups, int64_t size, float* out);
  void (*attend)(const Attention& job);
};
extern const Between between_avx2;

// Makes room for so many; what is there stays.
template <typename T>
void fit(std::vector<T>& room, int64_t size) {
  if (static_cast<int64_t>(room.size()) < size) room.resize(static_cast<size_t>(size));
}

struct DecoderLayer {
  PackedWeight qkv, output, gate_up, down;
};

// Sizes of the model and of its cache.
struct DecoderShape {
  int64_t heads, kv_heads, head_dim, rows, positions;
  float eps, scaling;
};

// Token ids[t] of cache row rows[t] at positions[t]; a row's tokens ascend.
struct Tokens {
  const int64_t *ids, *rows, *positions;
  int64_t count;

  // Those from `first` on, `most` at most.
  Tokens tile(int64_t first, int64_t most) const {
    return {ids ? ids + first : nullptr, rows + first, positions + first, std::min(most, count - first)};
  }
};

// Intermediate results of one thread, kept between calls.
struct Scratch {
  std::vector<float> normed, wide, mixed, scores;
  Octets octets;
};

// Decoder layers, with the keys and values of what has gone through them.
class LayerStack {
 public:
  // cos, sin: [positions, head_dim / 2].
  LayerStack(const DecoderShape& shape, std::vector<DecoderLayer> layers, const float* cos, const float* sin);

  const DecoderShape& shape() const { return shape_; }
  int64_t count() const { return static_cast<int64_t>(layers_.size()); }
  int64_t hidden() const { return layers_[0].down.outputs; }
  int64_t hidden_stride() const { return layers_[0].down.padded; }
  int64_t inputs() const { return layers_[0].qkv.inputs; }  // of the first layer's attention

  // Attention over x [count, its inputs] of the tokens, whose ids are not read, which fills the layer's cache, and MLP
  // behind it, both added to hidden [count, hidden_stride]. x may be scratch.normed. Threads of the caller may run
  // different rows; `threads` share each product's outputs and each attention's key heads, which changes no bit.
  void run(size_t layer, const Tokens& tokens, const float* x, float* hidden, Scratch& scratch, int64_t threads);

  // Into scratch.normed [count, hidden]: RMS norms without their weight, and smaller by sqrt(hidden).
  void normalise_all(const float* hidden, int64_t count, Scratch& scratch) const;

  // Copies the first `length` positions of one row into another, which has the first `known` of them already.
  void copy_row(int64_t source, int64_t target, int64_t known, int64_t length);

 private:
  struct Unmap {
    size_t bytes;
    void operator()(uint32_t* words) const;
  };
  using Store = std::unique_ptr<uint32_t[], Unmap>;

  void attend_all(size_t layer, const Tokens& tokens, const float* x, Scratch& scratch, int64_t threads);
  void attend_head(size_t layer, int64_t kv_head, const Tokens& tokens, Scratch& scratch, float* scores);
  void gate_all(const DecoderLayer& layer, int64_t count, Scratch& scratch, int64_t threads) const;
  Store allocate() const;
  // Words of a row and key head: keys [blocks][head_dim / 2][16], one of d and d + head_dim / 2;
  // values [positions / 2][head_dim], one of an even and the next odd position.
  int64_t head_words() const { return capacity_ * shape_.head_dim / 2; }
  int64_t head_start(int64_t row, int64_t kv_head) const { return (row * shape_.kv_heads + kv_head) * head_words(); }

  DecoderShape shape_;
  int64_t capacity_;
  std::vector<float> cos_, sin_;
  std::vector<DecoderLayer> layers_;
  std::vector<Store> keys_, values_;  // one a layer; pages become resident as rows grow
};

class Decoder {
 public:
  // head: its outputs are the ids of which logits are wanted; kept as `storage` says.
  Decoder(LayerStack layers, const MatrixView& embedding, const MatrixView& head, Storage storage, const float* norm);

  const DecoderShape& shape() const { return layers_.shape(); }
  int64_t context_ids() const { return context_ids_; }
  int64_t vocab() const { return head_.outputs; }
  int64_t hidden_stride() const { return layers_.hidden_stride(); }
  int64_t logits_stride() const { return head_.padded; }

  // Runs the tokens and fills the cache. hidden: [count, hidden_stride]. Threads as in LayerStack::run.
  void run(const Tokens& tokens, float* hidden, Scratch& scratch, int64_t threads = 1);

  // logits [count, logits_stride] from hidden [count, hidden_stride].
  void project(const float* hidden, int64_t count, float* logits, Scratch& scratch, int64_t threads = 1) const;

  void copy_row(int64_t source, int64_t target, int64_t known, int64_t length) {
    layers_.copy_row(source, target, known, length);
  }

 private:
  void run_tile(const Tokens& tokens, float* hidden, Scratch& scratch, int64_t threads);

  LayerStack layers_;
  int64_t context_ids_;
  std::vector<float> embedding_, norm_;
  PackedWeight head_;
};

// A draft head: one layer between the target's embedding and its output head, and the product that fuses what goes in.
class HeadLayer {
 public:
  HeadLayer(LayerStack layer, PackedWeight fused) : layer_(std::move(layer)), fuse_(std::move(fused)) {}

  const LayerStack& layer() const { return layer_; }
  const PackedWeight& fuse() const { return fuse_; }

  // made [count, fuse.outputs] = x [count, fuse.inputs] fused.
  void fuse_all(const float* x, int64_t count, float* made, int64_t threads);

  // Adds to hidden [count, hidden] what LayerStack::run makes of x [count, inputs].
  void run(const Tokens& tokens, const float* x, float* hidden, int64_t threads);

  void copy_row(int64_t source, int64_t target, int64_t known, int64_t length) {
    layer_.copy_row(source, target, known, length);
  }

 private:
  LayerStack layer_;
  PackedWeight fuse_;
  Scratch scratch_;
  std::vector<float> tile_;
};

}  // namespace paceline
