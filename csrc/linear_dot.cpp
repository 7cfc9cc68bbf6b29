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

// Where rows of x begin, in as few registers as can say so: an address holds a base and one, two or four times a stride. A
// pointer for each row would be more than there are, and those that GCC puts elsewhere take turns with the products.
template <int kRows>
class Rows {
 public:
  Rows(const uint16_t* x, int64_t inputs)
      : first_(reinterpret_cast<const char*>(x)), stride_(2 * inputs), thrice_(3 * stride_) {
    second_ = first_ + 5 * stride_;
    third_ = second_ + 5 * stride_;
  }

  // Keeps the compiler from making pointers of its own.
  PACELINE_INLINE void hold() { __asm__("" : "+r"(first_), "+r"(second_), "+r"(third_)); }

  PACELINE_INLINE void advance() { first_ += kPairBytes, second_ += kPairBytes, third_ += kPairBytes; }

  // The two inputs of a row.
  PACELINE_INLINE int32_t pair(int row) const {
    const char* const base = row < 5 ? first_ : row < 10 ? second_ : third_;
    int32_t both;
    std::memcpy(&both, base + (row % 5 == 3 ? thrice_ : row % 5 * stride_), sizeof both);
    return both;
  }

 private:
  static_assert(kRows <= 15, "three bases of five rows");
  static constexpr int64_t kPairBytes = 4;
  const char *first_, *second_, *third_;
  int64_t stride_, thrice_;
};

// A word holds the weights of one output for two inputs; two lines hold a panel's for them.
struct Dot {
  using Input = uint16_t;

  template <int kRows>
  static PACELINE_INLINE void add(const uint16_t* x, const Panel& panel, Ahead ahead, Lane* low_sums, Lane* high_sums) {
    Rows<kRows> rows(x, panel.inputs);
    for (int64_t k = 0; k < panel.inputs; k += 2, ahead.at += 2 * ahead.step, rows.advance()) {
      ask(ahead.at);
      ask(ahead.at + ahead.step);
      const auto low_weights = reinterpret_cast<__m512bh>(load(panel.words + k * kWidth));
      const auto high_weights = reinterpret_cast<__m512bh>(load(panel.words + (k + 1) * kWidth));
      rows.hold();
      for (int r = 0; r < kRows; ++r) {
        const auto both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(rows.pair(r)));
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
