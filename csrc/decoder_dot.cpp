// Products of the small decoder by AVX-512's dot product of octets: four multiply-adds to a lane, where float32 has one.
//
// The activations are rounded to 8 bits too, with a scale for as many inputs as the weights have one. A file of its own, as
// all of it is compiled for that instruction set; nothing here is called where it is missing.

#include <algorithm>
#include <cmath>

#include "decoder.hpp"
#include "simd.hpp"

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

namespace paceline {

#if defined(__AVX512VNNI__)

namespace {

constexpr int64_t kGroup = PackedWeight::kGroup;
constexpr int kLanes = static_cast<int>(PackedWeight::kPanel / kWidth);
constexpr int kMostRows = 4;  // that share a pass over a panel; with more GCC spills their sums
constexpr uint32_t kInfinityBits = 0x7F800000u;

// Adds the products of unsigned and signed octets, four to a lane. GCC 12 copies the sums of its intrinsic from register to
// register, which takes as long as the products.
PACELINE_INLINE __m512i add_products(__m512i sums, __m512i weights, __m512i values) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(values));
  return sums;
}

// One group of a row: its largest value becomes 127, one that is not finite makes the scale NaN.
void narrow_group(const float* x, int64_t size, int8_t* values, float& scale, int32_t& offset) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t k = 0; k < size; k += kWidth) {
    const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + k), _mm512_set1_epi32(0x7FFFFFFF));
    largest = _mm512_max_epu32(largest, bits);  // positive floats sort like integers, NaN above infinity
  }
  const uint32_t top_bits = _mm512_reduce_max_epu32(largest);
  float top;
  std::memcpy(&top, &top_bits, sizeof top);
  const bool is_finite = top_bits < kInfinityBits;
  const __m512 factor = _mm512_set1_ps(is_finite && top >= 1e-30f ? 127.0f / top : 0.0f);
  __m512i total = _mm512_setzero_si512();
  for (int64_t k = 0; k < size; k += kWidth) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x + k), factor);
    const __m512i nearest = is_finite ? _mm512_cvtps_epi32(scaled) : _mm512_setzero_si512();
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + k), _mm512_cvtepi32_epi8(nearest));
    total = _mm512_add_epi32(total, nearest);
  }
  scale = is_finite ? top / 127.0f : NAN;
  offset = -128 * _mm512_reduce_add_epi32(total);
}

// kRows rows, from `row` on, times a panel.
template <int kRows>
PACELINE_INLINE void multiply_panel(const Octets& x, int64_t row, const PackedWeight& weight, int64_t first, bool add,
                                    float* y) {
  const int64_t inputs = weight.inputs, groups = weight.groups();
  const int8_t* const values = x.values.data() + row * inputs;
  const float* const row_scales = x.scales.data() + row * groups;
  const int32_t* const offsets = x.offsets.data() + row * groups;
  const float* scales = weight.scales.data() + first * groups;
  const uint32_t* at = weight.words.data() + first * inputs / 4;
  Lane sums[kRows][kLanes];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kLanes; ++j) sums[r][j] = load(weight.bias.data() + first + j * kWidth);
  for (int64_t group = 0; group < groups; ++group, scales += PackedWeight::kPanel) {
    __m512i whole[kRows][kLanes];
    for (int r = 0; r < kRows; ++r)
      for (int j = 0; j < kLanes; ++j) whole[r][j] = _mm512_set1_epi32(offsets[r * groups + group]);
    for (int64_t k = group * kGroup; k < std::min((group + 1) * kGroup, inputs); k += 4) {
      __m512i words[kLanes];
      for (int j = 0; j < kLanes; ++j, at += kWidth) words[j] = reinterpret_cast<__m512i>(load_ahead(at));
      for (int r = 0; r < kRows; ++r) {
        int32_t four;
        std::memcpy(&four, values + r * inputs + k, sizeof four);
        const __m512i fours = _mm512_set1_epi32(four);
        for (int j = 0; j < kLanes; ++j) whole[r][j] = add_products(whole[r][j], words[j], fours);
      }
    }
    for (int j = 0; j < kLanes; ++j) {
      const Lane own = load(scales + j * kWidth);
      for (int r = 0; r < kRows; ++r)
        sums[r][j] += reinterpret_cast<Lane>(_mm512_cvtepi32_ps(whole[r][j])) * (own * row_scales[r * groups + group]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kLanes; ++j) {
      float* to = y + (row + r) * weight.padded + first + j * kWidth;
      store(to, add ? load(to) + sums[r][j] : sums[r][j]);
    }
}

template <int kRows = kMostRows>
PACELINE_INLINE void multiply_few(const Octets& x, int64_t row, int64_t count, const PackedWeight& weight, int64_t first,
                                  bool add, float* y) {
  if constexpr (kRows > 1)
    if (count < kRows) return multiply_few<kRows - 1>(x, row, count, weight, first, add, y);
  multiply_panel<kRows>(x, row, weight, first, add, y);
}

}  // namespace

const bool kOctetDotBuilt = true;

void narrow_rows(const float* x, int64_t count, int64_t inputs, Octets& rows) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  fit(rows.values, count * inputs);
  fit(rows.scales, count * groups);
  fit(rows.offsets, count * groups);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t begin = row * inputs + group * kGroup, at = row * groups + group;
      narrow_group(x + begin, std::min(kGroup, inputs - group * kGroup), rows.values.data() + begin,
                   rows.scales[static_cast<size_t>(at)], rows.offsets[static_cast<size_t>(at)]);
    }
}

void multiply_octets(const Octets& x, int64_t count, const PackedWeight& weight, int64_t first, bool add, float* y) {
  const int64_t tiles = (count + kMostRows - 1) / kMostRows;  // of nearly the same size
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = count * i / tiles, end = count * (i + 1) / tiles;
    multiply_few(x, begin, end - begin, weight, first, add, y);
  }
}

#else

const bool kOctetDotBuilt = false;

void narrow_rows(const float*, int64_t, int64_t, Octets&) {}

void multiply_octets(const Octets&, int64_t, const PackedWeight&, int64_t, bool, float*) {}

#endif

}  // namespace paceline
