// Linear layers by the float32 multiply-adds of AVX2, for processors without AVX-512, whose sixteen registers of eight floats
// hold the sums of other tiles than linear.hpp's.
//
// A file of its own, as all of it is compiled for that instruction set; nothing here is called where it is missing. The sums
// are those of `Widened` in linear_module.cpp, in the same order: the same bits.

#include "avx2.hpp"
#include "linear.hpp"

namespace paceline {

#if defined(__AVX2__) && defined(__FMA__)

namespace {

constexpr int kFewRows = 2;   // with both parts of a panel: eight sums; GCC spills those of three rows
constexpr int kSomeRows = 6;  // with one part of it: twelve

// Eight outputs of a panel from `first` on, as far as there are so many.
PACELINE_INLINE void put(Eight sums, int64_t first, const Panel& panel, uint16_t* y) {
  const auto halves = narrow<EightHalves>(sums);
  if (panel.outputs >= first + kEight)
    std::memcpy(y + first, &halves, sizeof halves);
  else if (panel.outputs > first)
    std::memcpy(y + first, &halves, static_cast<size_t>(panel.outputs - first) * sizeof(uint16_t));
}

// kRows rows times kParts parts of a panel, from part `part` on: eight words of each input are a part.
template <int kRows, int kParts>
PACELINE_INLINE void multiply_parts(const float* x, const Panel& panel, int part, uint16_t* y, int64_t stride) {
  Eight low_sums[kRows][kParts], high_sums[kRows][kParts];
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kParts; ++p) {
      low_sums[r][p] = load_as<Eight>(panel.bias + (part + p) * kEight);
      high_sums[r][p] = load_as<Eight>(panel.bias + kWidth + (part + p) * kEight);
    }
  const uint32_t* words = panel.words + part * kEight;
  for (int64_t k = 0; k < panel.inputs; ++k, words += kWidth) {
    ask(reinterpret_cast<const char*>(words) + kNear);
    for (int p = 0; p < kParts; ++p) {
      const auto both = load_as<EightWords>(words + p * kEight);
      const Eight low_weights = low(both), high_weights = high(both);
      for (int r = 0; r < kRows; ++r) {
        low_sums[r][p] += low_weights * x[r * panel.inputs + k];
        high_sums[r][p] += high_weights * x[r * panel.inputs + k];
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kParts; ++p) {
      put(low_sums[r][p], (part + p) * kEight, panel, y + r * stride);
      put(high_sums[r][p], kWidth + (part + p) * kEight, panel, y + r * stride);
    }
}

template <int kRows = kSomeRows>
PACELINE_INLINE void multiply_some(const float* x, int64_t rows, const Panel& panel, uint16_t* y, int64_t stride) {
  if constexpr (kRows > 1)
    if (rows < kRows) return multiply_some<kRows - 1>(x, rows, panel, y, stride);
  if constexpr (kRows <= kFewRows) {
    multiply_parts<kRows, 2>(x, panel, 0, y, stride);
  } else {
    multiply_parts<kRows, 1>(x, panel, 0, y, stride);
    multiply_parts<kRows, 1>(x, panel, 1, y, stride);
  }
}

}  // namespace

const bool kAvx2Built = true;

void multiply_panel_avx2(const float* x, int64_t rows, const Panel& panel, uint16_t* y, int64_t stride) {
  const int64_t tiles = (rows + kSomeRows - 1) / kSomeRows;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = rows * i / tiles, end = rows * (i + 1) / tiles;
    multiply_some(x + begin * panel.inputs, end - begin, panel, y + begin * stride, stride);
  }
}

#else

const bool kAvx2Built = false;

void multiply_panel_avx2(const float*, int64_t, const Panel&, uint16_t*, int64_t) {}

#endif

}  // namespace paceline
