// Attention over blocks of keys and values of bfloat16, and the order in which a block holds them.
//
// A block of one KV head holds its keys, then its values, both in panels of 32 tokens that the dot product of bfloat16 can
// take as they lie: keys [panels, head size / 2, 2, 16, 2], halves of the tokens, lanes, the two dimensions; values
// [panels, 16, head size / 16, 16, 2], pairs of tokens, dimensions, the two tokens.
// docs/decisions/0039-attention.md

#pragma once

#include <cstdint>

#include "simd.hpp"

namespace paceline {

constexpr int64_t kPanelTokens = 2 * kWidth;
constexpr int64_t kPanelSize = 2 * kWidth;    // dimensions of values that are summed together
constexpr int64_t kChunk = 4 * kPanelTokens;  // tokens whose weights are taken together, from a multiple of it on
constexpr int64_t kMostQueries = 14;          // rows that share a pass: 28 sums and what they need fill the registers

// Of one layer.
struct AttentionShape {
  int64_t heads, kv_heads, head_size;  // a multiple of kPanelSize
  int64_t block_tokens;                // a multiple of kPanelTokens
  int64_t block_step;                  // halves from one block to the next
  float scale;

  int64_t group() const { return heads / kv_heads; }
  int64_t panel_halves() const { return kPanelTokens * head_size; }
  int64_t head_halves() const { return 2 * block_tokens * head_size; }  // a block's keys and values of one KV head
};

// Some queries of one request that see the same KV head.
struct Queries {
  const uint16_t* x;        // [tokens, heads, head size] of the first token and the group's first head
  uint16_t* y;              // likewise
  const uint16_t* cache;    // of block 0, of the KV head
  const int32_t* blocks;    // of the request
  int64_t first, count;     // rows of the group in all tokens: token * group + head of the group
  int64_t context;          // tokens that the request's first token sees, itself included
};

extern const bool kAttentionBuilt;  // whether the compiler could
void attend_dot(const AttentionShape& shape, const Queries& queries);

}  // namespace paceline
