// paceline._tree: the draft tree of every running response, where the drafts of all sources meet.
//
// A tree holds a response's text, to which drafts made for an earlier position are fitted, and the tokens that sources
// propose behind it. A node stands for a chain of tokens from there; each source that proposes the chain has a claim on
// it, its estimate of the last token's acceptance. A source that claims a node claims all nodes above it. Nodes lie in
// the order in which they were added, so a parent before its children.

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arrays.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace paceline;

constexpr int32_t kRoot = -1;
constexpr int32_t kNone = -2;
constexpr float kLeast = 1e-6f;  // a claim is above 0, whatever its estimate

// A token of a chain that is offered.
struct Draft {
  int32_t token;
  float acceptance;
  int32_t source;
};

struct Node {
  int32_t token;
  int32_t parent;
  int32_t depth;  // 1: the next token of the response
  int32_t first_child = kNone;
  int32_t next_sibling = kNone;
};

class Tree {
 public:
  // `text` are the tokens before `position`, as far as they are known.
  Tree(int64_t position, std::span<const int32_t> text, size_t num_sources)
      : position_(position), num_sources_(num_sources), text_(text.begin(), text.end()) {}

  int64_t position() const { return position_; }
  size_t size() const { return nodes_.size(); }
  int32_t most_ahead = 0;  // undecided tokens that a draft worker may draft
  std::span<const int32_t> text() const { return text_; }

  // Walks down along decided tokens; what does not go on from them is dropped.
  void advance(std::span<const int32_t> tokens) {
    int32_t at = kRoot;
    for (int32_t token : tokens)
      if (at != kNone) at = child(at, token);
    position_ += static_cast<int64_t>(tokens.size());
    text_.insert(text_.end(), tokens.begin(), tokens.end());
    if (!tokens.empty() && !nodes_.empty()) keep(at, static_cast<int32_t>(tokens.size()));
  }

  // Adds what of a draft from position `start` on fits the decided tokens and goes beyond them. parents: of each token,
  // its place in the draft, kRoot: it is a first one; without parents each follows the one before.
  void add(size_t source, int64_t start, std::span<const int32_t> tokens, const float* acceptance,
           const int32_t* parents, size_t max_nodes) {
    const int64_t behind = position_ - start;
    if (behind < 0 || behind > static_cast<int64_t>(text_.size())) return;
    places_.assign(tokens.size(), {kNone, 0});
    for (size_t j = 0; j < tokens.size(); ++j) {
      const int32_t parent = parents == nullptr ? static_cast<int32_t>(j) - 1 : parents[j];
      const Place above = parent == kRoot ? Place{kRoot, 0} : places_[parent];
      if (above.node == kNone) continue;
      if (above.depth < behind) {
        const bool fits = text_[text_.size() - behind + above.depth] == tokens[j];
        places_[j] = {fits ? kRoot : kNone, above.depth + 1};
      } else {
        places_[j] = {claim(source, above.node, tokens[j], acceptance[j], max_nodes), above.depth + 1};
      }
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

  // How many tokens of a source these decided ones judge, up to its first wrong one, and how many of them are right. Of
  // the tokens that it proposes behind the same ones the likeliest counts, of equal ones the first.
  std::pair<int32_t, int32_t> judge(size_t source, std::span<const int32_t> decided) const {
    int32_t num_right = 0, at = kRoot;
    for (int32_t token : decided) {
      at = token < 0 ? kNone : likeliest(source, at);
      if (at == kNone) break;
      if (nodes_[at].token != token) return {num_right + 1, num_right};
      ++num_right;
    }
    return {num_right, num_right};
  }

  // Whether any source from this one on proposes a next token.
  bool holds(size_t source) const {
    for (int32_t at = first_; at != kNone; at = nodes_[at].next_sibling) {
      const float* own = claims_.data() + at * num_sources_;
      if (std::any_of(own + source, own + num_sources_, [](float claim) { return claim > 0.0f; })) return true;
    }
    return false;
  }

  // The chain with the most expected accepted tokens, at most `limit` long.
  void best(int32_t limit, std::vector<Draft>& chain, std::vector<double>& values, std::vector<int32_t>& next) const {
    values.assign(nodes_.size() + 1, 0.0);  // of what follows a node, the root's first
    next.assign(nodes_.size() + 1, kNone);
    for (auto i = static_cast<int32_t>(nodes_.size()) - 1; i >= 0; --i) {
      if (nodes_[i].depth > limit) continue;
      const double value = estimate(i).first * (1.0 + values[i + 1]);
      if (value >= values[nodes_[i].parent + 1]) values[nodes_[i].parent + 1] = value, next[nodes_[i].parent + 1] = i;
    }
    chain.clear();
    for (int32_t at = next[0]; at != kNone; at = next[at + 1]) {
      const auto [acceptance, source] = estimate(at);
      chain.push_back({nodes_[at].token, acceptance, source});
    }
  }

 private:
  // Where a token of a draft stands: its node, kRoot for a decided token that fits; and tokens from the draft's start.
  struct Place {
    int32_t node;
    int64_t depth;
  };

  // The child of a node with this token, made where there is none, with a source's claim; kNone where there is no room.
  int32_t claim(size_t source, int32_t parent, int32_t token, float acceptance, size_t max_nodes) {
    int32_t made = child(parent, token);
    if (made == kNone) {
      if (nodes_.size() >= max_nodes) return kNone;
      made = put(token, parent, parent == kRoot ? 1 : nodes_[parent].depth + 1);
      claims_.resize(claims_.size() + num_sources_, 0.0f);
    }
    claims_[made * num_sources_ + source] = std::clamp(acceptance, kLeast, 1.0f);
    return made;
  }

  int32_t first_child(int32_t parent) const { return parent == kRoot ? first_ : nodes_[parent].first_child; }

  // The child of a node that a source believes in most; kNone where it proposes none.
  int32_t likeliest(size_t source, int32_t parent) const {
    int32_t best = kNone;
    float claim = kLeast;
    for (int32_t at = first_child(parent); at != kNone; at = nodes_[at].next_sibling)  // what was added last comes first
      if (claims_[at * num_sources_ + source] >= claim) claim = claims_[at * num_sources_ + source], best = at;
    return best;
  }

  int32_t child(int32_t parent, int32_t token) const {
    int32_t at = first_child(parent);
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
    for (int32_t at = first_child(nodes_[node].parent); at != kNone; at = nodes_[at].next_sibling) {
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
  std::vector<Place> places_;
  std::vector<int32_t> text_;
};

// Reads numbers from bytes, in the machine's order.
class Reader {
 public:
  explicit Reader(std::span<const char> data) : data_(data) {}

  bool is_empty() const { return data_.empty(); }

  template <typename T>
  T one() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }

  template <typename T>
  void many(size_t count, std::vector<T>& values) {
    check(count <= data_.size(), kTorn);
    values.resize(count);
    if (count == 0) return;
    std::memcpy(values.data(), take(count * sizeof(T)), count * sizeof(T));
  }

 private:
  static constexpr const char* kTorn = "the packed drafts are torn";

  const char* take(size_t count) {
    check(count <= data_.size(), kTorn);
    const char* first = data_.data();
    data_ = data_.subspan(count);
    return first;
  }

  std::span<const char> data_;
};

class DraftTrees {
 public:
  DraftTrees(size_t num_sources, size_t max_nodes, int32_t most_ahead)
      : num_sources_(num_sources), max_nodes_(max_nodes), most_ahead_(most_ahead) {}

  void open(int64_t response, Row<int32_t> text) {
    begin(response, static_cast<int64_t>(text.size()), {text.data(), text.size()});
  }

  nb::bytes text(int64_t response) const {
    const auto found = trees_.find(response);
    if (found == trees_.end()) return nb::bytes("", 0);
    const auto text = found->second.text();
    return nb::bytes(text.data(), text.size_bytes());
  }

  void close(int64_t response) { trees_.erase(response); }
  void clear() { trees_.clear(); }

  void advance(Row<int64_t> responses, Row<int32_t> offsets, Row<int32_t> tokens) {
    check(offsets.size() == responses.size() + 1 && static_cast<size_t>(offsets(responses.size())) <= tokens.size(),
          "offsets and tokens do not fit the responses");
    for (size_t i = 0; i < responses.size(); ++i)
      if (Tree* tree = find(responses(i)))
        tree->advance({tokens.data() + offsets(i), static_cast<size_t>(offsets(i + 1) - offsets(i))});
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
        begin(responses(i), starts(i), {});
        tree = find(responses(i));
      }
      if (tree == nullptr) continue;
      if (anew) tree->forget(source);
      const size_t length = std::min(static_cast<size_t>(std::max(num_tokens(i), 0)), width);
      tree->add(source, starts(i), {tokens.data() + i * width, length}, acceptance.data() + i * width, nullptr,
                max_nodes_);
    }
  }

  // Drafts of several responses one after another, as drafting/worker_wire.py packs them.
  void add_packed(size_t source, const nb::bytes& drafts) {
    check(source < num_sources_, "no such source");
    for (Reader reader({drafts.c_str(), drafts.size()}); !reader.is_empty();) {
      const auto response = reader.one<int64_t>(), start = reader.one<int64_t>(), count = reader.one<int64_t>();
      reader.many(static_cast<size_t>(count), tokens_);
      reader.many(tokens_.size(), parents_);
      reader.many(tokens_.size(), acceptance_);
      for (size_t j = 0; j < parents_.size(); ++j)
        check(parents_[j] >= kRoot && parents_[j] < static_cast<int32_t>(j), "a draft token comes before its parent");
      if (Tree* tree = find(response)) tree->add(source, start, tokens_, acceptance_.data(), parents_.data(), max_nodes_);
    }
  }

  // Fills how many tokens of a source those decided for each response judge, and how many of these are right.
  void judge(size_t source, Row<int64_t> responses, Table<int32_t> decided, OutRow<int32_t> told,
             OutRow<int32_t> right) {
    const size_t rows = responses.size(), width = decided.shape(1);
    check(source < num_sources_, "no such source");
    check(decided.shape(0) == rows && told.size() == rows && right.size() == rows,
          "the arrays do not fit each other");
    for (size_t i = 0; i < rows; ++i) {
      const Tree* tree = find(responses(i));
      std::tie(told(i), right(i)) =
          tree == nullptr ? std::pair{0, 0} : tree->judge(source, {decided.data() + i * width, width});
    }
  }

  bool holds(size_t source, Row<int64_t> responses) {
    check(source < num_sources_, "no such source");
    return std::any_of(responses.data(), responses.data() + responses.size(), [&](int64_t response) {
      const Tree* tree = find(response);
      return tree != nullptr && tree->holds(source);
    });
  }

  void allow(Row<int64_t> responses, Row<int32_t> most_ahead) {
    check(most_ahead.size() == responses.size(), "the arrays do not fit each other");
    for (size_t i = 0; i < responses.size(); ++i)
      if (Tree* tree = find(responses(i))) tree->most_ahead = most_ahead(i);
  }

  // Fills the planes of `table`: tokens, acceptance (its bits), sources. Returns for how many responses more may be
  // drafted ahead, and of these the sum of the probabilities that all that there is is accepted.
  std::pair<int64_t, double> best(Row<int64_t> responses, Row<int64_t> positions, Row<int32_t> limits,
                                  OutCube<int32_t> table, OutRow<int32_t> num_tokens) {
    const size_t rows = responses.size(), width = table.shape(2);
    check(positions.size() == rows && limits.size() == rows && num_tokens.size() == rows && table.shape(0) == 3 &&
              table.shape(1) == rows,
          "the arrays do not fit each other");
    std::pair<int64_t, double> open{0, 0.0};
    for (size_t i = 0; i < rows; ++i) {
      const Tree* tree = find(responses(i));
      num_tokens(i) = 0;
      if (tree == nullptr || tree->position() != positions(i)) continue;
      const int32_t limit = std::min(limits(i), static_cast<int32_t>(width));
      tree->best(limit, chain_, values_, next_);
      double whole = 1.0;
      for (size_t j = 0; j < chain_.size(); ++j) {
        const size_t slot = i * width + j, plane = rows * width;
        table.data()[slot] = chain_[j].token;
        table.data()[plane + slot] = std::bit_cast<int32_t>(chain_[j].acceptance);
        table.data()[2 * plane + slot] = chain_[j].source;
        whole *= chain_[j].acceptance;
      }
      num_tokens(i) = static_cast<int32_t>(chain_.size());
      if (num_tokens(i) < std::min(limits(i), tree->most_ahead)) open = {open.first + 1, open.second + whole};
    }
    return open;
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

  void begin(int64_t response, int64_t position, std::span<const int32_t> text) {
    trees_.insert_or_assign(response, Tree(position, text, num_sources_)).first->second.most_ahead = most_ahead_;
  }

  size_t num_sources_, max_nodes_;
  int32_t most_ahead_;
  std::unordered_map<int64_t, Tree> trees_;
  std::vector<int32_t> tokens_, parents_;
  std::vector<float> acceptance_;
  std::vector<Draft> chain_;
  std::vector<double> values_;
  std::vector<int32_t> next_;
};

}  // namespace

NB_MODULE(_tree, m) {
  nb::class_<DraftTrees>(m, "DraftTrees")
      .def(nb::init<size_t, size_t, int32_t>(), "num_sources"_a, "max_nodes"_a, "most_ahead"_a)
      .def("open", &DraftTrees::open, "response"_a, "text"_a)
      .def("text", &DraftTrees::text, "response"_a)
      .def("close", &DraftTrees::close, "response"_a)
      .def("clear", &DraftTrees::clear)
      .def("advance", &DraftTrees::advance, "responses"_a, "offsets"_a, "tokens"_a)
      .def("add", &DraftTrees::add)
      .def("add_packed", &DraftTrees::add_packed)
      .def("judge", &DraftTrees::judge)
      .def("holds", &DraftTrees::holds)
      .def("allow", &DraftTrees::allow, "responses"_a, "most_ahead"_a)
      .def("best", &DraftTrees::best)
      .def_prop_ro("num_nodes", &DraftTrees::num_nodes)
      .def_prop_ro("num_responses", &DraftTrees::num_responses);
}
