// paceline._attention: causal attention of bfloat16 queries over a paged cache, the same bits in any batch.
//
// What a query gets depends on its keys and values in their order alone: not on the requests and queries beside it, the blocks
// that they lie in, or the number of threads. That is true of finite values: those behind its context weigh nothing, but zero
// times infinity is NaN (nan_blocks.py). docs/decisions/0039-attention.md

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace paceline;

// Whether `attend_dot` may be called.
bool is_supported() { return kAttentionBuilt && PACELINE_SUPPORTS_V4_AND("avx512bf16"); }

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Puts a token's key and value of one KV head into its place.
void put(const AttentionShape& shape, const uint16_t* key, const uint16_t* value, int64_t place, uint16_t* block) {
  const int64_t size = shape.head_size, t = place % kPanelTokens;
  uint16_t* const keys = block + place / kPanelTokens * shape.panel_halves();
  uint16_t* const values = keys + shape.block_tokens * size;
  for (int64_t d = 0; d < size; d += 2) std::copy_n(key + d, 2, keys + d * kPanelTokens + 2 * t);
  for (int64_t d = 0; d < size; ++d) values[t / 2 * 2 * size + 2 * d + t % 2] = value[d];
}

// Addresses, as in _linear. key_step, value_step: from one token to the next.
void store_tokens(uintptr_t key, int64_t key_step, uintptr_t value, int64_t value_step, uintptr_t slots, int64_t tokens,
                  uintptr_t cache, int64_t block_step, int64_t kv_heads, int64_t head_size, int64_t block_tokens,
                  int64_t threads) {
  const AttentionShape shape{kv_heads, kv_heads, head_size, block_tokens, block_step, 1.0f};
  share(threads_for(tokens * kv_heads * head_size * 8, threads), kv_heads, [&](int64_t, int64_t head) {
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t slot = at<const int64_t>(slots)[i];
      if (slot < 0) continue;  // a row that pads the step
      put(shape, at<const uint16_t>(key) + i * key_step + head * head_size,
          at<const uint16_t>(value) + i * value_step + head * head_size, slot % block_tokens,
          at<uint16_t>(cache) + slot / block_tokens * block_step + head * shape.head_halves());
    }
  });
}

struct Tile {
  int64_t request, first, count;
};

void attend(uintptr_t x, uintptr_t y, uintptr_t cache, int64_t block_step, uintptr_t starts, uintptr_t contexts,
            uintptr_t tables, int64_t table_step, int64_t requests, int64_t heads, int64_t kv_heads, int64_t head_size,
            int64_t block_tokens, float scale, int64_t threads) {
  const AttentionShape shape{heads, kv_heads, head_size, block_tokens, block_step, scale};
  const int32_t* const begins = at<const int32_t>(starts);
  thread_local std::vector<Tile> tiles;
  tiles.clear();
  int64_t work = 0;
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t rows = (begins[r + 1] - begins[r]) * shape.group(), count = (rows + kMostQueries - 1) / kMostQueries;
    for (int64_t i = 0; i < count; ++i) tiles.push_back({r, rows * i / count, rows * (i + 1) / count - rows * i / count});
    work += rows * at<const int32_t>(contexts)[r] * head_size * 2;
  }
  const std::vector<Tile>& made = tiles;  // the other threads have some of their own
  share(threads_for(work * kv_heads, threads), static_cast<int64_t>(made.size()) * kv_heads, [&](int64_t, int64_t i) {
    const Tile& tile = made[static_cast<size_t>(i / kv_heads)];
    const int64_t head = i % kv_heads, token = begins[tile.request], offset = (token * heads + head * shape.group()) * head_size;
    const int64_t tokens = begins[tile.request + 1] - token;
    attend_dot(shape, {at<const uint16_t>(x) + offset, at<uint16_t>(y) + offset,
                       at<const uint16_t>(cache) + head * shape.head_halves(),
                       at<const int32_t>(tables) + tile.request * table_step, tile.first, tile.count,
                       at<const int32_t>(contexts)[tile.request] - tokens + 1});
  });
}

}  // namespace

NB_MODULE(_attention, m) {
  m.attr("IS_SUPPORTED") = is_supported();
  m.attr("PANEL_TOKENS") = kPanelTokens;
  m.attr("PANEL_SIZE") = kPanelSize;
  m.def("store_tokens", &store_tokens, "key"_a, "key_step"_a, "value"_a, "value_step"_a, "slots"_a, "tokens"_a, "cache"_a,
        "block_step"_a, "kv_heads"_a, "head_size"_a, "block_tokens"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Puts keys and values [tokens, kv_heads, head_size] into a layer's cache [blocks, kv_heads, 2 * block_tokens *\n"
        "head_size]; slots: block * block_tokens + place of each token, int64, below 0: none. All bfloat16, and addresses but\n"
        "sizes, steps (elements from one token, or block, to the next) and threads.");
  m.def("attend", &attend, "x"_a, "y"_a, "cache"_a, "block_step"_a, "starts"_a, "contexts"_a, "tables"_a, "table_step"_a,
        "requests"_a, "heads"_a, "kv_heads"_a, "head_size"_a, "block_tokens"_a, "scale"_a, "threads"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "y = causal attention of x, both [tokens, heads, head_size] without gaps, over a cache that `store_tokens` filled.\n\n"
        "starts: first token of each request and their end [requests + 1]; contexts: tokens that its last token sees;\n"
        "tables: blocks of each request, table_step apart; all int32. Needs IS_SUPPORTED, head sizes up to 512 and block\n"
        "sizes that 32 divides.");
}
