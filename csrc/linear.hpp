// What the kernels of linear layers share: panels of weights, and the order in which tiles of rows pass over them.

#pragma once

#include <cstdint>
#include <cstring>

#include "simd.hpp"

namespace paceline {

constexpr int64_t kPanel = 2 * kWidth;  // outputs whose weights lie together, two for each lane
constexpr int kMostRows = 14;           // that share a pass over a panel: 28 sums and what they need fill the registers
constexpr int64_t kLine = 64;           // bytes
constexpr int64_t kNear = 64 * kLine;   // bytes ahead of a single pass over each panel

typedef uint16_t LaneHalves __attribute__((vector_size(32)));

// To bfloat16, to the nearest, ties to even; NaN stays NaN.
template <class Halves, class Vector>
PACELINE_INLINE Halves narrow(Vector value) {
  const auto bits = reinterpret_cast<WordsOf<Vector>>(value);
  const WordsOf<Vector> nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(value == value ? nearest : WordsOf<Vector>{} + 0x7FC0u, Halves);
}

// A panel of a layer: its weights, a line for each input, and its outputs, at most 32.
struct Panel {
  const uint32_t* words;
  float bias[kPanel];
  int64_t inputs, outputs;
};

// What is asked of memory meanwhile: `step` bytes further on for each input.
struct Ahead {
  const char* at;
  int64_t step;
};

// y [kRows, stride]: of kRows rows of x [kRows, inputs]. Kernel::add adds the products of all inputs to the sums.
template <class Kernel, int kRows>
PACELINE_INLINE void multiply_tile(const typename Kernel::Input* x, const Panel& panel, Ahead ahead, uint16_t* y,
                                   int64_t stride) {
  Lane low_sums[kRows], high_sums[kRows];
  for (int r = 0; r < kRows; ++r) {
    low_sums[r] = load(panel.bias);
    high_sums[r] = load(panel.bias + kWidth);
  }
  Kernel::template add<kRows>(x, panel, ahead, low_sums, high_sums);
  for (int r = 0; r < kRows; ++r) {
    const LaneHalves halves[2] = {narrow<LaneHalves>(low_sums[r]), narrow<LaneHalves>(high_sums[r])};
    std::memcpy(y + r * stride, halves, static_cast<size_t>(panel.outputs) * sizeof(uint16_t));
  }
}

template <class Kernel, int kRows = kMostRows>
PACELINE_INLINE void multiply_few(const typename Kernel::Input* x, int64_t rows, const Panel& panel, Ahead ahead,
                                  uint16_t* y, int64_t stride) {
  if constexpr (kRows > 1)
    if (rows < kRows) return multiply_few<Kernel, kRows - 1>(x, rows, panel, ahead, y, stride);
  multiply_tile<Kernel, kRows>(x, panel, ahead, y, stride);
}

// All rows, in tiles of nearly the same size. A panel that one tile needs arrives while it is used; one that several need
// arrives in equal parts during all tiles of the panel before, so that those which find it in the cache do not leave memory idle.
template <class Kernel>
PACELINE_INLINE void multiply_tiles(const typename Kernel::Input* x, int64_t rows, const Panel& panel, uint16_t* y,
                                    int64_t stride) {
  const int64_t tiles = (rows + kMostRows - 1) / kMostRows, step = kLine / tiles;
  const char* const begins = reinterpret_cast<const char*>(panel.words);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = rows * i / tiles, end = rows * (i + 1) / tiles;
    const Ahead ahead{begins + (tiles == 1 ? kNear : panel.inputs * (kLine + i * step)), step};
    multiply_few<Kernel>(x + begin * panel.inputs, end - begin, panel, ahead, y + begin * stride, stride);
  }
}

// By the bfloat16 dot product of AVX-512 (linear_dot.cpp): x [rows, inputs] in bfloat16, an even number of inputs.
extern const bool kDotBuilt;  // whether the compiler could
void multiply_panel_dot(const uint16_t* x, int64_t rows, const Panel& panel, uint16_t* y, int64_t stride);

// As `Widened` of linear_module.cpp, by AVX2 (linear_avx2.cpp).
extern const bool kAvx2Built;  // whether the compiler could
void multiply_panel_avx2(const float* x, int64_t rows, const Panel& panel, uint16_t* y, int64_t stride);

}  // namespace paceline
