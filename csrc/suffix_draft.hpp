// Drafts from a group's counts: the shared dice over the interpolated distribution, calibrated acceptance per token,
// and several diverging paths (Seer 4.4, 5: linear and multi-path drafting).

#pragma once

#include <numbers>

#include "suffix_forest.hpp"

namespace paceline {

// A calibration cell is (dice or not, several responses or one, probability, margin). Replays of recorded responses
// showed no use in the match length once the probability is interpolated.
inline constexpr uint32_t kProbabilityBins = 8;
inline constexpr uint32_t kMarginBins = 8;
inline constexpr uint32_t kNumCells = 2 * 2 * kProbabilityBins * kMarginBins;

inline constexpr std::array<double, kProbabilityBins - 1> kProbabilityEdges{0.15, 0.30, 0.45, 0.60, 0.75, 0.88, 0.96};
inline constexpr std::array<double, kMarginBins - 1> kMarginEdges{-0.5, 0.3, 0.9, 1.6, 2.5, 3.6, 5.0};

template <size_t N>
inline uint32_t bin_of(const std::array<double, N>& edges, double value) {
  uint32_t bin = 0;
  while (bin < N && value >= edges[bin]) ++bin;
  return bin;
}

inline uint32_t cell_of(const Candidate& c, double margin, bool noisy) {
  uint32_t cell = noisy ? 1 : 0;
  cell = cell * 2 + (is_one_bit(c.mask) ? 0 : 1);
  cell = cell * kProbabilityBins + bin_of(kProbabilityEdges, c.probability);
  return cell * kMarginBins + bin_of(kMarginEdges, margin);
}

struct Request {
  int64_t response;
  uint64_t key;
  int64_t position;
  float temperature;
  int32_t max_tokens;
};

struct Settings {
  double sharpness;
  std::span<const float> grid;
  std::span<const float> calibration;  // [kNumCells]
  double floor;
};

struct Drafted {
  int32_t token;
  float acceptance;
  int32_t cell;
};

// log q + G of one candidate, which takes three logarithms: worked out when a bound does not settle the matter.
class Score {
 public:
  Score(double probability, uint32_t hash)
      : probability_(probability), hash_(hash), log_(log_bound(probability)), noise_(gumbel_bound(hash) + kRounding) {}

  // At least sharpness * log q + G.
  double bound(double sharpness) const { return sharpness * log_ + noise_; }

  double value(double sharpness) {
    if (!is_exact_) {
      log_ = std::log(probability_);
      noise_ = gumbel_from_hash(hash_);
      is_exact_ = true;
    }
    return sharpness * log_ + noise_;
  }

 private:
  static constexpr double kRounding = 1e-3;

  // The chord of log2 between powers of two, which is the number's own bit pattern, and how far it is below at most.
  static double log_bound(double p) {
    const auto bits = static_cast<double>(std::bit_cast<int64_t>(p));
    return (bits * 0x1p-52 - 1023.0 + 0.0861) * std::numbers::ln2;
  }

  double probability_;
  uint32_t hash_;
  bool is_exact_ = false;
  double log_;  // this and the noise are bounds while not exact
  double noise_;
};

// One next-token decision. A candidate's strength is q without dice (temperature 0), else log q + G.
class Choice {
 public:
  void read(const Forest& forest, const Group& group, const Contexts& contexts, uint32_t own, const Request& request,
            int64_t position) {
    forest.predict(group, contexts, own, candidates_);
    noisy_ = request.temperature > 0.0f;
    double seen = 0.0;
    for (const Candidate& c : candidates_) seen += c.probability;
    const double unseen = std::max(1.0 - seen, kLeastUnseen);
    // Tokens without counts compete as one: the largest of their noisy scores is Gumbel around their log-mass.
    unseen_ = noisy_ ? std::log(unseen) + kGumbelMean : unseen;
    if (noisy_) throw_dice(dice_prefix(request.key, position));
  }

  size_t size() const { return candidates_.size(); }
  const Candidate& candidate(size_t i) const { return candidates_[i]; }

  // argmax(sharpness * log q + G), argmax q for infinite sharpness or temperature 0; ties to the longest context.
  size_t pick(double sharpness) {
    const bool greedy = !noisy_ || std::isinf(sharpness);
    size_t best = 0;
    double top = -std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < candidates_.size(); ++i) {
      if (!greedy && scores_[i].bound(sharpness) <= top) continue;
      const double score = greedy ? candidates_[i].probability : scores_[i].value(sharpness);
      if (score > top) {
        top = score;
        best = i;
      }
    }
    return best;
  }

  // By how much candidate `i` leads all others (or trails the best) in log q + G, the target's own contest.
  double margin(size_t i) {
    double rival = unseen_;
    for (size_t j = 0; j < candidates_.size(); ++j) {
      if (j == i || (noisy_ && scores_[j].bound(1.0) <= rival)) continue;
      rival = std::max(rival, strength(j));
    }
    return noisy_ ? strength(i) - rival : std::log(strength(i) / rival);
  }

  Drafted weigh(size_t i, std::span<const float> calibration) {
    const uint32_t cell = cell_of(candidates_[i], margin(i), noisy_);
    return {candidates_[i].token, calibration[cell], static_cast<int32_t>(cell)};
  }

 private:
  static constexpr double kLeastUnseen = 1e-3;
  static constexpr double kGumbelMean = 0.5772156649015329;

  double strength(size_t i) { return noisy_ ? scores_[i].value(1.0) : candidates_[i].probability; }

  void throw_dice(uint32_t prefix) {
    scores_.clear();
    for (const Candidate& c : candidates_) {
      scores_.emplace_back(c.probability, dice_hash(prefix, static_cast<uint32_t>(c.token)));
    }
  }

  Candidates candidates_;
  std::vector<Score> scores_;
  double unseen_ = 0.0;
  bool noisy_ = false;
};

struct Path {
  std::vector<Drafted> tokens;
  double probability = 1.0;
};

// Makes the drafts of one response; keeps its buffers from call to call.
class Drafter {
 public:
  explicit Drafter(const Forest& forest) : forest_(forest) {}

  // The path that the dice propose. `probes`: what each sharpness of the grid proposes first.
  void draft(const Group& group, const Request& request, const Settings& settings, Path& path,
             std::span<int32_t> probes) {
    path.tokens.clear();
    path.probability = 1.0;
    own_ = Forest::own_bit(group, request.response);
    forest_.start(group, request.response, contexts_);
    choice_.read(forest_, group, contexts_, own_, request, request.position);
    for (size_t s = 0; s < probes.size(); ++s) {
      probes[s] = choice_.size() == 0 ? -1 : choice_.candidate(choice_.pick(settings.grid[s])).token;
    }
    extend(group, request, settings, path, nullptr);
  }

  // Up to `num_paths` paths, the dice's first; each other one leaves an earlier one at its most probable runner-up.
  void draft_paths(const Group& group, const Request& request, const Settings& settings, uint32_t num_paths,
                   std::vector<Path>& paths) {
    paths.clear();
    forks_.clear();
    own_ = Forest::own_bit(group, request.response);
    forest_.start(group, request.response, contexts_);
    choice_.read(forest_, group, contexts_, own_, request, request.position);
    Path path;
    extend(group, request, settings, path, &forks_);
    while (!path.tokens.empty()) {
      paths.push_back(path);
      if (paths.size() == num_paths || forks_.empty()) return;
      const auto best = std::max_element(forks_.begin(), forks_.end(), [](const Fork& a, const Fork& b) {
        return a.path.probability < b.path.probability;
      });
      path = std::move(best->path);
      contexts_ = std::move(best->contexts);
      forks_.erase(best);
      step(group, request, path);
      extend(group, request, settings, path, &forks_);
    }
  }

 private:
  struct Fork {
    Path path;          // up to and including the runner-up
    Contexts contexts;  // before the runner-up
  };

  static constexpr size_t kRunnersUp = 3;

  void extend(const Group& group, const Request& request, const Settings& settings, Path& path,
              std::vector<Fork>* forks) {
    // `choice_` is that behind the path so far.
    while (static_cast<int32_t>(path.tokens.size()) < request.max_tokens && choice_.size() > 0) {
      const size_t best = choice_.pick(settings.sharpness);
      const Drafted drafted = choice_.weigh(best, settings.calibration);
      if (forks != nullptr) note_forks(best, settings, path, *forks);
      if (path.probability * drafted.acceptance < settings.floor) return;
      path.probability *= drafted.acceptance;
      path.tokens.push_back(drafted);
      step(group, request, path);
    }
  }

  // Read the choice behind the path's last token, unless the path is full.
  void step(const Group& group, const Request& request, const Path& path) {
    const auto length = static_cast<int32_t>(path.tokens.size());
    if (length >= request.max_tokens) return;
    forest_.advance(group, contexts_, path.tokens.back().token);
    choice_.read(forest_, group, contexts_, own_, request, request.position + length);
  }

  void note_forks(size_t best, const Settings& settings, const Path& path, std::vector<Fork>& forks) {
    ranked_.clear();
    for (size_t i = 0; i < choice_.size(); ++i) {
      if (i == best) continue;
      const Drafted other = choice_.weigh(i, settings.calibration);
      if (path.probability * other.acceptance >= settings.floor) ranked_.push_back(other);
    }
    std::stable_sort(ranked_.begin(), ranked_.end(),
                     [](const Drafted& a, const Drafted& b) { return a.acceptance > b.acceptance; });
    if (ranked_.size() > kRunnersUp) ranked_.resize(kRunnersUp);
    for (const Drafted& other : ranked_) {
      Fork fork{path, contexts_};
      fork.path.tokens.push_back(other);
      fork.path.probability *= other.acceptance;
      forks.push_back(std::move(fork));
    }
  }

  const Forest& forest_;
  Choice choice_;
  Contexts contexts_;
  uint32_t own_ = 0;
  std::vector<Fork> forks_;
  std::vector<Drafted> ranked_;
};

}  // namespace paceline
