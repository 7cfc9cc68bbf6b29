// paceline._linear: products of bfloat16 activations with a layer's bfloat16 weights, in float32, the same bits in any batch.
//
// Each output is one chain of multiply-adds over the inputs, in a fixed order, whatever rows share the call and whatever the
// number of threads; they are fused where the instruction set has fused ones. There are two kernels: one widens the weights in
// registers, as float32 multiply-adds are up to twice as fast as the bfloat16 dot product where cores begin one of these
// every second cycle only (Intel's); the other uses the dot product (linear_dot.cpp).
// docs/decisions/0038-linear-layers.md

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "linear.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace paceline;

constexpr int64_t kPiece = 8;         // panels that a thread takes at a time at most, one after the other in memory
constexpr int64_t kTurns = 2;         // each thread takes that often, at least, where there are panels enough
constexpr int64_t kMostAtOnce = 512;  // rows: what is widened stays in some tens of megabytes

// A word holds the weights of two outputs for one input, which a shift and a mask widen to floats.
struct Widened {
  using Input = float;

  template <int kRows>
  static PACELINE_INLINE void add(const float* x, const Panel& panel, Ahead ahead, Lane* low_sums, Lane* high_sums) {
    for (int64_t k = 0; k < panel.inputs; ++k, ahead.at += ahead.step) {
      ask(ahead.at);
      const LaneWords words = load(panel.words + k * kWidth);
      const Lane low_weights = low(words), high_weights = high(words);
      for (int r = 0; r < kRows; ++r) {
        low_sums[r] += low_weights * x[r * panel.inputs + k];
        high_sums[r] += high_weights * x[r * panel.inputs + k];
      }
    }
  }
};

PACELINE_SIMD void multiply_panel(const float* x, int64_t rows, const Panel& panel, uint16_t* y, int64_t stride) {
  multiply_tiles<Widened>(x, rows, panel, y, stride);
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

// Whether multiply_panel_dot may be called.
bool has_dot() { return kDotBuilt && PACELINE_SUPPORTS_V4_AND("avx512bf16"); }

// A layer: its weights in panels, its bias (null: none).
struct Layer {
  const uint32_t* packed;
  const uint16_t* bias;
  int64_t inputs, outputs;
};

// y [rows, outputs] = x [rows, inputs] times the weights, plus the bias; kernel: multiply_panel or multiply_panel_dot.
template <class Input, class Kernel>
void multiply_panels(const Kernel& kernel, const Input* x, int64_t rows, const Layer& layer, uint16_t* y, int64_t threads) {
  const int64_t panels = (layer.outputs + kPanel - 1) / kPanel;
  threads = threads_for(rows * layer.inputs * layer.outputs, threads);
  const int64_t size = std::clamp(panels / (kTurns * threads), int64_t{1}, kPiece);
  share(threads, (panels + size - 1) / size, [&](int64_t, int64_t piece) {
    for (int64_t p = piece * size; p < std::min((piece + 1) * size, panels); ++p) {
      const int64_t first = p * kPanel;
      Panel panel{layer.packed + p * layer.inputs * kWidth, {}, layer.inputs, std::min(kPanel, layer.outputs - first)};
      if (layer.bias != nullptr) widen_all(layer.bias + first, panel.outputs, panel.bias);
      kernel(x, rows, panel, y + first, layer.outputs);
    }
  });
}

// By float32 multiply-adds, for at most kMostAtOnce rows.
void multiply_widened(const uint16_t* x, int64_t rows, const Layer& layer, uint16_t* y, int64_t threads) {
  thread_local std::vector<float> room;
  const int64_t inputs = layer.inputs;
  room.resize(std::max(room.size(), static_cast<size_t>(rows * inputs)));
  float* const wide = room.data();  // the other threads have rooms of their own
  share(threads_for(rows * inputs, threads), rows,
        [&](int64_t, int64_t r) { widen_all(x + r * inputs, inputs, wide + r * inputs); });
  multiply_panels(multiply_panel, wide, rows, layer, y, threads);
}

// Addresses, as a layer of a compiled step is called every 100 microseconds and array arguments would take ten.
void multiply(bool dot, uintptr_t x, int64_t rows, int64_t inputs, uintptr_t packed, uintptr_t bias, int64_t outputs,
              uintptr_t y, int64_t threads) {
  static const bool can_dot = has_dot();
  if (dot && !can_dot) throw std::runtime_error("no bfloat16 dot product here (HAS_DOT)");
  const Layer layer{reinterpret_cast<const uint32_t*>(packed), reinterpret_cast<const uint16_t*>(bias), inputs, outputs};
  for (int64_t r = 0; r < rows; r += kMostAtOnce) {
    const uint16_t* const from = reinterpret_cast<const uint16_t*>(x) + r * inputs;
    uint16_t* const to = reinterpret_cast<uint16_t*>(y) + r * outputs;
    const int64_t count = std::min(kMostAtOnce, rows - r);
    if (dot)
      multiply_panels(multiply_panel_dot, from, count, layer, to, threads);
    else
      multiply_widened(from, count, layer, to, threads);
  }
}

}  // namespace

NB_MODULE(_linear, m) {
  m.attr("PANEL") = kPanel;
  m.attr("HAS_DOT") = has_dot();
  m.def("multiply", &multiply, "dot"_a, "x"_a, "rows"_a, "inputs"_a, "packed"_a, "bias"_a, "outputs"_a, "y"_a,
        "threads"_a, nb::call_guard<nb::gil_scoped_release>(),
        "y [rows, outputs] = x [rows, inputs] times a layer's weights, plus its bias; all bfloat16, in rows without gaps.\n\n"
        "The arguments but `dot`, sizes and threads are addresses; bias is 0 where there is none. packed: the weights as\n"
        "[panels, inputs, 16, 2], outputs p * 32 + half * 16 + lane; the last panel is filled up. With dot, which needs\n"
        "HAS_DOT and an even number of inputs, [panels, inputs / 2, 2, 16, 2]: halves, lanes, the two inputs.");
}
