// The forward pass of decoder.hpp. Multiply-adds are fused here (-ffp-contract=fast).

#include "decoder.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>

#include "decoder_vectors.hpp"
#include "simd.hpp"
#include "threads.hpp"

namespace paceline {
namespace {

constexpr int64_t kLanes = 4;
constexpr int64_t kPanel = PackedWeight::kPanel;
static_assert(kPanel == kWidth * kLanes);
constexpr float kSmallest = 1e-30f;  // of a group of weights: what it is divided by stays finite
constexpr int64_t kTile = 32;  // tokens that go through all layers together: their activations stay in the cache

PACELINE_INLINE uint32_t pair(float low_half, float high_half) { return rounded(low_half) | rounded(high_half) << 16; }

// A panel's weights of one input after the other, as floats.
struct Words {
  const uint32_t* at;

  PACELINE_INLINE void begin(const PackedWeight& weight, int64_t first) {
    at = weight.words.data() + first * weight.inputs / 2;
  }
  PACELINE_INLINE void begin_group(const PackedWeight&, int64_t, int64_t) {}
  PACELINE_INLINE void next(Lane* w) {
    for (int j = 0; j < kLanes; j += 2, at += kWidth) {
      const LaneWords words = load(at);
      w[j] = low(words);
      w[j + 1] = high(words);
    }
  }
};

struct Bytes {
  const uint32_t* at;
  Lane scales[kLanes];

  PACELINE_INLINE void begin(const PackedWeight& weight, int64_t first) {
    at = weight.words.data() + first * weight.inputs / 4;
  }
  PACELINE_INLINE void begin_group(const PackedWeight& weight, int64_t first, int64_t group) {
    const float* own = weight.scales.data() + first * weight.groups() + group * kPanel;
    for (int j = 0; j < kLanes; ++j) scales[j] = load(own + j * kWidth);
  }
  PACELINE_INLINE void next(Lane* w) {
    const LaneWords words = load_ahead(at);
    at += kWidth;
    for (int j = 0; j < kLanes; ++j) {
      const LaneWords top = words << (24 - 8 * j) & 0xFF000000u;  // the octet times 2^24, which is in the scale
      w[j] = __builtin_convertvector(reinterpret_cast<LaneInt>(top), Lane) * scales[j];
    }
  }
};

// kTokens rows of x times kPanels panels: added to y where kAdd, in place of it otherwise.
template <typename Panel, int kTokens, int kPanels, bool kAdd>
PACELINE_INLINE void multiply_panels(const float* x, const PackedWeight& weight, int64_t first, float* y) {
  const int64_t inputs = weight.inputs;
  Lane acc[kTokens][kPanels * kLanes];
  for (int t = 0; t < kTokens; ++t)
    for (int j = 0; j < kPanels * kLanes; ++j) acc[t][j] = load(weight.bias.data() + first + j * kWidth);
  Panel panels[kPanels];
  for (int p = 0; p < kPanels; ++p) panels[p].begin(weight, first + p * kPanel);
  for (int64_t k = 0, group = 0; k < inputs; ++group) {
    for (int p = 0; p < kPanels; ++p) panels[p].begin_group(weight, first + p * kPanel, group);
    for (const int64_t end = std::min(k + PackedWeight::kGroup, inputs); k < end; ++k) {
      Lane w[kPanels * kLanes];
      for (int p = 0; p < kPanels; ++p) panels[p].next(w + p * kLanes);
      for (int t = 0; t < kTokens; ++t) {
        const float value = x[t * inputs + k];
        for (int j = 0; j < kPanels * kLanes; ++j) acc[t][j] += w[j] * value;
      }
    }
  }
  for (int t = 0; t < kTokens; ++t)
    for (int j = 0; j < kPanels * kLanes; ++j) {
      float* to = y + t * weight.padded + first + j * kWidth;
      store(to, kAdd ? load(to) + acc[t][j] : acc[t][j]);
    }
}

// The panels of a piece of a product, which one thread does.
constexpr int64_t kPiece = 2 * kPanel;

// All rows of x times kPanels panels, with enough sums at a time that none waits for its last multiply-add.
template <typename Panel, int kPanels, bool kAdd>
PACELINE_INLINE void multiply_rows(const float* x, int64_t count, const PackedWeight& weight, int64_t first, float* y) {
  const int64_t inputs = weight.inputs, stride = weight.padded;
  int64_t t = 0;
  for (; t + 6 <= count; t += 6)
    for (int p = 0; p < kPanels; ++p)
      multiply_panels<Panel, 6, 1, kAdd>(x + t * inputs, weight, first + p * kPanel, y + t * stride);
  for (; t + 2 <= count; t += 2)
    multiply_panels<Panel, 2, kPanels, kAdd>(x + t * inputs, weight, first, y + t * stride);
  if (t < count) multiply_panels<Panel, 1, kPanels, kAdd>(x + t * inputs, weight, first, y + t * stride);
}

// The panels from output `first` on, at most a piece.
template <typename Panel, bool kAdd>
PACELINE_INLINE void multiply_piece(const float* x, int64_t count, const PackedWeight& weight, int64_t first, float* y) {
  if (first + 2 * kPanel <= weight.padded)
    multiply_rows<Panel, 2, kAdd>(x, count, weight, first, y);
  else
    multiply_rows<Panel, 1, kAdd>(x, count, weight, first, y);
}

#define PACELINE_PIECE(name, Panel, kAdd)                                                                       \
  PACELINE_WIDE void name(const float* x, int64_t count, const PackedWeight& weight, int64_t first, float* y) { \
    multiply_piece<Panel, kAdd>(x, count, weight, first, y);                                                    \
  }
PACELINE_PIECE(set_words, Words, false)
PACELINE_PIECE(add_words, Words, true)
PACELINE_PIECE(set_bytes, Bytes, false)
PACELINE_PIECE(add_bytes, Bytes, true)
#undef PACELINE_PIECE

bool avx2_is_best() {
  static const bool is = kDecoderAvx2Built && PACELINE_AVX2_IS_BEST();
  return is;
}

// Each piece of a product, shared among threads where that is worth it: work(output it begins with).
template <typename Work>
void share_pieces(int64_t count, const PackedWeight& weight, int64_t threads, const Work& work) {
  share(threads_for(count * weight.inputs * weight.padded, threads), (weight.padded + kPiece - 1) / kPiece,
        [&](int64_t, int64_t i) { work(i * kPiece); });
}

// y [count, weight.padded] = x [count, weight.inputs] times the weight, plus its bias; or y += the same.
void multiply(const float* x, int64_t count, const PackedWeight& weight, bool add, float* y, Octets& room,
              int64_t threads) {
  if (weight.storage == Storage::kInt8Dot) {
    narrow_rows(x, count, weight.inputs, room);
    return share_pieces(count, weight, threads, [&](int64_t first) {
      for (const int64_t end = std::min(first + kPiece, weight.padded); first < end; first += kPanel)
        multiply_octets(room, count, weight, first, add, y);
    });
  }
  if (avx2_is_best())
    return share_pieces(count, weight, threads, [&](int64_t first) {
      multiply_avx2(x, count, weight, first, std::min(first + kPiece, weight.padded), add, y);
    });
  const auto piece = weight.storage == Storage::kInt8 ? (add ? add_bytes : set_bytes) : (add ? add_words : set_words);
  share_pieces(count, weight, threads, [&](int64_t first) { piece(x, count, weight, first, y); });
}

PACELINE_WIDE void normalise_widest(const float* x, int64_t size, float eps, float* y) { normalise<Lane>(x, size, eps, y); }
PACELINE_WIDE void gate_widest(const float* gates, const float* ups, int64_t size, float* out) {
  gate<Lane>(gates, ups, size, out);
}
PACELINE_WIDE void attend_widest(const Attention& job) { attend<Lane>(job); }

// What is done between the products, by the vectors that suit the processor.
const Between& between() {
  static const Between best = avx2_is_best() ? between_avx2 : Between{normalise_widest, gate_widest, attend_widest};
  return best;
}

// Rotary position of one head, in place.
PACELINE_SIMD void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = head[i], second = head[i + half];
    head[i] = first * cos[i] - second * sin[i];
    head[i + half] = second * cos[i] + first * sin[i];
  }
}

// Puts a key into the lane of its position.
PACELINE_SIMD void put_key(const float* key, int64_t half, int64_t position, uint32_t* keys) {
  uint32_t* lane = keys + position / kWidth * half * kWidth + position % kWidth;
  for (int64_t d = 0; d < half; ++d) lane[d * kWidth] = pair(key[d], key[d + half]);
}

// Puts a value in; one at an even position clears its odd neighbour, which is stale.
PACELINE_SIMD void put_value(const float* value, int64_t head_dim, int64_t position, uint32_t* values) {
  uint32_t* words = values + position / 2 * head_dim;
  if (position % 2 == 0)
    for (int64_t d = 0; d < head_dim; ++d) words[d] = rounded(value[d]);
  else
    for (int64_t d = 0; d < head_dim; ++d) words[d] = (words[d] & 0xFFFFu) | rounded(value[d]) << 16;
}

// Rows of so many numbers, between arrays in which they lie apart differently.
void copy_rows(const float* from, int64_t from_stride, int64_t rows, int64_t size, float* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * from_stride, size, to + r * to_stride);
}

int64_t round_up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

}  // namespace

bool has_octet_dot() { return kOctetDotBuilt && PACELINE_SUPPORTS_V4_AND("avx512vnni"); }

PackedWeight::PackedWeight(const MatrixView& weight, const float* added, Storage storage)
    : outputs(weight.outputs), inputs(weight.inputs), padded(round_up(weight.outputs, kPanel)), storage(storage) {
  bias.assign(static_cast<size_t>(padded), 0.0f);
  if (added != nullptr) std::copy_n(added, outputs, bias.begin());
  if (storage == Storage::kBfloat16)
    pack_words(weight);
  else if (storage == Storage::kInt8)
    pack_octets(weight, 0x1p-24f, [this](int64_t o, int64_t k, int32_t value) {
      const auto octet = static_cast<uint32_t>(value) & 0xFFu;
      words[static_cast<size_t>((o / kPanel * inputs + k) * kWidth + o % kWidth)] |= octet << (o % kPanel / kWidth * 8);
    });
  else
    pack_octets(weight, 1.0f, [this](int64_t o, int64_t k, int32_t value) {
      const auto octet = static_cast<uint32_t>(value + 128);
      words[static_cast<size_t>((o / kPanel * inputs + k / 4 * 4) * kWidth + o % kPanel)] |= octet << (k % 4 * 8);
    });
}

void PackedWeight::pack_words(const MatrixView& weight) {
  words.assign(static_cast<size_t>(padded * inputs / 2), 0u);
  for (int64_t o = 0; o < outputs; ++o) {
    // Of 32 outputs the first 16 are the low halves of 16 words, the others the high ones.
    const int64_t word = o % kPanel / (2 * kWidth) * kWidth + o % kWidth, shift = o / kWidth % 2 * 16;
    for (int64_t k = 0; k < inputs; ++k)
      words[static_cast<size_t>((o / kPanel * inputs + k) * kPanel / 2 + word)] |= rounded(weight.data[o * inputs + k])
                                                                                   << shift;
  }
}

// Symmetric: the largest of a group's weights becomes 127. A group with one that is not finite gives NaN, as it would.
// Calls put(output, input, value) for each weight. unit: what 1 stands for in the product.
template <typename Put>
void PackedWeight::pack_octets(const MatrixView& weight, float unit, const Put& put) {
  words.assign(static_cast<size_t>(padded * inputs / 4), 0u);
  scales.assign(static_cast<size_t>(padded * groups()), 0.0f);
  for (int64_t o = 0; o < outputs; ++o) {
    const float* own = weight.data + o * inputs;
    for (int64_t group = 0; group < groups(); ++group) {
      const int64_t begin = group * kGroup, end = std::min(begin + kGroup, inputs);
      float largest = 0.0f;
      for (int64_t k = begin; k < end; ++k) largest = std::isfinite(own[k]) ? std::max(largest, std::abs(own[k])) : NAN;
      scales[static_cast<size_t>((o / kPanel * groups() + group) * kPanel + o % kPanel)] = largest / 127.0f * unit;
      const bool is_there = largest > kSmallest;  // NaN is not
      for (int64_t k = begin; k < end; ++k)
        put(o, k, is_there ? static_cast<int32_t>(std::lround(own[k] * (127.0f / largest))) : 0);
    }
  }
}

LayerStack::LayerStack(const DecoderShape& shape, std::vector<DecoderLayer> layers, const float* cos, const float* sin)
    : shape_(shape),
      capacity_(round_up(shape.positions, kWidth)),
      cos_(cos, cos + shape.positions * shape.head_dim / 2),
      sin_(sin, sin + shape.positions * shape.head_dim / 2),
      layers_(std::move(layers)) {
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    keys_.push_back(allocate());
    values_.push_back(allocate());
  }
}

LayerStack::Store LayerStack::allocate() const {
  const auto bytes = static_cast<size_t>(shape_.rows * shape_.kv_heads * head_words()) * sizeof(uint32_t);
  // A mapping of its own: memory that was used before would be resident already.
  void* words = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (words == MAP_FAILED) throw std::bad_alloc();
  // With huge pages, which some machines give unasked, each short row would take some megabytes.
  static_cast<void>(madvise(words, bytes, MADV_NOHUGEPAGE));
  return Store(static_cast<uint32_t*>(words), Unmap{bytes});
}

void LayerStack::Unmap::operator()(uint32_t* words) const { munmap(words, bytes); }

void LayerStack::run(size_t layer, const Tokens& tokens, const float* x, float* hidden, Scratch& scratch,
                     int64_t threads) {
  attend_all(layer, tokens, x, scratch, threads);
  multiply(scratch.mixed.data(), tokens.count, layers_[layer].output, true, hidden, scratch.octets, threads);
  normalise_all(hidden, tokens.count, scratch);
  gate_all(layers_[layer], tokens.count, scratch, threads);
  multiply(scratch.mixed.data(), tokens.count, layers_[layer].down, true, hidden, scratch.octets, threads);
}

Decoder::Decoder(LayerStack layers, const MatrixView& embedding, const MatrixView& head, Storage storage,
                 const float* norm)
    : layers_(std::move(layers)),
      context_ids_(embedding.outputs),
      embedding_(embedding.data, embedding.data + embedding.outputs * embedding.inputs),
      norm_(norm, norm + embedding.inputs),
      head_(head, nullptr, storage) {}

void Decoder::run(const Tokens& tokens, float* hidden, Scratch& scratch, int64_t threads) {
  for (int64_t t = 0; t < tokens.count; t += kTile)
    run_tile(tokens.tile(t, kTile), hidden + t * hidden_stride(), scratch, threads);
}

void Decoder::run_tile(const Tokens& tokens, float* hidden, Scratch& scratch, int64_t threads) {
  const int64_t size = layers_.hidden();
  for (int64_t t = 0; t < tokens.count; ++t)
    std::copy_n(embedding_.data() + tokens.ids[t] * size, size, hidden + t * hidden_stride());
  for (int64_t layer = 0; layer < layers_.count(); ++layer) {
    layers_.normalise_all(hidden, tokens.count, scratch);
    layers_.run(static_cast<size_t>(layer), tokens, scratch.normed.data(), hidden, scratch, threads);
  }
}

void HeadLayer::fuse_all(const float* x, int64_t count, float* made, int64_t threads) {
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t own = std::min(kTile, count - t);
    fit(tile_, own * fuse_.padded);
    multiply(x + t * fuse_.inputs, own, fuse_, false, tile_.data(), scratch_.octets, threads);
    copy_rows(tile_.data(), fuse_.padded, own, fuse_.outputs, made + t * fuse_.outputs, fuse_.outputs);
  }
}

void HeadLayer::run(const Tokens& tokens, const float* x, float* hidden, int64_t threads) {
  const int64_t size = layer_.hidden(), stride = layer_.hidden_stride();
  for (int64_t t = 0; t < tokens.count; t += kTile) {
    const Tokens own = tokens.tile(t, kTile);
    fit(tile_, own.count * stride);
    copy_rows(hidden + t * size, size, own.count, size, tile_.data(), stride);
    layer_.run(0, own, x + t * layer_.inputs(), tile_.data(), scratch_, threads);
    copy_rows(tile_.data(), stride, own.count, size, hidden + t * size, size);
  }
}

void Decoder::project(const float* hidden, int64_t count, float* logits, Scratch& scratch, int64_t threads) const {
  const int64_t size = layers_.hidden();
  layers_.normalise_all(hidden, count, scratch);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t k = 0; k < size; ++k)
      scratch.normed[static_cast<size_t>(i * size + k)] *= norm_[static_cast<size_t>(k)];
  multiply(scratch.normed.data(), count, head_, false, logits, scratch.octets, threads);
}

void LayerStack::copy_row(int64_t source, int64_t target, int64_t known, int64_t length) {
  const int64_t first = known / kWidth * kWidth * shape_.head_dim / 2;
  const int64_t words = round_up(length, kWidth) * shape_.head_dim / 2 - first;
  for (auto* stores : {&keys_, &values_})
    for (Store& words_of : *stores)
      for (int64_t h = 0; h < shape_.kv_heads; ++h)
        std::copy_n(words_of.get() + head_start(source, h) + first, words, words_of.get() + head_start(target, h) + first);
}

void LayerStack::normalise_all(const float* hidden, int64_t count, Scratch& scratch) const {
  const int64_t size = this->hidden();
  fit(scratch.normed, count * size);
  for (int64_t t = 0; t < count; ++t)
    between().normalise(hidden + t * hidden_stride(), size, shape_.eps, scratch.normed.data() + t * size);
}

// mixed [count, heads * head_dim]: queries, keys and values of the tokens, then each query over its row.
void LayerStack::attend_all(size_t layer, const Tokens& tokens, const float* x, Scratch& scratch, int64_t threads) {
  const auto& [heads, kv_heads, head_dim, rows, positions, eps, scaling] = shape_;
  const PackedWeight& qkv = layers_[layer].qkv;
  const int64_t room = 2 * (capacity_ + kWidth);
  fit(scratch.wide, tokens.count * qkv.padded);
  fit(scratch.mixed, tokens.count * heads * head_dim);
  multiply(x, tokens.count, qkv, false, scratch.wide.data(), scratch.octets, threads);
  const int64_t context = std::accumulate(tokens.positions, tokens.positions + tokens.count, tokens.count);
  const int64_t shared = threads_for(2 * context * heads * head_dim, threads);
  fit(scratch.scores, shared * room);
  share(shared, kv_heads, [&](int64_t thread, int64_t h) {
    attend_head(layer, h, tokens, scratch, scratch.scores.data() + thread * room);
  });
}

// One key head of it, and the query heads that share it.
void LayerStack::attend_head(size_t layer, int64_t kv_head, const Tokens& tokens, Scratch& scratch, float* scores) {
  const auto& [heads, kv_heads, head_dim, rows, positions, eps, scaling] = shape_;
  const int64_t half = head_dim / 2, share = heads / kv_heads, width = layers_[layer].qkv.padded;
  for (int64_t t = 0; t < tokens.count; ++t) {
    const int64_t position = tokens.positions[t], start = head_start(tokens.rows[t], kv_head);
    float* own = scratch.wide.data() + t * width;
    float* queries = own + kv_head * share * head_dim;
    float* key = own + (heads + kv_head) * head_dim;
    const float *cos = cos_.data() + position * half, *sin = sin_.data() + position * half;
    for (int64_t h = 0; h < share; ++h) rotate(queries + h * head_dim, cos, sin, half);
    rotate(key, cos, sin, half);
    put_key(key, half, position, keys_[layer].get() + start);
    put_value(key + kv_heads * head_dim, head_dim, position, values_[layer].get() + start);
    between().attend({share, queries, keys_[layer].get() + start, values_[layer].get() + start, position + 1, head_dim,
                      scaling, scores, capacity_ + kWidth,
                      scratch.mixed.data() + (t * heads + kv_head * share) * head_dim});
  }
}

void LayerStack::gate_all(const DecoderLayer& layer, int64_t count, Scratch& scratch, int64_t threads) const {
  const int64_t size = layer.down.inputs, width = layer.gate_up.padded;
  fit(scratch.wide, count * width);
  fit(scratch.mixed, count * size);
  multiply(scratch.normed.data(), count, layer.gate_up, false, scratch.wide.data(), scratch.octets, threads);
  for (int64_t t = 0; t < count; ++t)
    between().gate(scratch.wide.data() + t * width, scratch.wide.data() + t * width + size, size,
                   scratch.mixed.data() + t * size);
}

}  // namespace paceline
