// paceline._attention: causal attention of bfloat16 queries over a paged cache, the same bits in any batch.
//
// What a query gets depends on its keys and values in their order alone: not on the requests and queries beside it, the blocks
// that they lie in, or the number of threads. That is true of finite values: those behind its context weigh nothing, but zero
// times infinity is NaN (nan_blocks.py). docs/decisions/0039-attention.md

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "threads.hpp"
#include "torch_shim.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace paceline;

// Whether `attend_dot` may be called.
bool is_supported() { return kAttentionBuilt && PACELINE_SUPPORTS_V4_AND("avx512bf16"); }

// Puts a token's key and value of one KV head into its place.
void put(const AttentionShape& shape, const uint16_t* key, const uint16_t* value, int64_t place, uint16_t* block) {
  const int64_t size = shape.head_size, t = place % kPanelTokens;
  uint16_t* const keys = block + place / kPanelTokens * shape.panel_halves();
  uint16_t* const values = keys + shape.block_tokens * size;
  for (int64_t d = 0; d < size; d += 2) std::copy_n(key + d, 2, keys + d * kPanelTokens + 2 * t);
  for (int64_t d = 0; d < size; ++d) values[t / 2 * 2 * size + 2 * d + t % 2] = value[d];
}

// Tokens' keys or values, queries or outputs: rows of heads without gaps inside, `step` apart.
template <class Element>
struct TokenRows {
  Element* data;
  int64_t step, count;
};

void store_tokens(const AttentionShape& shape, const TokenRows<const uint16_t>& keys, const TokenRows<const uint16_t>& values,
                  const int64_t* slots, int64_t tokens, uint16_t* cache, int64_t threads) {
  const int64_t size = shape.head_size, block_tokens = shape.block_tokens;
  share(threads_for(tokens * shape.kv_heads * size * 8, threads), shape.kv_heads, [&](int64_t, int64_t head) {
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t slot = slots[i];
      if (slot < 0) continue;  // a row that pads the step
      put(shape, keys.data + i * keys.step + head * size, values.data + i * values.step + head * size, slot % block_tokens,
          cache + slot / block_tokens * shape.block_step + head * shape.head_halves());
    }
  });
}

struct Tile {
  int64_t request, first, count;
};

// Where requests begin and end among the tokens, what the last token of each sees, and its blocks.
struct Requests {
  const int32_t *begins, *contexts, *tables;
  int64_t table_step, count;
};

void attend(const AttentionShape& shape, const uint16_t* x, uint16_t* y, const uint16_t* cache, const Requests& requests,
            int64_t threads) {
  const int32_t* const begins = requests.begins;
  thread_local std::vector<Tile> tiles;
  tiles.clear();
  int64_t work = 0;
  for (int64_t r = 0; r < requests.count; ++r) {
    const int64_t rows = (begins[r + 1] - begins[r]) * shape.group(), count = (rows + kMostQueries - 1) / kMostQueries;
    for (int64_t i = 0; i < count; ++i) tiles.push_back({r, rows * i / count, rows * (i + 1) / count - rows * i / count});
    work += rows * requests.contexts[r] * shape.head_size * 2;
  }
  const int64_t kv_heads = shape.kv_heads;
  const std::vector<Tile>& made = tiles;  // the other threads have some of their own
  share(threads_for(work * kv_heads, threads), static_cast<int64_t>(made.size()) * kv_heads, [&](int64_t, int64_t i) {
    const Tile& tile = made[static_cast<size_t>(i / kv_heads)];
    const int64_t head = i % kv_heads, token = begins[tile.request];
    const int64_t offset = (token * shape.heads + head * shape.group()) * shape.head_size;
    const int64_t tokens = begins[tile.request + 1] - token;
    attend_dot(shape, {x + offset, y + offset, cache + head * shape.head_halves(),
                       requests.tables + tile.request * requests.table_step, tile.first, tile.count,
                       requests.contexts[tile.request] - tokens + 1});
  });
}

// The operators, for PyTorch: every layer of a step calls both, as linear layers are called (linear_module.cpp).
std::unique_ptr<const TorchShim> torch_shim;

[[noreturn]] void refuse(const std::string& wanted, const TorchTensor& got) {
  throw std::invalid_argument("attention needs " + wanted + ", got " + got.describe());
}

// Of a layer's cache. heads: of queries, 0: there are none.
AttentionShape shape_of(const TorchTensor& cache, int64_t heads, float scale) {
  const int64_t* const sizes = cache.sizes;
  const int64_t* const steps = cache.strides;
  const bool fits = cache.dims == 4 && cache.dtype == torch_shim->dtype_bfloat16() && sizes[1] > 0 &&
                    sizes[2] % kPanelTokens == 0 && sizes[3] % (2 * kPanelSize) == 0 && steps[3] == 1 && steps[2] == sizes[3] &&
                    steps[1] == sizes[2] * sizes[3];
  if (!fits)
    refuse("KV blocks [blocks, KV heads, tokens, 2 * head size] in bfloat16, without gaps inside, of a multiple of " +
               std::to_string(kPanelTokens) + " tokens and head sizes that " + std::to_string(kPanelSize) + " divides",
           cache);
  return {heads == 0 ? sizes[1] : heads, sizes[1], sizes[3] / 2, sizes[2], steps[0], scale};
}

template <class Element>
TokenRows<Element> rows_of(const TorchTensor& tensor, int64_t heads, int64_t head_size) {
  const bool fits = tensor.dims == 3 && tensor.sizes[1] == heads && tensor.sizes[2] == head_size &&
                    tensor.dtype == torch_shim->dtype_bfloat16() && tensor.strides[2] == 1 &&
                    (heads == 1 || tensor.strides[1] == head_size);
  if (!fits)
    refuse("[tokens, " + std::to_string(heads) + ", " + std::to_string(head_size) + "] in bfloat16, heads without gaps", tensor);
  return {tensor.data<Element>(), tensor.strides[0], tensor.sizes[0]};
}

// The numbers of `rows` requests or tokens at least.
template <class Element>
const Element* numbers_of(const TorchTensor& tensor, int64_t dims, int64_t rows) {
  const int32_t dtype = sizeof(Element) == 8 ? torch_shim->dtype_int64() : torch_shim->dtype_int32();
  const bool fits = tensor.dims == dims && tensor.dtype == dtype && tensor.sizes[0] >= rows &&
                    (tensor.sizes[dims - 1] < 2 || tensor.strides[dims - 1] == 1);
  if (!fits)
    refuse(std::to_string(dims) + " dimensions of int" + std::to_string(8 * sizeof(Element)) + ", " + std::to_string(rows) +
               " or more rows without gaps",
           tensor);
  return tensor.data<const Element>();
}

// store(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slots) -> ()
void store_op(TorchValue* stack, uint64_t, uint64_t) {
  const TorchShim& torch = *torch_shim;
  const TorchTensor key(torch, stack[0]), value(torch, stack[1]), cache(torch, stack[2]), slots(torch, stack[3]);
  const AttentionShape shape = shape_of(cache, 0, 1.0f);
  const auto keys = rows_of<const uint16_t>(key, shape.kv_heads, shape.head_size);
  const auto values = rows_of<const uint16_t>(value, shape.kv_heads, shape.head_size);
  const int64_t* const places = numbers_of<int64_t>(slots, 1, 0);
  const int64_t tokens = std::min({slots.count, keys.count, values.count});
  store_tokens(shape, keys, values, places, tokens, cache.data<uint16_t>(), torch_threads(torch));
}

// attend(Tensor query, Tensor(a!) output, Tensor kv_cache, Tensor starts, Tensor contexts, Tensor tables, float scale) -> ()
void attend_op(TorchValue* stack, uint64_t, uint64_t) {
  const TorchShim& torch = *torch_shim;
  const TorchTensor query(torch, stack[0]), output(torch, stack[1]), cache(torch, stack[2]), starts(torch, stack[3]),
      contexts(torch, stack[4]), tables(torch, stack[5]);
  double scale;
  std::memcpy(&scale, stack + 6, sizeof scale);
  const AttentionShape shape = shape_of(cache, query.dims == 3 ? query.sizes[1] : 0, static_cast<float>(scale));
  const auto x = rows_of<const uint16_t>(query, shape.heads, shape.head_size);
  const auto y = rows_of<uint16_t>(output, shape.heads, shape.head_size);
  const int64_t step = shape.heads * shape.head_size;
  const bool has_gaps = x.count > 1 && (x.step != step || y.step != step);
  if (x.count != y.count || shape.heads % shape.kv_heads || has_gaps)
    refuse("tokens without gaps for " + std::to_string(x.count) + " queries of heads that " + std::to_string(shape.kv_heads) +
               " KV heads share evenly",
           output);
  const int64_t count = contexts.count;
  const Requests requests{numbers_of<int32_t>(starts, 1, count + 1), numbers_of<int32_t>(contexts, 1, count),
                          numbers_of<int32_t>(tables, 2, count), tables.strides[0], count};
  attend(shape, x.data, y.data, cache.data<const uint16_t>(), requests, torch_threads(torch));
}

// For the operators, which have been defined. library: the path of libtorch_cpu, which has been loaded.
void serve_torch(const char* library) {
  if (!is_supported()) throw std::runtime_error("no bfloat16 dot product here (IS_SUPPORTED)");
  if (torch_shim != nullptr) return;
  auto made = std::make_unique<const TorchShim>(library);
  made->implement({{"store", store_op}, {"attend", attend_op}});
  torch_shim = std::move(made);
}

}  // namespace

NB_MODULE(_attention, m) {
  m.attr("IS_SUPPORTED") = is_supported();
  m.attr("PANEL_TOKENS") = kPanelTokens;
  m.attr("PANEL_SIZE") = kPanelSize;
  m.def("serve_torch", &serve_torch, "library"_a,
        "Implement paceline::store and paceline::attend for tensors of the CPU; needs IS_SUPPORTED. library: path of\n"
        "libtorch_cpu, loaded already.\n\n"
        "store: puts keys and values [tokens, kv_heads, head_size] into a layer's cache [blocks, kv_heads, block_tokens,\n"
        "2 * head_size]; slots: block * block_tokens + place of each token, int64, below 0: none.\n"
        "attend: output = causal attention of query, both [tokens, heads, head_size] without gaps, over a cache that `store`\n"
        "filled. starts: first token of each request and their end [requests + 1]; contexts: tokens that its last token sees;\n"
        "tables: blocks of each request; all int32. Head sizes up to 512, block sizes that 32 divides.");
}
