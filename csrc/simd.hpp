// Vectors of 16 floats in GCC's and Clang's own notation, and bfloat16 in pairs.
//
// Each function marked PACELINE_SIMD is compiled for several instruction sets and chosen when the library is loaded.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define PACELINE_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
// For functions of `Lane`s: with AVX2 alone others take their place (avx2.hpp).
#define PACELINE_WIDE __attribute__((target_clones("arch=x86-64-v4", "default")))
#define PACELINE_CLONES_V4 true
#else
#define PACELINE_SIMD
#define PACELINE_WIDE
#define PACELINE_CLONES_V4 false
#endif
// Whether a file compiled for x86-64-v4 and one more instruction set may be called; whether one for AVX2 is the best there is.
#if defined(__x86_64__) && defined(__GNUC__)
#define PACELINE_SUPPORTS_V4_AND(feature)                                                                        \
  (__builtin_cpu_supports(feature) && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") && \
   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#define PACELINE_AVX2_IS_BEST()                                  \
  (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && \
   !(PACELINE_CLONES_V4 && PACELINE_SUPPORTS_V4_AND("avx512f")))
#else
#define PACELINE_SUPPORTS_V4_AND(feature) false
#define PACELINE_AVX2_IS_BEST() false
#endif
#define PACELINE_INLINE inline __attribute__((always_inline))

namespace paceline {

constexpr int64_t kWidth = 16;
constexpr int64_t kAheadWords = 2048;

typedef float Lane __attribute__((vector_size(64)));
typedef int32_t LaneInt __attribute__((vector_size(64)));
typedef uint32_t LaneWords __attribute__((vector_size(64)));

// Words of as many lanes as a vector of floats has.
template <class Vector>
struct WordsOfVector;
template <>
struct WordsOfVector<Lane> {
  using Type = LaneWords;
};
template <class Vector>
using WordsOf = typename WordsOfVector<Vector>::Type;

template <class Vector>
PACELINE_INLINE Vector load_as(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

PACELINE_INLINE Lane load(const float* from) { return load_as<Lane>(from); }
PACELINE_INLINE LaneWords load(const uint32_t* from) { return load_as<LaneWords>(from); }

// Asks memory for what will be read soon, up to the second-level cache; any address will do.
PACELINE_INLINE void ask(const void* address) {
#if defined(__GNUC__)
  __builtin_prefetch(address, 0, 2);
#endif
}

// As load, of words that come in order from beyond the second-level cache; asks for those further on.
PACELINE_INLINE LaneWords load_ahead(const uint32_t* from) {
  ask(from + kAheadWords);
  return load(from);
}

PACELINE_INLINE void store(float* to, Lane value) { std::memcpy(to, &value, sizeof value); }

// The two bfloat16 of each word.
PACELINE_INLINE Lane low(LaneWords words) { return reinterpret_cast<Lane>(words << 16); }
PACELINE_INLINE Lane high(LaneWords words) { return reinterpret_cast<Lane>(words & 0xFFFF0000u); }

// Integers of as many lanes as the vector has.
template <class Vector>
using IntsOf = decltype(Vector{} < Vector{});

// exp(x) for x <= 88, within 2e-7 of it; 0 far below. 2^n times a polynomial in the rest.
template <class Vector>
PACELINE_INLINE Vector exponential(Vector x) {
  x = x < -87.0f ? Vector{} - 87.0f : x;
  x = x > 88.0f ? Vector{} + 88.0f : x;
  const Vector scaled = x * 1.44269504f + 12582912.0f;  // its low bits are the nearest integer
  const auto whole = reinterpret_cast<IntsOf<Vector>>(scaled);
  const Vector rest = x - (scaled - 12582912.0f) * 0.693147181f;
  Vector p = rest * (1.0f / 720) + 1.0f / 120;
  p = p * rest + 1.0f / 24;
  p = p * rest + 1.0f / 6;
  p = p * rest + 0.5f;
  p = p * rest + 1.0f;
  p = p * rest + 1.0f;
  return reinterpret_cast<Vector>(reinterpret_cast<IntsOf<Vector>>(p) + (whole << 23));
}

// A float's upper half, rounded to the nearest, ties to even.
PACELINE_INLINE uint32_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

}  // namespace paceline
