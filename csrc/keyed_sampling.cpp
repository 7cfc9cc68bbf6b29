// Pruned keyed sampling. Compiled with -ffp-contract=off, as everything that computes the dice.

#include "keyed_sampling.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "dice.hpp"

// One binary for every x86-64: the loader picks the widest clone that the processor runs.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define PACELINE_SIMD __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PACELINE_SIMD
#endif

namespace paceline {
namespace {

constexpr int64_t kSumLanes = 16;
constexpr int32_t kInfinityBits = 0x7F800000;
// Outside, 1 / T or logit * (1 / T) may leave the normal floats, where the bound below does not hold.
constexpr float kMinTemperature = 1e-30f;
constexpr float kMaxTemperature = 1e30f;

struct Winner {
  float score = -kInfinity;
  int64_t token = -1;

  void offer(float candidate, int64_t id) {
    if (candidate > score || (candidate == score && id < token)) {
      score = candidate;
      token = id;
    }
  }
};

struct Top {
  int32_t order;      // the largest logit, as an integer that sorts like the float
  int32_t magnitude;  // the largest bit pattern without its sign: above infinity's it is a NaN
};

// Maps a float's bits to an integer of the same order (its own inverse).
PACELINE_INLINE int32_t order_bits(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

PACELINE_INLINE float from_order(int32_t order) { return std::bit_cast<float>(order_bits(order)); }

PACELINE_SIMD Top find_top(const float* logits, int64_t size) {
  int32_t order = std::numeric_limits<int32_t>::min();
  int32_t magnitude = 0;
  for (int64_t i = 0; i < size; ++i) {
    int32_t bits;
    std::memcpy(&bits, logits + i, sizeof bits);
    order = std::max(order, order_bits(bits));
    magnitude = std::max(magnitude, bits & 0x7FFFFFFF);
  }
  return {order, magnitude};
}

// Upper bounds of the scores of `size` consecutive ids.
PACELINE_SIMD void bound_scores(const float* logits, int64_t size, uint32_t first, uint32_t prefix, float inverse,
                                float* bounds) {
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t hash = dice_hash(prefix, first + static_cast<uint32_t>(i));
    bounds[i] = logits[i] * inverse + gumbel_bound(hash);
  }
}

PACELINE_SIMD void flag_reaching(const float* bounds, int64_t size, float bar, uint8_t* flags) {
  for (int64_t i = 0; i < size; ++i) flags[i] = bounds[i] >= bar;
}

PACELINE_INLINE float score_of(const Row& row, int64_t id) {
  return row.logits[id] / row.temperature + gumbel_from_hash(dice_hash(row.prefix, static_cast<uint32_t>(id)));
}

// The first block that holds the row's largest logit; `tops[b]` is the largest of block b.
int64_t find_block(const float* tops, float top) {
  int64_t block = 0;
  while (tops[block] < top) ++block;
  return block;
}

int64_t find_greedy(const Row& row, const float* tops, float top) {
  int64_t id = find_block(tops, top) * kBlock;
  while (row.logits[id] != top) ++id;
  return id;
}

int64_t sample_exhaustively(const Row& row) {
  Winner winner;
  for (int64_t id = 0; id < row.vocab; ++id) winner.offer(score_of(row, id), id);
  return winner.token;
}

// What a score's bound may lack through rounding: the bound's own, the division's and the addition's.
float bar_below(float score, float top) {
  return score - (1e-3f + 1.9073486e-06f * (std::fabs(score) + std::fabs(top)));
}

class PrunedRow {
 public:
  PrunedRow(const Row& row, const float* tops, float top)
      : row_(row), tops_(tops), inverse_(1.0f / row.temperature), scaled_top_(top / row.temperature) {
    const int64_t best_block = find_block(tops, top);
    visit(best_block);  // first, because a high bar skips the others
    for (int64_t block = 0; block * kBlock < row.vocab; ++block) {
      if (block != best_block && tops_[block] * inverse_ + kGumbelMax >= bar_) visit(block);
    }
  }

  int64_t token() const { return winner_.token; }

 private:
  void visit(int64_t block) {
    const int64_t start = block * kBlock;
    const int64_t size = std::min(kBlock, row_.vocab - start);
    bound_scores(row_.logits + start, size, static_cast<uint32_t>(start), row_.prefix, inverse_, bounds_);
    const float highest = from_order(find_top(bounds_, size).order);
    if (highest < bar_) return;
    offer(start + (std::find(bounds_, bounds_ + size, highest) - bounds_));  // nearly always the block's winner
    flag_reaching(bounds_, size, bar_, flags_);
    std::fill(flags_ + size, flags_ + kBlock, uint8_t{0});
    for (int64_t word = 0; word < size; word += 8) offer_flagged(start, word);
  }

  void offer_flagged(int64_t start, int64_t word) {
    uint64_t any;
    std::memcpy(&any, flags_ + word, sizeof any);
    if (any == 0) return;
    for (int64_t i = word; i < word + 8; ++i) {
      if (flags_[i] != 0 && bounds_[i] >= bar_ && start + i != winner_.token) offer(start + i);
    }
  }

  void offer(int64_t id) {
    winner_.offer(score_of(row_, id), id);
    bar_ = bar_below(winner_.score, scaled_top_);
  }

  const Row& row_;
  const float* tops_;
  float inverse_;
  float scaled_top_;
  Winner winner_;
  float bar_ = -kInfinity;
  float bounds_[kBlock];
  uint8_t flags_[kBlock];
};

// 2^y for y <= 0, within 4e-6 of it (relative); 0 below -126.5 and for a NaN. Without a branch, for the vectoriser.
PACELINE_INLINE float exp2_below_one(float y) {
  y = y >= -127.0f ? y : -127.0f;
  const auto whole = static_cast<int32_t>(y - 0.5f);
  const float x = y - static_cast<float>(whole);
  float p = 1.3333558e-03f;
  p = 9.6181291e-03f + x * p;
  p = 5.5504109e-02f + x * p;
  p = 2.4022651e-01f + x * p;
  p = 6.9314718e-01f + x * p;
  p = 1.0f + x * p;
  return p * std::bit_cast<float>((whole + 127) << 23);
}

// out = exp((logit - top) * inverse) with factor = inverse / ln 2
PACELINE_SIMD void exponentials(const float* logits, int64_t size, float top, float factor, float* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = exp2_below_one((logits[i] - top) * factor);
}

PACELINE_SIMD void add_lanes(const float* values, int64_t size, float* sums) {
  for (int64_t start = 0; start < size; start += kSumLanes)
    for (int64_t lane = 0; lane < kSumLanes; ++lane) sums[lane] += values[start + lane];
}

// log of the sum over ids of exp((logit - top) * inverse).
float log_total(const float* logits, int64_t size, float top, float inverse) {
  float sums[kSumLanes] = {}, block[kBlock] = {};
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t count = std::min(kBlock, size - start);
    exponentials(logits + start, count, top, inverse * 1.44269504f, block);
    std::fill(block + count, block + kBlock, 0.0f);
    add_lanes(block, kBlock, sums);
  }
  double total = 0.0;
  for (const float sum : sums) total += static_cast<double>(sum);
  return static_cast<float>(std::log(total));
}

}  // namespace

int64_t sample_row(const Row& row, std::vector<float>& tops) {
  if (row.vocab == 0) return -1;
  Top all{std::numeric_limits<int32_t>::min(), 0};
  for (int64_t start = 0; start < row.vocab; start += kBlock) {
    const Top block = find_top(row.logits + start, std::min(kBlock, row.vocab - start));
    all = {std::max(all.order, block.order), std::max(all.magnitude, block.magnitude)};
    tops[static_cast<size_t>(start / kBlock)] = from_order(block.order);
  }
  const float top = from_order(all.order);
  if (all.magnitude > kInfinityBits || top == -kInfinity) return -1;
  if (row.temperature == 0.0f) return find_greedy(row, tops.data(), top);
  const bool bounded = row.temperature >= kMinTemperature && row.temperature <= kMaxTemperature &&
                       std::fabs(top / row.temperature) < kInfinity;
  return bounded ? PrunedRow(row, tops.data(), top).token() : sample_exhaustively(row);
}

Offer propose_row(float* logits, const Row& row, float sharpness, std::vector<float>& tops) {
  Row sharp = row;
  sharp.temperature = row.temperature / sharpness;
  const int64_t token = sample_row(sharp, tops);
  if (token < 0) return {token, 0.0f, 0.0f, -1};
  const float inverse = row.temperature > 0.0f ? 1.0f / row.temperature : 1.0f;
  const float own = logits[token];
  const float top = *std::max_element(tops.begin(), tops.end());
  const float log_q = (own - top) * inverse - log_total(logits, row.vocab, top, inverse);
  logits[token] = -kInfinity;
  const int64_t rival = sample_row(row, tops);
  if (rival < 0) return {token, log_q, kInfinity, rival};  // nothing else could be drawn
  const auto noise = [&row](int64_t id) { return gumbel_from_hash(dice_hash(row.prefix, static_cast<uint32_t>(id))); };
  const float lead = row.temperature > 0.0f ? noise(token) - noise(rival) : 0.0f;
  return {token, log_q, (own - logits[rival]) * inverse + lead, rival};
}

}  // namespace paceline
