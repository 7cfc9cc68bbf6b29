// paceline._tree: the draft tree of every running response, where the drafts of all sources meet.
//
// A tree holds the tokens that sources propose behind a response's last decided token, and the trunk, the last decided
// tokens, to which drafts made for an earlier position are fitted. A node stands for a chain of tokens from there; each
// source that proposes the chain has a claim on it, its estimate of the last token's acceptance. A source that claims a
// node claims all nodes above it. Nodes lie in the order in which they were added, so a parent before its children.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Row = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using OutRow = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using OutTable = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int32_t kRoot = -1;
constexpr int32_t kNone = -2;
constexpr float kLeast = 1e-6f;  // a claim is above 0, whatever its estimate

void check(bool fits, const char* message) {
  if (!fits) throw std::invalid_argument(message);
}

struct Node {
  int32_t token;
  int32_t parent;
  int32_t depth;  // 1: the next token of the response
  int32_t first_child = kNone;
  int32_t next_sibling = kNone;
};

class Tree {
 public:
  Tree(int64_t position, size_t num_sources) : position_(position), num_sources_(num_sources) {}

  int64_t position() const { return position_; }
  size_t size() const { return nodes_.size(); }

  // Walks down along decided tokens; what does not go on from them is dropped.
  void advance(std::span<const int32_t> tokens, size_t max_trunk) {
    int32_t at = kRoot;
    for (int32_t token : tokens)
      if (at != kNone) at = child(at, token);
    position_ += static_cast<int64_t>(tokens.size());
    trunk_.insert(trunk_.end(), tokens.begin(), tokens.end());
    if (trunk_.size() > 2 * max_trunk) trunk_.erase(trunk_.begin(), trunk_.end() - static_cast<ptrdiff_t>(max_trunk));
    if (!tokens.empty() && !nodes_.empty()) keep(at, static_cast<int32_t>(tokens.size()));
  }

  // Adds what of a chain from position `start` on fits the decided tokens and goes beyond them.
  void add(size_t source, int64_t start, std::span<const int32_t> tokens, const float* acceptance, size_t max_nodes) {
    const int64_t behind = position_ - start;
    if (behind < 0 || behind >= static_cast<int64_t>(tokens.size()) || behind > static_cast<int64_t>(trunk_.size()))
      return;
    if (!std::equal(trunk_.end() - behind, trunk_.end(), tokens.begin())) return;
    int32_t at = kRoot;
    for (size_t j = static_cast<size_t>(behind); j < tokens.size(); ++j) {
      int32_t next = child(at, tokens[j]);
      if (next == kNone) {
        if (nodes_.size() >= max_nodes) return;
        next = put(tokens[j], at, at == kRoot ? 1 : nodes_[at].depth + 1);
        claims_.resize(claims_.size() + num_sources_, 0.0f);
      }
      claims_[next * num_sources_ + source] = std::clamp(acceptance[j], kLeast, 1.0f);
      at = next;
    }
  }

  // Drops what a source has proposed so far.
  void forget(size_t source) {
    bool any = false;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      any |= claims_[i * num_sources_ + source] > 0.0f;
      claims_[i * num_sources_ + source] = 0.0f;
    }
    if (any) keep(kRoot, 0);
  }

  // The chain with the most expected accepted tokens, at most `limit` long; returns its length.
  int32_t best(int32_t limit, int32_t* tokens, float* acceptance, int32_t* sources, std::vector<double>& values,
               std::vector<int32_t>& next) const {
    values.assign(nodes_.size() + 1, 0.0);  // of what follows a node, the root's first
    next.assign(nodes_.size() + 1, kNone);
    for (auto i = static_cast<int32_t>(nodes_.size()) - 1; i >= 0; --i) {
      if (nodes_[i].depth > limit) continue;
      const double value = estimate(i).first * (1.0 + values[i + 1]);
      if (value >= values[nodes_[i].parent + 1]) values[nodes_[i].parent + 1] = value, next[nodes_[i].parent + 1] = i;
    }
    int32_t length = 0;
    for (int32_t at = next[0]; at != kNone; at = next[at + 1], ++length) {
      tokens[length] = nodes_[at].token;
      const auto [estimated, source] = estimate(at);
      acceptance[length] = estimated;
      sources[length] = source;
    }
    return length;
  }

 private:
  int32_t child(int32_t parent, int32_t token) const {
    int32_t at = parent == kRoot ? first_ : nodes_[parent].first_child;
    while (at != kNone && nodes_[at].token != token) at = nodes_[at].next_sibling;
    return at;
  }

  int32_t put(int32_t token, int32_t parent, int32_t depth) {
    const auto made = static_cast<int32_t>(nodes_.size());
    nodes_.push_back({token, parent, depth});
    int32_t& first = parent == kRoot ? first_ : nodes_[parent].first_child;
    nodes_.back().next_sibling = first;
    first = made;
    return made;
  }

  // The acceptance of a node's token, and the source that says so: the last one that claims the node. What it proposes
  // elsewhere behind the same tokens leaves the others at most the rest.
  std::pair<float, int32_t> estimate(int32_t node) const {
    const float* own = claims_.data() + node * num_sources_;
    auto source = static_cast<int32_t>(num_sources_) - 1;
    while (source > 0 && own[source] <= 0.0f) --source;
    float left = 1.0f;
    const int32_t parent = nodes_[node].parent;
    for (int32_t at = parent == kRoot ? first_ : nodes_[parent].first_child; at != kNone; at = nodes_[at].next_sibling) {
      if (at == node) continue;
      const float* other = claims_.data() + at * num_sources_;
      if (static_cast<size_t>(source) + 1 < num_sources_)
        left -= *std::max_element(other + source + 1, other + num_sources_);
    }
    return {std::max(std::min(own[source], left), kLeast), source};
  }

  // Keeps the claimed nodes below `root` alone, `levels` higher.
  void keep(int32_t root, int32_t levels) {
    old_nodes_.swap(nodes_);
    old_claims_.swap(claims_);
    nodes_.clear();
    claims_.clear();
    first_ = kNone;
    moved_.assign(old_nodes_.size(), kNone);
    for (size_t i = 0; i < old_nodes_.size(); ++i) {
      const int32_t parent = old_nodes_[i].parent;
      const int32_t to = parent == root ? kRoot : parent == kRoot ? kNone : moved_[parent];
      const float* own = old_claims_.data() + i * num_sources_;
      if (to == kNone || *std::max_element(own, own + num_sources_) <= 0.0f) continue;
      moved_[i] = put(old_nodes_[i].token, to, old_nodes_[i].depth - levels);
      claims_.insert(claims_.end(), own, own + num_sources_);
    }
  }

  int64_t position_;
  size_t num_sources_;
  int32_t first_ = kNone;
  std::vector<Node> nodes_, old_nodes_;
  std::vector<float> claims_, old_claims_;  // [nodes, sources], 0: none
  std::vector<int32_t> moved_;
  std::vector<int32_t> trunk_;
};

class DraftTrees {
 public:
  DraftTrees(size_t num_sources, size_t max_nodes, size_t max_trunk)
      : num_sources_(num_sources), max_nodes_(max_nodes), max_trunk_(max_trunk) {}

  void open(int64_t response, int64_t position) { trees_.insert_or_assign(response, Tree(position, num_sources_)); }
  void close(int64_t response) { trees_.erase(response); }
  void clear() { trees_.clear(); }

  void advance(Row<int64_t> responses, Row<int32_t> offsets, Row<int32_t> tokens) {
    check(offsets.size() == responses.size() + 1 && static_cast<size_t>(offsets(responses.size())) <= tokens.size(),
          "offsets and tokens do not fit the responses");
    for (size_t i = 0; i < responses.size(); ++i)
      if (Tree* tree = find(responses(i)))
        tree->advance({tokens.data() + offsets(i), static_cast<size_t>(offsets(i + 1) - offsets(i))}, max_trunk_);
  }

  void add(size_t source, Row<int64_t> responses, Row<int64_t> starts, Table<int32_t> tokens, Row<int32_t> num_tokens,
           Table<float> acceptance, bool anew) {
    const size_t rows = responses.size(), width = tokens.shape(1);
    check(source < num_sources_, "no such source");
    check(starts.size() == rows && tokens.shape(0) == rows && num_tokens.size() == rows &&
              acceptance.shape(0) == rows && acceptance.shape(1) == width,
          "the drafts' arrays do not fit each other");
    for (size_t i = 0; i < rows; ++i) {
      Tree* tree = find(responses(i));
      if (anew && (tree == nullptr || tree->position() != starts(i))) {
        open(responses(i), starts(i));
        tree = find(responses(i));
      }
      if (tree == nullptr) continue;
      if (anew) tree->forget(source);
      const size_t length = std::min(static_cast<size_t>(std::max(num_tokens(i), 0)), width);
      tree->add(source, starts(i), {tokens.data() + i * width, length}, acceptance.data() + i * width, max_nodes_);
    }
  }

  void best(Row<int64_t> responses, Row<int64_t> positions, Row<int32_t> limits, OutTable<int32_t> tokens,
            OutRow<int32_t> num_tokens, OutTable<float> acceptance, OutTable<int32_t> sources) {
    const size_t rows = responses.size(), width = tokens.shape(1);
    check(positions.size() == rows && limits.size() == rows && tokens.shape(0) == rows && num_tokens.size() == rows &&
              acceptance.shape(0) == rows && acceptance.shape(1) == width && sources.shape(0) == rows &&
              sources.shape(1) == width,
          "the arrays do not fit each other");
    for (size_t i = 0; i < rows; ++i) {
      const Tree* tree = find(responses(i));
      const int32_t limit = std::min(limits(i), static_cast<int32_t>(width));
      num_tokens(i) = tree == nullptr || tree->position() != positions(i)
                          ? 0
                          : tree->best(limit, tokens.data() + i * width, acceptance.data() + i * width,
                                       sources.data() + i * width, values_, next_);
    }
  }

  size_t num_nodes() const {
    size_t total = 0;
    for (const auto& [response, tree] : trees_) total += tree.size();
    return total;
  }
  size_t num_responses() const { return trees_.size(); }

 private:
  Tree* find(int64_t response) {
    const auto found = trees_.find(response);
    return found == trees_.end() ? nullptr : &found->second;
  }

  size_t num_sources_, max_nodes_, max_trunk_;
  std::unordered_map<int64_t, Tree> trees_;
  std::vector<double> values_;
  std::vector<int32_t> next_;
};

}  // namespace

NB_MODULE(_tree, m) {
  nb::class_<DraftTrees>(m, "DraftTrees")
      .def(nb::init<size_t, size_t, size_t>(), "num_sources"_a, "max_nodes"_a, "max_trunk"_a)
      .def("open", &DraftTrees::open, "response"_a, "position"_a)
      .def("close", &DraftTrees::close, "response"_a)
      .def("clear", &DraftTrees::clear)
      .def("advance", &DraftTrees::advance, "responses"_a, "offsets"_a, "tokens"_a)
      .def("add", &DraftTrees::add)
      .def("best", &DraftTrees::best)
      .def_prop_ro("num_nodes", &DraftTrees::num_nodes)
      .def_prop_ro("num_responses", &DraftTrees::num_responses);
}
