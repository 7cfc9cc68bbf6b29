// The small decoder's loops by the float32 multiply-adds of AVX2, for processors without AVX-512.
//
// A file of its own, as all of it is compiled for that instruction set; nothing here is called where it is missing. The sums
// of products are those of decoder.cpp, in the same order.

#include <algorithm>

#include "avx2.hpp"
#include "decoder.hpp"
#include "decoder_vectors.hpp"

namespace paceline {

#if defined(__AVX2__) && defined(__FMA__)

namespace {

constexpr int64_t kPanel = PackedWeight::kPanel, kGroup = PackedWeight::kGroup;
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

template <class Part, bool kAdd>
void multiply_panels(const float* x, int64_t count, const PackedWeight& weight, int64_t first, int64_t end, float* y) {
  constexpr int kMost = Part::kMostTokens;
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
