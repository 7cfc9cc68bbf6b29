// The small decoder's loops by the float32 multiply-adds of AVX2, for processors without AVX-512.
//
// A file of its own, as all of it is compiled for that instruction set; nothing here is called where it is missing. The sums
// of products are those of decoder.cpp, in the same order.

#include <algorithm>
#include <type_traits>

#include "avx2.hpp"
#include "decoder.hpp"
#include "decoder_vectors.hpp"

namespace paceline {

#if defined(__AVX2__) && defined(__FMA__)

namespace {

constexpr int64_t kPanel = PackedWeight::kPanel, kGroup = PackedWeight::kGroup;
constexpr int64_t kMostWidened = 32;  // rows for which octets are widened together: their sums stay in the first cache
constexpr int kMostSumsOfTwo = 8;  // vectors of them, of two parts side by side; of one part there may be twelve

// Eight words of each input of a panel, as the weights of kVectors times eight outputs: a vector's begin at offset(vector).
struct Words {
  static constexpr int kVectors = 2, kParts = 4;
  static constexpr int kMostTokens = 6;  // whose sums, with the weights, fit sixteen registers

  const uint32_t* at = nullptr;
  int64_t begins = 0;

  Words() = default;
  Words(const PackedWeight& weight, int64_t panel, int part)
      : at(weight.words.data() + panel * weight.inputs / 2 + part * kEight),
        begins(part / 2 * 2 * kWidth + part % 2 * kEight) {}
  int64_t offset(int vector) const { return begins + vector * kWidth; }
  PACELINE_INLINE void begin_group(int64_t) {}
  PACELINE_INLINE void next(Eight* w) {
    const auto words = load_as<EightWords>(at);
    at += kPanel / 2;
    w[0] = low(words);
    w[1] = high(words);
  }
};

struct Bytes {
  static constexpr int kVectors = 4, kParts = 2;
  static constexpr int kMostTokens = 2;

  const uint32_t* at = nullptr;
  int64_t begins = 0;
  const float* own_scales = nullptr;
  Eight scales[kVectors];

  Bytes() = default;
  Bytes(const PackedWeight& weight, int64_t panel, int part)
      : at(weight.words.data() + panel * weight.inputs / 4 + part * kEight),
        begins(part * kEight),
        own_scales(weight.scales.data() + panel * weight.groups()) {}
  int64_t offset(int vector) const { return begins + vector * kWidth; }
  PACELINE_INLINE void begin_group(int64_t group) {
    for (int v = 0; v < kVectors; ++v) scales[v] = load_as<Eight>(own_scales + group * kPanel + offset(v));
  }
  PACELINE_INLINE void next(Eight* w) {
    ask(at + kAheadWords);
    const auto words = load_as<EightWords>(at);
    at += kPanel / 4;
    for (int v = 0; v < kVectors; ++v) {
      const EightWords top = words << (24 - 8 * v) & 0xFF000000u;  // the octet times 2^24, which is in the scale
      w[v] = __builtin_convertvector(reinterpret_cast<EightInts>(top), Eight) * scales[v];
    }
  }
};

// kTokens rows of x times kCount parts of a panel, from part `part` on.
template <class Part, int kTokens, int kCount, bool kAdd>
PACELINE_INLINE void multiply_tile(const float* x, const PackedWeight& weight, int64_t panel, int part, float* y) {
  constexpr int kVectors = Part::kVectors;
  const int64_t inputs = weight.inputs;
  Part own[kCount] = {Part(weight, panel, part)};
  for (int p = 1; p < kCount; ++p) own[p] = Part(weight, panel, part + p);
  Eight sums[kTokens][kCount][kVectors];
  for (int t = 0; t < kTokens; ++t)
    for (int p = 0; p < kCount; ++p)
      for (int v = 0; v < kVectors; ++v)
        sums[t][p][v] = load_as<Eight>(weight.bias.data() + panel + own[p].offset(v));
  for (int64_t k = 0, group = 0; k < inputs; ++group) {
    for (int p = 0; p < kCount; ++p) own[p].begin_group(group);
    for (const int64_t end = std::min(k + kGroup, inputs); k < end; ++k)
      for (int p = 0; p < kCount; ++p) {
        Eight w[kVectors];
        own[p].next(w);
        for (int t = 0; t < kTokens; ++t)
          for (int v = 0; v < kVectors; ++v) sums[t][p][v] += w[v] * x[t * inputs + k];
      }
  }
  for (int t = 0; t < kTokens; ++t)
    for (int p = 0; p < kCount; ++p)
      for (int v = 0; v < kVectors; ++v) {
        float* const to = y + t * weight.padded + panel + own[p].offset(v);
        store(to, kAdd ? load_as<Eight>(to) + sums[t][p][v] : sums[t][p][v]);
      }
}

// At most kTokens rows of x times a panel, in tiles whose sums fit the registers.
template <class Part, int kTokens, bool kAdd>
PACELINE_INLINE void multiply_panel(const float* x, int64_t count, const PackedWeight& weight, int64_t panel, float* y) {
  if constexpr (kTokens > 1)
    if (count < kTokens) return multiply_panel<Part, kTokens - 1, kAdd>(x, count, weight, panel, y);
  constexpr int kCount = 2 * kTokens * Part::kVectors <= kMostSumsOfTwo ? 2 : 1;
  for (int part = 0; part < Part::kParts; part += kCount)
    multiply_tile<Part, kTokens, kCount, kAdd>(x, weight, panel, part, y);
}

// sums [kTokens, kPanel] += x [kTokens, size] times weights [size, kPanel]
template <int kTokens>
PACELINE_INLINE void add_products(const float* x, int64_t inputs, int64_t size, const float* weights, float* sums) {
  constexpr int kVectors = 2;
  for (int64_t o = 0; o < kPanel; o += kVectors * kEight) {
    Eight own[kTokens][kVectors];
    for (int t = 0; t < kTokens; ++t)
      for (int v = 0; v < kVectors; ++v) own[t][v] = load_as<Eight>(sums + t * kPanel + o + v * kEight);
    for (int64_t k = 0; k < size; ++k) {
      Eight w[kVectors];
      for (int v = 0; v < kVectors; ++v) w[v] = load_as<Eight>(weights + k * kPanel + o + v * kEight);
      for (int t = 0; t < kTokens; ++t)
        for (int v = 0; v < kVectors; ++v) own[t][v] += w[v] * x[t * inputs + k];
    }
    for (int t = 0; t < kTokens; ++t)
      for (int v = 0; v < kVectors; ++v) store(sums + t * kPanel + o + v * kEight, own[t][v]);
  }
}

// The same for at most kTokens rows.
template <int kTokens>
PACELINE_INLINE void add_few(const float* x, int64_t count, int64_t inputs, int64_t size, const float* weights, float* sums) {
  if constexpr (kTokens > 1)
    if (count < kTokens) return add_few<kTokens - 1>(x, count, inputs, size, weights, sums);
  add_products<kTokens>(x, inputs, size, weights, sums);
}

// At most kMostWidened rows of x times a panel of octets, each group of which is widened once for all of them.
template <bool kAdd>
void multiply_widened(const float* x, int64_t count, const PackedWeight& weight, int64_t panel, float* y) {
  constexpr int kAtOnce = Words::kMostTokens;
  const int64_t inputs = weight.inputs;
  alignas(32) float weights[kGroup * kPanel], sums[kMostWidened * kPanel];
  for (int64_t t = 0; t < count; ++t) std::copy_n(weight.bias.data() + panel, kPanel, sums + t * kPanel);
  Bytes parts[Bytes::kParts];
  for (int p = 0; p < Bytes::kParts; ++p) parts[p] = Bytes(weight, panel, p);
  for (int64_t group = 0; group < weight.groups(); ++group) {
    const int64_t begin = group * kGroup, size = std::min(kGroup, inputs - begin);
    for (Bytes& part : parts) {
      part.begin_group(group);
      for (int64_t k = 0; k < size; ++k) {
        Eight w[Bytes::kVectors];
        part.next(w);
        for (int v = 0; v < Bytes::kVectors; ++v) store(weights + k * kPanel + part.offset(v), w[v]);
      }
    }
    for (int64_t t = 0; t < count; t += kAtOnce)
      add_few<kAtOnce>(x + t * inputs + begin, std::min<int64_t>(kAtOnce, count - t), inputs, size, weights,
                       sums + t * kPanel);
  }
  for (int64_t t = 0; t < count; ++t)
    for (int64_t o = 0; o < kPanel; o += kEight) {
      float* const to = y + t * weight.padded + panel + o;
      const auto own = load_as<Eight>(sums + t * kPanel + o);
      store(to, kAdd ? load_as<Eight>(to) + own : own);
    }
}

template <class Part, bool kAdd>
void multiply_panels(const float* x, int64_t count, const PackedWeight& weight, int64_t first, int64_t end, float* y) {
  constexpr int kMost = Part::kMostTokens;
  if constexpr (std::is_same_v<Part, Bytes>)
    if (count > kMost) {
      for (int64_t t = 0; t < count; t += kMostWidened)
        for (int64_t panel = first; panel < end; panel += kPanel)
          multiply_widened<kAdd>(x + t * weight.inputs, std::min(kMostWidened, count - t), weight, panel,
                                 y + t * weight.padded);
      return;
    }
  for (int64_t t = 0; t < count; t += kMost)
    for (int64_t panel = first; panel < end; panel += kPanel)
      multiply_panel<Part, kMost, kAdd>(x + t * weight.inputs, std::min<int64_t>(kMost, count - t), weight, panel,
                                        y + t * weight.padded);
}

}  // namespace

const bool kDecoderAvx2Built = true;

void multiply_avx2(const float* x, int64_t count, const PackedWeight& weight, int64_t first, int64_t end, bool add, float* y) {
  const auto multiply = weight.storage == Storage::kInt8
                            ? (add ? multiply_panels<Bytes, true> : multiply_panels<Bytes, false>)
                            : (add ? multiply_panels<Words, true> : multiply_panels<Words, false>);
  multiply(x, count, weight, first, end, y);
}

const Between between_avx2{normalise<Eight>, gate<Eight>, attend<Eight>};

#else

const bool kDecoderAvx2Built = false;
const Between between_avx2{};

void multiply_avx2(const float*, int64_t, const PackedWeight&, int64_t, int64_t, bool, float*) {}

#endif

}  // namespace paceline
