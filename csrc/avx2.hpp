// Vectors of eight floats, for the files that are compiled for AVX2: simd.hpp's are twice as wide as its registers, and what
// GCC makes of them there goes through memory, at a tenth of the speed.

#pragma once

#include "simd.hpp"

namespace paceline {

constexpr int kEight = 8;

typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));
typedef uint16_t EightHalves __attribute__((vector_size(16)));

template <>
struct WordsOfVector<Eight> {
  using Type = EightWords;
};

PACELINE_INLINE void store(float* to, Eight value) { std::memcpy(to, &value, sizeof value); }

// The two bfloat16 of each word.
PACELINE_INLINE Eight low(EightWords words) { return reinterpret_cast<Eight>(words << 16); }
PACELINE_INLINE Eight high(EightWords words) { return reinterpret_cast<Eight>(words & 0xFFFF0000u); }

}  // namespace paceline
