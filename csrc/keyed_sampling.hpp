// The keyed sample of a row of logits, and a drafter's proposal from it: what _dice and _decoder share.
//
// A row's token is argmax over ids of fl(fl(logit / T) + G(key, position, id)), ties to the lowest id, exactly as if
// every score were computed. Computing G costs two logarithms, so an id is skipped when a cheap upper bound of its
// score stays below the best score so far: whole blocks by their largest logit, single ids by their hash.
// Keeps no state between calls; calls may run in parallel.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace paceline {

inline constexpr int64_t kBlock = 128;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Row {
  const float* logits;
  int64_t vocab;
  uint32_t prefix;  // dice_prefix of key and position
  float temperature;
};

// What a drafter says of its proposal for one row.
struct Offer {
  int64_t token;  // -1 where none can be drawn
  float log_q;   // of the token, at the row's temperature
  float margin;  // lead of its score over the best other one, both without sharpness
  int64_t rival;  // that other one; -1 where there is none
};

// Whether a row may be sampled with these.
inline bool is_sound(float temperature, int64_t position) {
  return temperature >= 0.0f && temperature < kInfinity && position >= 1;
}

// Room for the largest logit of each block.
inline std::vector<float> block_tops(int64_t vocab) {
  return std::vector<float>(static_cast<std::size_t>((vocab + kBlock - 1) / kBlock));
}

// The row's token, or -1 where no id can be drawn (a NaN among the logits, or every scaled logit is -inf).
int64_t sample_row(const Row& row, std::vector<float>& tops);

// Draws with the row's temperature over `sharpness`. Overwrites the token's logit; token -1 as in sample_row.
Offer propose_row(float* logits, const Row& row, float sharpness, std::vector<float>& tops);

}  // namespace paceline
