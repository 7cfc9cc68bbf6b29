// paceline._linear: products of bfloat16 activations with a layer's bfloat16 weights, in float32, the same bits in any batch.
//
// Each output is one chain of multiply-adds over the inputs, in order, whatever rows share the call and whatever the number
// of threads; they are fused where the instruction set has fused ones. Weights are widened in registers: where there is no
// matrix unit, float32 multiply-adds are up to twice as fast as the bfloat16 dot product, which Intel's cores begin every
// second cycle only.
// docs/decisions/0038-linear-layers.md

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace paceline;

constexpr int64_t kPanel = 2 * kWidth;  // outputs whose weights lie together: a word of two for each input and lane
constexpr int64_t kPiece = 8;           // panels that a thread takes at a time, one after the other in memory
constexpr int kMostRows = 14;           // that share a pass over a panel: 28 sums and what they need fill the registers
constexpr int64_t kMostAtOnce = 512;    // rows: what is widened stays in some tens of megabytes
constexpr int64_t kLine = 64;           // bytes
constexpr int64_t kNear = 64 * kLine;   // bytes ahead of a single pass over each panel

typedef uint16_t LaneHalves __attribute__((vector_size(32)));

// To bfloat16, to the nearest, ties to even; NaN stays NaN.
PACELINE_INLINE LaneHalves narrow(Lane value) {
  const auto bits = reinterpret_cast<LaneWords>(value);
  const LaneWords nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(value == value ? nearest : LaneWords{} + 0x7FC0u, LaneHalves);
}

// A panel of a layer: its weights [inputs][16] and its outputs, at most 32.
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

// y [kRows, stride]: of kRows rows of x [kRows, inputs].
template <int kRows>
PACELINE_INLINE void multiply_tile(const float* x, const Panel& panel, Ahead ahead, uint16_t* y, int64_t stride) {
  Lane low_sums[kRows], high_sums[kRows];
  for (int r = 0; r < kRows; ++r) {
    low_sums[r] = load(panel.bias);
    high_sums[r] = load(panel.bias + kWidth);
  }
  for (int64_t k = 0; k < panel.inputs; ++k, ahead.at += ahead.step) {
    ask(ahead.at);
    const LaneWords words = load(panel.words + k * kWidth);
    const Lane low_weights = low(words), high_weights = high(words);
    for (int r = 0; r < kRows; ++r) {
      low_sums[r] += low_weights * x[r * panel.inputs + k];
      high_sums[r] += high_weights * x[r * panel.inputs + k];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const LaneHalves halves[2] = {narrow(low_sums[r]), narrow(high_sums[r])};
    std::memcpy(y + r * stride, halves, static_cast<size_t>(panel.outputs) * sizeof(uint16_t));
  }
}

template <int kRows = kMostRows>
PACELINE_INLINE void multiply_few(const float* x, int64_t rows, const Panel& panel, Ahead ahead, uint16_t* y,
                                  int64_t stride) {
  if constexpr (kRows > 1)
    if (rows < kRows) return multiply_few<kRows - 1>(x, rows, panel, ahead, y, stride);
  multiply_tile<kRows>(x, panel, ahead, y, stride);
}

// All rows, in tiles of nearly the same size. A panel that one tile needs arrives while it is used; one that several need
// arrives in equal parts during all tiles of the panel before, so that those which find it in the cache do not leave memory idle.
PACELINE_SIMD void multiply_panel(const float* x, int64_t rows, const Panel& panel, uint16_t* y, int64_t stride) {
  const int64_t tiles = (rows + kMostRows - 1) / kMostRows, step = kLine / tiles;
  const char* const begins = reinterpret_cast<const char*>(panel.words);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = rows * i / tiles, end = rows * (i + 1) / tiles;
    const Ahead ahead{begins + (tiles == 1 ? kNear : panel.inputs * (kLine + i * step)), step};
    multiply_few(x + begin * panel.inputs, end - begin, panel, ahead, y + begin * stride, stride);
  }
}

float widen(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

PACELINE_SIMD void widen_all(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}

// y [rows, outputs] = x [rows, inputs] times the weights, plus the bias, for at most kMostAtOnce rows.
void multiply_block(const uint16_t* x, int64_t rows, int64_t inputs, const uint32_t* packed, const uint16_t* bias,
                    int64_t outputs, uint16_t* y, int64_t threads) {
  thread_local std::vector<float> room;
  room.resize(std::max(room.size(), static_cast<size_t>(rows * inputs)));
  float* const wide = room.data();  // the other threads have rooms of their own
  share(threads_for(rows * inputs, threads), rows,
        [&](int64_t, int64_t r) { widen_all(x + r * inputs, inputs, wide + r * inputs); });
  const int64_t panels = (outputs + kPanel - 1) / kPanel, pieces = (panels + kPiece - 1) / kPiece;
  share(threads_for(rows * inputs * outputs, threads), pieces, [&](int64_t, int64_t piece) {
    for (int64_t p = piece * kPiece; p < std::min((piece + 1) * kPiece, panels); ++p) {
      const int64_t first = p * kPanel;
      Panel panel{packed + p * inputs * kWidth, {}, inputs, std::min(kPanel, outputs - first)};
      if (bias != nullptr) widen_all(bias + first, panel.outputs, panel.bias);
      multiply_panel(wide, rows, panel, y + first, outputs);
    }
  });
}

// Addresses, as a layer of a compiled step is called every 100 microseconds and array arguments would take ten.
void multiply(uintptr_t x, int64_t rows, int64_t inputs, uintptr_t packed, uintptr_t bias, int64_t outputs, uintptr_t y,
              int64_t threads) {
  for (int64_t r = 0; r < rows; r += kMostAtOnce)
    multiply_block(reinterpret_cast<const uint16_t*>(x) + r * inputs, std::min(kMostAtOnce, rows - r), inputs,
                   reinterpret_cast<const uint32_t*>(packed), reinterpret_cast<const uint16_t*>(bias), outputs,
                   reinterpret_cast<uint16_t*>(y) + r * outputs, threads);
}

}  // namespace

NB_MODULE(_linear, m) {
  m.attr("PANEL") = kPanel;
  m.def("multiply", &multiply, "x"_a, "rows"_a, "inputs"_a, "packed"_a, "bias"_a, "outputs"_a, "y"_a, "threads"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "y [rows, outputs] = x [rows, inputs] times a layer's weights, plus its bias; all bfloat16, in rows without gaps.\n\n"
        "The arguments but sizes and threads are addresses; bias is 0 where there is none. packed: the weights as\n"
        "[panels, inputs, 16, 2], outputs p * 32 + half * 16 + lane; the last panel is filled up.");
}
