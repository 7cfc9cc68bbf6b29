// The shared dice: standard Gumbel noise as a pure function of (key, position, token).
//
// Invariant: the same 32 bits on every machine. Only integer operations, IEEE + - * / in a fixed order and
// bit manipulation are used; the file must be compiled with -ffp-contract=off.
// Positions are absolute and name the DRAWN token: the first response token of an n-token prompt has position n.
// The hash and the float32 uniform are those of vLLM's model runner V2 (murmur3 over key, position word, id), whose
// position word is that of the input token, one less: `dice_prefix` is the one place that subtracts it.

#pragma once

#include <bit>
#include <cstdint>

namespace paceline {

#if defined(__GNUC__)
#define PACELINE_INLINE inline __attribute__((always_inline))
#else
#define PACELINE_INLINE inline
#endif

// The largest noise there is, rounded up: that of hash 0, -log(0.5 * 2^-32) = 22.873856...
inline constexpr float kGumbelMax = 22.875f;

PACELINE_INLINE uint32_t dice_rotate(uint32_t value, int shift) { return (value << shift) | (value >> (32 - shift)); }

PACELINE_INLINE uint32_t dice_mix(uint32_t h, uint32_t word) {
  word *= 0xCC9E2D51u;
  word = dice_rotate(word, 15);
  word *= 0x1B873593u;
  return dice_rotate(h ^ word, 13) * 5u + 0xE6546B64u;
}

// State of the hash after key and position: one per row, shared by all tokens.
PACELINE_INLINE uint32_t dice_prefix(uint64_t key, int64_t position) {
  uint32_t h = dice_mix(0u, static_cast<uint32_t>(key));
  h = dice_mix(h, static_cast<uint32_t>(key >> 32));
  return dice_mix(h, static_cast<uint32_t>(static_cast<uint64_t>(position) - 1u));
}

PACELINE_INLINE uint32_t dice_hash(uint32_t prefix, uint32_t token) {
  uint32_t h = dice_mix(prefix, token) ^ 16u;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// Natural logarithm of a positive normal float, rounded once from float64 (at most 0.5001 ulp off):
// x = 2^e m with m in [sqrt(1/2), sqrt(2)), log m = 2 atanh(s), s = (m - 1) / (m + 1), series to s^17.
PACELINE_INLINE float dice_log(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const int32_t e = static_cast<int32_t>(bits - 0x3F3504F3u) >> 23;
  const double m = std::bit_cast<float>(bits - (static_cast<uint32_t>(e) << 23));
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = s * s;
  double p = 1.0 / 17.0;
  p = 1.0 / 15.0 + s2 * p;
  p = 1.0 / 13.0 + s2 * p;
  p = 1.0 / 11.0 + s2 * p;
  p = 1.0 / 9.0 + s2 * p;
  p = 1.0 / 7.0 + s2 * p;
  p = 1.0 / 5.0 + s2 * p;
  p = 1.0 / 3.0 + s2 * p;
  p = 1.0 + s2 * p;
  return static_cast<float>(static_cast<double>(e) * 0.6931471805599453 + (s + s) * p);
}

// (hash + 0.5) * 2^-32 rounded to float32: in (0, 1].
PACELINE_INLINE float dice_uniform(uint32_t hash) {
  const float high = static_cast<float>(static_cast<int32_t>(hash >> 16)) * 1.52587890625e-05f;
  const float low = (static_cast<float>(static_cast<int32_t>(hash & 0xFFFFu)) + 0.5f) * 2.3283064365386963e-10f;
  return high + low;
}

// log(1 - u): a degree-8 series below a quarter, where the winning tail lies, the direct logarithm above.
PACELINE_INLINE float dice_log1p_neg(float u) {
  if (u < 0.25f) {
    float p = 1.0f / 8.0f;
    p = static_cast<float>(1.0 / 7.0) + u * p;
    p = static_cast<float>(1.0 / 6.0) + u * p;
    p = static_cast<float>(1.0 / 5.0) + u * p;
    p = static_cast<float>(1.0 / 4.0) + u * p;
    p = static_cast<float>(1.0 / 3.0) + u * p;
    p = static_cast<float>(1.0 / 2.0) + u * p;
    p = 1.0f + u * p;
    return -u * p;
  }
  const float rest = 1.0f - u;
  return dice_log(rest > 5.960464477539063e-08f ? rest : 5.960464477539063e-08f);
}

// Large noise comes from small hashes.
PACELINE_INLINE float gumbel_from_hash(uint32_t hash) { return -dice_log(-dice_log1p_neg(dice_uniform(hash))); }

// What the noise is at most, but for rounding by less than 1e-4: it costs no logarithm.
// G <= -log u, because -log(1 - u) >= u; and log2 u >= its chord, which is the float's own bit pattern.
PACELINE_INLINE float gumbel_bound(uint32_t hash) {
  const float half = static_cast<float>(static_cast<int32_t>(hash >> 1));  // 2^31 u, at most
  const float chord = static_cast<float>(std::bit_cast<int32_t>(half));    // 2^23 (127 + log2 of it), at most
  return 109.5172546f - chord * 8.262958e-08f;                             // ln 2 (158 - chord / 2^23)
}

PACELINE_INLINE float gumbel(uint64_t key, int64_t position, uint32_t token) {
  return gumbel_from_hash(dice_hash(dice_prefix(key, position), token));
}

}  // namespace paceline
