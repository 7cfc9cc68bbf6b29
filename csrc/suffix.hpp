// Grouped suffix drafting: a counted, depth-capped suffix trie per rollout group (Seer 3.3, 4.4) and a shallower one
// that all groups share, whose counts are interpolated.
//
// The trie is lazy: a context that occurred once is a leaf that points into the text of the response it occurred in;
// at its second occurrence it is expanded by one token. So the nodes are the contexts that occurred at least twice
// and their continuations: a few per token, all counts exact. Invariants, after every public call:
//   * the explicit contexts are suffix-closed: if a context has a node, so has every suffix of it;
//   * an open response's `chain[d]` is the node of its last d tokens, for every d that has one (the cursor);
//   * children are listed by recency, the most recently seen first.
// An append visits the chain once: O(depth) with no search from the root, and no work proportional to the context.
// Drafts only read, so several threads may make them at once; nothing else may run meanwhile.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "dice.hpp"

namespace paceline {

inline constexpr uint32_t kMaxDepth = 256;
inline constexpr uint32_t kRoot = 0;  // never a child, so 0 also ends the lists of children
inline constexpr uint32_t kUnexpanded = std::numeric_limits<uint32_t>::max();
inline constexpr uint32_t kImplicit = std::numeric_limits<uint32_t>::max();
inline constexpr uint32_t kListedChildren = 8;  // with more children a node is searched by hash

struct Node {
  int32_t token = 0;
  uint32_t count = 0;            // occurrences of the context that ends here
  uint32_t mask = 0;             // responses it occurred in, one bit each (modulo 32)
  uint32_t next = 0;             // sibling seen before this one
  uint32_t previous = 0;         // sibling seen after this one
  uint32_t first_child = 0;      // kUnexpanded: a leaf
  uint32_t total_or_record = 0;  // sum of the children's counts; of a leaf: where its one occurrence is
  uint32_t distinct_or_offset = 0;

  bool is_leaf() const { return first_child == kUnexpanded; }
  uint32_t total() const { return total_or_record; }
  uint32_t distinct() const { return distinct_or_offset; }
  uint32_t record() const { return total_or_record; }
  uint32_t offset() const { return distinct_or_offset; }
};
static_assert(sizeof(Node) == 32);

// Open-addressing map (parent, token) -> child for the nodes with many children.
class ChildTable {
 public:
  uint32_t find(uint32_t parent, int32_t token) const {
    for (size_t i = start(parent, token);; i = (i + 1) & (slots_.size() - 1)) {
      const Slot& slot = slots_[i];
      if (slot.child == 0) return 0;
      if (slot.parent == parent && slot.token == token) return slot.child;
    }
  }

  void insert(uint32_t parent, int32_t token, uint32_t child) {
    if ((used_ + 1) * 5 > slots_.size() * 3) grow();
    place({parent, token, child});
    ++used_;
  }

  size_t bytes() const { return slots_.capacity() * sizeof(Slot); }

 private:
  struct Slot {
    uint32_t parent = 0;
    int32_t token = 0;
    uint32_t child = 0;
  };

  size_t start(uint32_t parent, int32_t token) const {
    const uint64_t key = (static_cast<uint64_t>(parent) << 32) | static_cast<uint32_t>(token);
    return static_cast<size_t>((key * 0x9E3779B97F4A7C15ull) >> shift_);
  }

  void place(const Slot& slot) {
    size_t i = start(slot.parent, slot.token);
    while (slots_[i].child != 0) i = (i + 1) & (slots_.size() - 1);
    slots_[i] = slot;
  }

  void grow() {
    std::vector<Slot> old(std::max<size_t>(64, slots_.size() * 2));
    old.swap(slots_);
    shift_ = 64 - std::countr_zero(slots_.size());
    for (const Slot& slot : old) {
      if (slot.child != 0) place(slot);
    }
  }

  std::vector<Slot> slots_;
  size_t used_ = 0;
  int shift_ = 64;
};

// ---------------------------------------------------------------------------------------------------------------
// The mixture: how far the counts of a context are believed before its next shorter context is asked.

inline constexpr uint32_t kDepthClasses = 16;
inline constexpr uint32_t kEvidenceClasses = 24;
inline constexpr uint32_t kNumBuckets = 2 * kDepthClasses * kEvidenceClasses;  // the group's, the shared ones

// What a context's continuations look like. `mask`: responses behind the only continuation (read if distinct == 1).
struct Evidence {
  uint32_t total = 0;
  uint32_t distinct = 0;
  uint32_t mask = 0;
};

inline uint32_t step_class(uint32_t value, uint32_t a, uint32_t b, uint32_t c) {
  return (value > a) + (value > b) + (value > c);  // no branches: which class comes next cannot be foreseen
}

// std::has_single_bit calls a function where processors without popcnt are to run it too.
inline bool is_one_bit(uint32_t mask) { return mask != 0 && (mask & (mask - 1)) == 0; }

// 12 classes of contexts with one continuation: how often, and in whose responses; 12 with several.
inline uint32_t evidence_class(const Evidence& e, uint32_t own) {
  if (e.distinct == 1) {
    const uint32_t whose = e.mask == own ? 0 : is_one_bit(e.mask) ? 1 : 2;
    return step_class(e.total, 1, 2, 4) * 3 + whose;
  }
  if (e.distinct == 2) return 12 + step_class(e.total, 2, 4, 8);
  if (e.distinct <= 4) return 16 + step_class(e.total, 4, 8, 16);
  return 20 + step_class(e.total / e.distinct, 1, 3, 7);
}

inline uint32_t bucket_of(bool shared, uint32_t depth, const Evidence& e, uint32_t own) {
  const uint32_t row = (shared ? kDepthClasses : 0) + std::min(depth, kDepthClasses) - 1;
  return row * kEvidenceClasses + evidence_class(e, own);
}

// Escape probabilities per bucket, learned by online expectation-maximisation on the appended tokens
// (Jelinek-Mercer interpolation with bucketed weights; the posterior share of the shorter contexts is the statistic).
class Mixture {
 public:
  struct Level {
    uint32_t bucket;
    uint32_t depth;
    double share;  // count of the token over the total of the context
  };

  Mixture() {
    for (uint32_t b = 0; b < kNumBuckets; ++b) {
      escaped_[b] = kPriorStrength * kPriorEscape;
      seen_[b] = kPriorStrength;
      escape_[b] = kPriorEscape;
    }
  }

  double escape(uint32_t bucket) const { return escape_[bucket]; }
  const std::array<double, kNumBuckets>& escapes() const { return escape_; }

  // One appended token. `levels`: deepest context first; `base`: its probability below depth 1.
  void learn(std::span<Level> levels, double base) {
    double below[2 * kMaxDepth];
    double p = base;
    for (size_t i = levels.size(); i-- > 0;) {
      below[i] = escape_[levels[i].bucket] * p;
      p = below[i] + (1.0 - escape_[levels[i].bucket]) * levels[i].share;
      below[i] /= p;
    }
    double reach = 1.0;
    for (size_t i = 0; i < levels.size() && reach > kNegligible; ++i) {
      count(levels[i].bucket, reach, reach * below[i]);
      reach *= below[i];
    }
  }

 private:
  static constexpr double kPriorStrength = 4.0;
  static constexpr double kPriorEscape = 0.7;
  static constexpr double kMemory = 4096.0;
  static constexpr double kNegligible = 1e-3;

  void count(uint32_t bucket, double seen, double escaped) {
    seen_[bucket] += seen;
    escaped_[bucket] += escaped;
    if (seen_[bucket] > kMemory) {
      seen_[bucket] *= 0.5;
      escaped_[bucket] *= 0.5;
    }
    escape_[bucket] = std::clamp(escaped_[bucket] / seen_[bucket], 1e-4, 0.9999);
  }

  std::array<double, kNumBuckets> seen_{};
  std::array<double, kNumBuckets> escaped_{};
  std::array<double, kNumBuckets> escape_{};
};

// ---------------------------------------------------------------------------------------------------------------
// One trie.

// The prompt (record 0) or one response.
struct Record {
  std::vector<int32_t> text;
  std::vector<uint32_t> chain{kRoot};
  uint32_t bit = 1;       // its place in the masks
  uint32_t position = 0;  // tokens the response has; below text.size() while it repeats what is counted already
  bool follows_prompt = false;
  bool open = true;
};

// A context in a draft: a node, or a place in the text of the only response that has it.
struct Entry {
  uint32_t node = kImplicit;
  uint32_t record = 0;
  uint32_t offset = 0;
};

struct Candidate {
  int32_t token;
  uint32_t mask;  // responses it occurred in after the longest context that has it (groups, if that is shared)
  double probability;
};

// The candidates of one prediction, in the order in which contexts name them. Every context names many again, so each
// token's place is remembered.
class Candidates {
 public:
  void clear() {
    for (const Candidate& candidate : list_) places_[slot(candidate.token)] = 0;
    list_.clear();
  }

  void add(int32_t token, uint32_t mask, double probability) {
    uint32_t& place = places_[slot(token)];
    if (place == 0) {
      list_.push_back({token, mask, probability});
      place = static_cast<uint32_t>(list_.size());
    } else if (list_[place - 1].token == token) {
      list_[place - 1].probability += probability;
    } else {
      search(token, mask, probability);
    }
  }

  size_t size() const { return list_.size(); }
  const Candidate& operator[](size_t i) const { return list_[i]; }
  auto begin() const { return list_.begin(); }
  auto end() const { return list_.end(); }

 private:
  static size_t slot(int32_t token) { return static_cast<uint32_t>(token) % kSlots; }

  // Another token was first in the slot.
  void search(int32_t token, uint32_t mask, double probability) {
    const auto known = std::ranges::find(list_, token, &Candidate::token);
    if (known == list_.end()) {
      list_.push_back({token, mask, probability});
    } else {
      known->probability += probability;
    }
  }

  static constexpr size_t kSlots = 256;

  std::vector<Candidate> list_;
  std::array<uint32_t, kSlots> places_{};  // 1 + index in the list of the slot's first token, 0: none
};

// The text of one group, or (shared, without a prompt) of all groups.
class Trie {
 public:
  Trie(uint32_t max_depth, bool shared) : max_depth_(max_depth), shared_(shared) {
    nodes_.emplace_back();
    records_.emplace_back();
    records_[0].open = false;
  }

  bool has_prompt() const { return !records_[0].text.empty(); }
  std::span<const int32_t> prompt() const { return records_[0].text; }
  const Record& record(uint32_t r) const { return records_[r]; }
  size_t num_records() const { return records_.size(); }

  // Weights are not learned from prompts: the model did not write them.
  void insert_prompt(std::span<const int32_t> tokens) {
    Record& prompt = records_[0];
    prompt.open = true;
    for (int32_t token : tokens) push(0, token);
    // Every response goes on from here, each in its own way: the last contexts must count them one by one.
    const auto length = static_cast<uint32_t>(tokens.size());
    for (uint32_t d = 1; d <= std::min(max_depth_, length); ++d) unfold(tokens.subspan(length - d));
    prompt.open = false;
  }

  // A new record, begun after the prompt.
  uint32_t add_record(uint32_t bit) {
    Record& record = records_.emplace_back();
    record.bit = bit;
    record.follows_prompt = has_prompt();
    if (has_prompt()) record.chain = records_[0].chain;
    chain_bytes_ += record.chain.capacity() * sizeof(uint32_t);
    return static_cast<uint32_t>(records_.size() - 1);
  }

  // A new record that shares the first `position` tokens of `r`, already counted, and leaves it there. Closes `r`.
  uint32_t fork(uint32_t r, uint32_t position, uint32_t bit) {
    records_[r].open = false;
    const uint32_t other = add_record(bit);
    Record& record = records_[other];
    record.text.assign(records_[r].text.begin(), records_[r].text.begin() + position);
    record.position = position;
    record.follows_prompt = records_[r].follows_prompt;
    text_bytes_ += record.text.capacity() * sizeof(int32_t);
    reopen(other);
    return other;
  }

  // Set a record back to its first `position` tokens; what it has counted stays counted.
  void rewind(uint32_t r, uint32_t position) {
    records_[r].position = position;
    reopen(r);
  }

  // Find the chain of a record at its position from scratch: O(depth^2), for responses that resume.
  void reopen(uint32_t r) {
    Record& record = records_[r];
    record.open = true;
    chain_bytes_ -= record.chain.capacity() * sizeof(uint32_t);
    record.chain.assign(1, kRoot);
    for (uint32_t d = 1; d <= max_depth_; ++d) {
      const uint32_t node = locate(record, d);
      if (node == 0) break;
      record.chain.push_back(node);
    }
    chain_bytes_ += record.chain.capacity() * sizeof(uint32_t);
  }

  void close(uint32_t r) {
    records_[r].open = false;
    chain_bytes_ -= records_[r].chain.capacity() * sizeof(uint32_t);
    std::vector<uint32_t>().swap(records_[r].chain);
  }

  // Count one token of an open record: deepest context first, so that an expansion never meets a count of this token.
  void push(uint32_t r, int32_t token) {
    Record& record = records_[r];
    append_text(record, token);
    const uint32_t before = record.position++;
    previous_.swap(record.chain);
    record.chain.assign(1, kRoot);
    levels_.clear();
    for (size_t d = previous_.size(); d-- > 0;) {
      const uint32_t node = previous_[d];
      if (nodes_[node].is_leaf()) {
        if (nodes_[node].record() == r && nodes_[node].offset() == before) continue;
        expand(node, static_cast<uint32_t>(d));
      }
      visit(node, static_cast<uint32_t>(d), r, token);
    }
    ++num_tokens_;
  }

  // What each context gave the last pushed token, deepest first, and what the empty context gave it.
  std::span<const Mixture::Level> levels() const { return levels_; }
  double base() const { return base_; }

  // The contexts of a record, shortest first, as a draft begins from them; none if the record is closed. The shared
  // trie leaves out those that only the asker's group, `own`, is behind, as it is behind all longer ones and all that
  // follow: the group's own trie says everything about them.
  void start(uint32_t r, uint32_t own, std::vector<Entry>& chain) const {
    chain.clear();
    for (uint32_t node : records_[r].chain) {
      if (!enter(node, own, chain)) break;
    }
  }

  // `chain` after one more token.
  void advance(std::vector<Entry>& chain, uint32_t own, int32_t token) const {
    Entry carried{kRoot, 0, 0};
    size_t depth = 0;
    for (; depth < chain.size(); ++depth) {
      Entry following;
      if (!follow(chain[depth], own, token, following)) break;
      chain[depth] = carried;
      carried = following;
    }
    if (depth < chain.size()) {
      chain[depth] = carried;
      chain.resize(depth + 1);
    } else if (depth <= max_depth_) {
      chain.push_back(carried);
    }
    while (chain.size() > 1 && !has_continuation(chain.back())) chain.pop_back();
  }

  // Add what a context of `depth` tokens says about the next one; `reach` is the mass that longer contexts left.
  void offer(const Entry& entry, uint32_t depth, uint32_t own, const Mixture& mixture, double& reach,
             Candidates& out) const {
    const Evidence evidence = evidence_of(entry);
    if (evidence.total == 0) return;
    const double escape = mixture.escape(bucket_of(shared_, depth, evidence, own));
    const double weight = reach * (1.0 - escape) / evidence.total;
    reach *= escape;
    if (entry.node == kImplicit) {
      const Record& record = records_[entry.record];
      out.add(record.text[entry.offset], record.bit, weight);
      return;
    }
    uint32_t child = nodes_[entry.node].first_child;
    for (uint32_t i = 0; child != 0 && i < kWidth; ++i, child = nodes_[child].next) {
      const Node& node = nodes_[child];
      out.add(node.token, node.mask, weight * node.count);
    }
  }

  // Occurrences of a context of at most max_depth + 1 tokens, by a walk from the root.
  uint64_t count(std::span<const int32_t> context) const {
    uint32_t node = kRoot;
    for (size_t i = 0; i < context.size(); ++i) {
      if (nodes_[node].is_leaf()) return matches_leaf(node, context.subspan(i)) ? 1 : 0;
      node = find(node, context[i]);
      if (node == 0) return 0;
    }
    return node == kRoot ? nodes_[kRoot].total() : nodes_[node].count;
  }

  uint32_t max_depth() const { return max_depth_; }
  uint64_t num_tokens() const { return num_tokens_; }
  size_t num_nodes() const { return nodes_.size(); }

  size_t bytes() const {
    return sizeof(Trie) + nodes_.capacity() * sizeof(Node) + table_.bytes() + records_.capacity() * sizeof(Record) +
           text_bytes_ + chain_bytes_;
  }

 private:
  static constexpr uint32_t kWidth = 12;  // continuations read per context, the most recent ones

  // Expand all contexts along a text from the root.
  void unfold(std::span<const int32_t> text) {
    uint32_t node = kRoot;
    for (uint32_t depth = 0;; ++depth) {
      if (nodes_[node].is_leaf()) expand(node, depth);
      if (depth == text.size()) return;
      node = find(node, text[depth]);
    }
  }

  // The token `back` places before the end of a record, the prompt included. Returns false before the beginning.
  bool token_before(const Record& record, uint32_t back, int32_t& token) const {
    if (back <= record.position) {
      token = record.text[record.position - back];
      return true;
    }
    const std::vector<int32_t>& prompt = records_[0].text;
    const uint32_t beyond = back - record.position;
    if (!record.follows_prompt || beyond > prompt.size()) return false;
    token = prompt[prompt.size() - beyond];
    return true;
  }

  uint32_t locate(const Record& record, uint32_t depth) const {
    uint32_t node = kRoot;
    for (uint32_t back = depth; back > 0; --back) {
      int32_t token;
      if (nodes_[node].is_leaf() || !token_before(record, back, token)) return 0;
      node = find(node, token);
      if (node == 0) return 0;
    }
    return node;
  }

  uint32_t find(uint32_t parent, int32_t token) const {
    const Node& node = nodes_[parent];
    if (node.distinct() > kListedChildren) return table_.find(parent, token);
    uint32_t child = node.first_child;
    while (child != 0 && nodes_[child].token != token) child = nodes_[child].next;
    return child;
  }

  void append_text(Record& record, int32_t token) {
    text_bytes_ -= record.text.capacity() * sizeof(int32_t);
    record.text.push_back(token);
    text_bytes_ += record.text.capacity() * sizeof(int32_t);
  }

  // Count `token` after the context `parent`.
  void visit(uint32_t parent, uint32_t depth, uint32_t r, int32_t token) {
    const uint32_t child = find(parent, token);
    note_level(parent, depth, records_[r].bit, child);
    ++nodes_[parent].total_or_record;
    if (child == 0) {
      set_cursor(r, depth + 1, add_leaf(parent, token, r, records_[r].position));
      return;
    }
    Node& node = nodes_[child];
    ++node.count;
    node.mask |= records_[r].bit;
    move_to_front(parent, child);
    set_cursor(r, depth + 1, child);
    if (node.is_leaf() && depth < max_depth_) expand(child, depth + 1);
  }

  void note_level(uint32_t parent, uint32_t depth, uint32_t own, uint32_t child) {
    const Node& node = nodes_[parent];
    const double share =
        child == 0 || node.total() == 0 ? 0.0 : static_cast<double>(nodes_[child].count) / node.total();
    if (depth == 0) {
      base_ = share;
    } else if (node.total() > 0 && !(shared_ && node.mask == own)) {
      levels_.push_back({bucket_of(shared_, depth, evidence_of(node), own), depth, share});
    }
  }

  Evidence evidence_of(const Node& node) const {
    return {node.total(), node.distinct(), node.distinct() == 1 ? nodes_[node.first_child].mask : 0};
  }

  Evidence evidence_of(const Entry& entry) const {
    if (entry.node == kImplicit) return {1, 1, records_[entry.record].bit};
    return evidence_of(nodes_[entry.node]);
  }

  bool is_left_out(uint32_t id, uint32_t own) const { return shared_ && nodes_[id].mask == own; }

  // Give a leaf its children: the one continuation of its one occurrence, if that has come already.
  void expand(uint32_t leaf, uint32_t depth) {
    const uint32_t s = nodes_[leaf].record();
    const uint32_t offset = nodes_[leaf].offset();
    nodes_[leaf].first_child = 0;
    nodes_[leaf].total_or_record = 0;
    nodes_[leaf].distinct_or_offset = 0;
    const Record& record = records_[s];
    if (offset >= record.text.size()) return;
    nodes_[leaf].total_or_record = 1;
    const uint32_t child = add_leaf(leaf, record.text[offset], s, offset + 1);
    if (offset + 1 == record.text.size()) set_cursor(s, depth + 1, child);
  }

  uint32_t add_leaf(uint32_t parent, int32_t token, uint32_t r, uint32_t offset) {
    if (nodes_.size() == nodes_.capacity()) nodes_.reserve(std::max<size_t>(64, nodes_.size() * 3 / 2));
    const auto id = static_cast<uint32_t>(nodes_.size());
    const uint32_t head = nodes_[parent].first_child;
    nodes_.push_back({token, 1, records_[r].bit, head, 0, kUnexpanded, r, offset});
    if (head != 0) nodes_[head].previous = id;
    nodes_[parent].first_child = id;
    const uint32_t distinct = ++nodes_[parent].distinct_or_offset;
    if (distinct == kListedChildren + 1) {
      for (uint32_t child = id; child != 0; child = nodes_[child].next) {
        table_.insert(parent, nodes_[child].token, child);
      }
    } else if (distinct > kListedChildren) {
      table_.insert(parent, token, id);
    }
    return id;
  }

  void move_to_front(uint32_t parent, uint32_t child) {
    const uint32_t head = nodes_[parent].first_child;
    if (head == child) return;
    Node& node = nodes_[child];
    nodes_[node.previous].next = node.next;
    if (node.next != 0) nodes_[node.next].previous = node.previous;
    node.previous = 0;
    node.next = head;
    nodes_[head].previous = child;
    nodes_[parent].first_child = child;
  }

  void set_cursor(uint32_t r, uint32_t depth, uint32_t node) {
    Record& record = records_[r];
    if (depth > max_depth_ || !record.open || record.position != record.text.size()) return;
    if (record.chain.size() <= depth) {
      chain_bytes_ -= record.chain.capacity() * sizeof(uint32_t);
      record.chain.resize(depth + 1);
      chain_bytes_ += record.chain.capacity() * sizeof(uint32_t);
    }
    record.chain[depth] = node;
  }

  bool has_continuation(const Entry& entry) const {
    if (entry.node != kImplicit) return nodes_[entry.node].total() > 0;
    return entry.offset < records_[entry.record].text.size();
  }

  bool enter(uint32_t id, uint32_t own, std::vector<Entry>& chain) const {
    if (is_left_out(id, own)) return false;
    const Node& node = nodes_[id];
    const Entry entry = node.is_leaf() ? Entry{kImplicit, node.record(), node.offset()} : Entry{id, 0, 0};
    if (!has_continuation(entry)) return false;
    chain.push_back(entry);
    return true;
  }

  bool follow(const Entry& entry, uint32_t own, int32_t token, Entry& following) const {
    if (entry.node == kImplicit) {
      const std::vector<int32_t>& text = records_[entry.record].text;
      if (entry.offset >= text.size() || text[entry.offset] != token) return false;
      following = {kImplicit, entry.record, entry.offset + 1};
      return true;
    }
    const uint32_t child = find(entry.node, token);
    if (child == 0 || is_left_out(child, own)) return false;
    const Node& node = nodes_[child];
    following = node.is_leaf() ? Entry{kImplicit, node.record(), node.offset()} : Entry{child, 0, 0};
    return true;
  }

  bool matches_leaf(uint32_t leaf, std::span<const int32_t> rest) const {
    const std::vector<int32_t>& text = records_[nodes_[leaf].record()].text;
    const size_t offset = nodes_[leaf].offset();
    if (offset + rest.size() > text.size()) return false;
    return std::equal(rest.begin(), rest.end(), text.begin() + static_cast<std::ptrdiff_t>(offset));
  }

  uint32_t max_depth_;
  bool shared_;
  std::vector<Node> nodes_;
  ChildTable table_;
  std::vector<Record> records_;
  std::vector<uint32_t> previous_;
  std::vector<Mixture::Level> levels_;
  double base_ = 0.0;
  uint64_t num_tokens_ = 0;
  size_t text_bytes_ = 0;
  size_t chain_bytes_ = 0;
};

}  // namespace paceline
