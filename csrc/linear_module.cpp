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
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "linear.hpp"
#include "threads.hpp"
#include "torch_shim.hpp"

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

PACELINE_WIDE void multiply_panel(const float* x, int64_t rows, const Panel& panel, uint16_t* y, int64_t stride) {
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
  static const auto kernel = kAvx2Built && PACELINE_AVX2_IS_BEST() ? multiply_panel_avx2 : multiply_panel;
  multiply_panels(kernel, wide, rows, layer, y, threads);
}

void multiply(bool dot, const uint16_t* x, int64_t rows, const Layer& layer, uint16_t* y, int64_t threads) {
  static const bool can_dot = has_dot();
  if (dot && !can_dot) throw std::runtime_error("no bfloat16 dot product here (HAS_DOT)");
  for (int64_t r = 0; r < rows; r += kMostAtOnce) {
    const uint16_t* const from = x + r * layer.inputs;
    uint16_t* const to = y + r * layer.outputs;
    const int64_t count = std::min(kMostAtOnce, rows - r);
    if (dot)
      multiply_panels(multiply_panel_dot, from, count, layer, to, threads);
    else
      multiply_widened(from, count, layer, to, threads);
  }
}

// The operator, for PyTorch: a step calls one for each layer, between which its weights have pushed everything else out of the
// caches, and there Python took 35 microseconds for what is done here in 12 (docs/decisions/0038-linear-layers.md).
std::unique_ptr<const TorchShim> torch_shim;

std::string many(const char* what, int64_t count) { return std::to_string(count) + " " + what; }

// linear(Tensor x, Tensor packed, Tensor bias, int outputs, bool dot) -> Tensor
void linear(TorchValue* stack, uint64_t, uint64_t) {
  const TorchShim& torch = *torch_shim;
  const TorchTensor x(torch, stack[0]);
  const TorchTensor packed(torch, stack[1]);
  const TorchTensor bias(torch, stack[2]);
  const auto outputs = static_cast<int64_t>(stack[3]);
  const bool dot = (stack[4] & 0xFF) != 0;
  const int64_t panels = packed.dims < 2 ? 0 : packed.sizes[0], inputs = panels ? packed.sizes[1] * (dot ? 2 : 1) : 0;
  if (outputs < 1 || outputs > panels * kPanel)
    throw std::invalid_argument(many("panels of ", panels) + std::to_string(kPanel) + " outputs cannot give " +
                                std::to_string(outputs));
  const int64_t given = x.dims ? x.sizes[x.dims - 1] : 0;
  if (given != inputs || inputs == 0 || (bias.count && bias.count != outputs))
    throw std::invalid_argument("a layer of " + many("inputs and ", inputs) + many("outputs got ", outputs) +
                                many("inputs", given) + (bias.count ? " and a bias of " + std::to_string(bias.count) : ""));
  const auto is_plain = [&](const TorchTensor& one) { return one.dtype == torch.dtype_bfloat16() && one.is_contiguous(); };
  for (const auto& [what, one] : {std::pair{"activations", &x}, std::pair{"weights", &packed}, std::pair{"a bias", &bias}})
    if (!is_plain(*one))
      throw std::invalid_argument(std::string("a bfloat16 layer got ") + what + " of another number format, or with gaps: " +
                                  one->describe());
  std::vector<int64_t> sizes(x.sizes, x.sizes + x.dims), strides(sizes.size(), 1);
  sizes.back() = outputs;
  for (size_t i = sizes.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * sizes[i];
  void* made = nullptr;
  check_torch(torch.empty_strided(x.dims, sizes.data(), strides.data(), torch.dtype_bfloat16(), torch.device_type_cpu(), 0,
                                  &made));
  TorchTensor y(torch, reinterpret_cast<TorchValue>(made));
  const Layer layer{packed.data<const uint32_t>(), bias.count ? bias.data<const uint16_t>() : nullptr, inputs, outputs};
  multiply(dot, x.data<const uint16_t>(), x.count / inputs, layer, y.data<uint16_t>(), torch_threads(torch));
  stack[0] = y.release();
}

// For `paceline::linear`, which has been defined. library: the path of libtorch_cpu, which has been loaded.
void serve_torch(const char* library) {
  if (torch_shim != nullptr) return;
  auto made = std::make_unique<const TorchShim>(library);
  made->implement({{"linear", linear}});
  torch_shim = std::move(made);
}

}  // namespace

NB_MODULE(_linear, m) {
  m.attr("PANEL") = kPanel;
  m.attr("HAS_DOT") = has_dot();
  m.def("serve_torch", &serve_torch, "library"_a,
        "Implement paceline::linear for tensors of the CPU. library: path of libtorch_cpu, loaded already.\n\n"
        "It gives x [.., inputs] times a layer's weights, plus its bias (of no elements: none), all bfloat16 and without gaps:\n"
        "[.., outputs]. packed: the weights as [panels, inputs, 16, 2], outputs p * 32 + half * 16 + lane; the last panel is\n"
        "filled up. With dot, which needs HAS_DOT and an even number of inputs, [panels, inputs / 2, 2, 16, 2]: halves, lanes,\n"
        "the two inputs.");
}
