// Linear layers by the bfloat16 dot product of AVX-512, for processors that begin one in every cycle.
//
// A file of its own, as all of it is compiled for that instruction set; nothing here is called where it is missing.

#include "linear.hpp"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace paceline {

#if defined(__AVX512BF16__)

namespace {

// A word holds the weights of one output for two inputs; two lines hold a panel's for them.
struct Dot {
  using Input = uint16_t;

  template <int kRows>
  static PACELINE_INLINE void add(const uint16_t* x, const Panel& panel, Ahead ahead, Lane* low_sums, Lane* high_sums) {
    for (int64_t k = 0; k < panel.inputs; k += 2, ahead.at += 2 * ahead.step) {
      ask(ahead.at);
      ask(ahead.at + ahead.step);
      const auto low_weights = reinterpret_cast<__m512bh>(load(panel.words + k * kWidth));
      const auto high_weights = reinterpret_cast<__m512bh>(load(panel.words + (k + 1) * kWidth));
      for (int r = 0; r < kRows; ++r) {
        int32_t pair;
        std::memcpy(&pair, x + r * panel.inputs + k, sizeof pair);
        const auto both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        low_sums[r] = _mm512_dpbf16_ps(low_sums[r], low_weights, both);
        high_sums[r] = _mm512_dpbf16_ps(high_sums[r], high_weights, both);
      }
    }
  }
};

}  // namespace

const bool kDotBuilt = true;

void multiply_panel_dot(const uint16_t* x, int64_t rows, const Panel& panel, uint16_t* y, int64_t stride) {
  multiply_tiles<Dot>(x, rows, panel, y, stride);
}

#else

const bool kDotBuilt = false;

void multiply_panel_dot(const uint16_t*, int64_t, const Panel&, uint16_t*, int64_t) {}

#endif

}  // namespace paceline
