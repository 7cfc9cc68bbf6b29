// All groups of an engine: a trie per group, one shallow trie that all share, the learned mixture and a memory bound.

#pragma once

#include "suffix.hpp"

namespace paceline {

// A rollout group: its trie, and which records its responses have there and in the shared trie.
struct Group {
  struct Place {
    uint32_t record = 0;
    uint32_t shared_record = 0;  // 0: none
    uint32_t generation = 0;     // of the shared trie that `shared_record` is in
  };

  Group(uint32_t max_depth, uint32_t serial) : trie(max_depth, false), bit(1u << (serial & 31u)) {}

  size_t bytes() const { return sizeof(Group) + trie.bytes() + places.size() * kPlaceBytes; }

  const Place* find(int64_t response) const {
    const auto found = places.find(response);
    return found == places.end() ? nullptr : &found->second;
  }

  static constexpr size_t kPlaceBytes = 64;  // a hash-map node and its bucket

  Trie trie;
  uint32_t bit;  // the group's place in the masks of the shared trie
  std::unordered_map<int64_t, Place> places;
  uint64_t last_used = 0;
};

// Where a response stands in both tries, as a draft walks on from there.
struct Contexts {
  std::vector<Entry> group;
  std::vector<Entry> shared;
};

class Forest {
 public:
  Forest(uint32_t max_depth, uint32_t shared_depth, uint64_t max_bytes)
      : max_depth_(max_depth), shared_depth_(shared_depth), max_bytes_(max_bytes), shared_(shared_depth, true) {}

  // -- text

  Group& open(int64_t id) {
    std::unique_ptr<Group>& group = groups_[id];
    if (group == nullptr) {
      group = std::make_unique<Group>(max_depth_, serial_++);
      group_bytes_ += group->bytes();
    }
    group->last_used = ++clock_;
    return *group;
  }

  void insert_prompt(Group& group, std::span<const int32_t> tokens) {
    const Account account(*this, group);
    group.trie.insert_prompt(tokens);
  }

  void append(int64_t id, int64_t response, std::span<const int32_t> tokens) {
    Group& group = open(id);
    const Account account(*this, group);
    Group::Place& place = place_of(group, response);
    if (!group.trie.record(place.record).open) group.trie.reopen(place.record);
    for (const int32_t token : tokens) append_token(group, place, token);
  }

  // Make the response's tokens exactly `tokens`; what is counted already is not counted again.
  void resync(int64_t id, int64_t response, std::span<const int32_t> tokens) {
    Group& group = open(id);
    size_t same = 0;
    {
      const Account account(*this, group);
      Group::Place& place = place_of(group, response);
      const std::vector<int32_t>& text = group.trie.record(place.record).text;
      const size_t limit = std::min(text.size(), tokens.size());
      while (same < limit && text[same] == tokens[same]) ++same;
      if (same < limit) {
        fork(group, place, static_cast<uint32_t>(same));
      } else {
        if (same < text.size()) leave_shared(place);
        group.trie.rewind(place.record, static_cast<uint32_t>(same));
      }
    }
    append(id, response, tokens.subspan(same));
  }

  void close(int64_t id, int64_t response) {
    const auto found = groups_.find(id);
    if (found == groups_.end()) return;
    Group& group = *found->second;
    if (const Group::Place* place = group.find(response); place != nullptr) {
      const Account account(*this, group);
      group.trie.close(place->record);
      if (is_shared(*place)) shared_.close(place->shared_record);
    }
  }

  void drop(int64_t id) {
    const auto found = groups_.find(id);
    if (found == groups_.end()) return;
    group_bytes_ -= found->second->bytes();
    groups_.erase(found);
  }

  void clear() {
    groups_.clear();
    group_bytes_ = 0;
    renew_shared();
  }

  // Keep to the memory bound: the shared trie starts anew when it outgrows its share; then whole groups go, the least
  // recently used first (all of them, if need be).
  void enforce_bound() {
    if (shared_.bytes() > max_bytes_ / kSharedPart) renew_shared();
    while (bytes() > max_bytes_ && !groups_.empty()) {
      auto oldest = groups_.begin();
      for (auto it = groups_.begin(); it != groups_.end(); ++it) {
        if (it->second->last_used < oldest->second->last_used) oldest = it;
      }
      group_bytes_ -= oldest->second->bytes();
      groups_.erase(oldest);
    }
  }

  // -- drafts

  const Group* find(int64_t id) const {
    const auto found = groups_.find(id);
    return found == groups_.end() ? nullptr : found->second.get();
  }

  Group* use(int64_t id) {
    const auto found = groups_.find(id);
    if (found == groups_.end()) return nullptr;
    found->second->last_used = ++clock_;
    return found->second.get();
  }

  // A response without tokens starts from the prompt.
  void start(const Group& group, int64_t response, Contexts& contexts) const {
    const Group::Place* place = group.find(response);
    group.trie.start(place == nullptr ? 0 : place->record, group.bit, contexts.group);
    contexts.shared.clear();
    if (place != nullptr && is_shared(*place)) shared_.start(place->shared_record, group.bit, contexts.shared);
    if (contexts.shared.empty() && shared_depth_ > 0) contexts.shared.push_back({kRoot, 0, 0});
  }

  void advance(const Group& group, Contexts& contexts, int32_t token) const {
    group.trie.advance(contexts.group, group.bit, token);
    if (!contexts.shared.empty()) shared_.advance(contexts.shared, group.bit, token);
  }

  // The interpolated distribution of the next token, truncated: from the longest contexts down, at equal length the
  // group's before the shared one. Unordered; the first candidates come from the longest context.
  void predict(const Group& group, const Contexts& contexts, uint32_t own, Candidates& out) const {
    out.clear();
    double reach = 1.0;
    for (size_t d = std::max(contexts.group.size(), contexts.shared.size()); d-- > 1 && reach > kNegligible;) {
      const auto depth = static_cast<uint32_t>(d);
      if (d < contexts.group.size()) group.trie.offer(contexts.group[d], depth, own, mixture_, reach, out);
      if (d < contexts.shared.size()) shared_.offer(contexts.shared[d], depth, group.bit, mixture_, reach, out);
    }
  }

  static uint32_t own_bit(const Group& group, int64_t response) {
    const Group::Place* place = group.find(response);
    return place == nullptr ? 0 : group.trie.record(place->record).bit;
  }

  // -- views

  uint32_t max_depth() const { return max_depth_; }
  size_t num_groups() const { return groups_.size(); }
  size_t bytes() const { return group_bytes_ + shared_.bytes(); }
  const Mixture& mixture() const { return mixture_; }
  const Trie& shared() const { return shared_; }

  uint64_t num_tokens() const {
    uint64_t total = 0;
    for (const auto& [id, group] : groups_) total += group->trie.num_tokens();
    return total;
  }

 private:
  static constexpr double kNegligible = 0.01;
  static constexpr uint64_t kSharedPart = 4;

  // Books the growth of a group while it is in scope.
  class Account {
   public:
    Account(Forest& forest, const Group& group) : forest_(forest), group_(group), before_(group.bytes()) {}
    ~Account() { forest_.group_bytes_ += group_.bytes() - before_; }
    Account(const Account&) = delete;
    Account& operator=(const Account&) = delete;

   private:
    Forest& forest_;
    const Group& group_;
    size_t before_;
  };

  Group::Place& place_of(Group& group, int64_t response) {
    const auto [found, is_new] = group.places.try_emplace(response);
    if (is_new) found->second.record = group.trie.add_record(next_bit(group));
    return found->second;
  }

  static uint32_t next_bit(const Group& group) { return 1u << (group.trie.num_records() & 31u); }

  bool is_shared(const Group::Place& place) const {
    return place.shared_record != 0 && place.generation == generation_;
  }

  void fork(Group& group, Group::Place& place, uint32_t position) {
    place.record = group.trie.fork(place.record, position, group.trie.record(place.record).bit);
    leave_shared(place);
  }

  // What goes on from elsewhere begins another record of the shared trie.
  void leave_shared(Group::Place& place) {
    if (is_shared(place)) shared_.close(place.shared_record);
    place.shared_record = 0;
  }

  void append_token(Group& group, Group::Place& place, int32_t token) {
    const Record& record = group.trie.record(place.record);
    if (record.position < record.text.size()) [[unlikely]] {  // it has been here before
      if (record.text[record.position] == token) {
        group.trie.rewind(place.record, record.position + 1);
        return;
      }
      fork(group, place, record.position);
    }
    group.trie.push(place.record, token);
    if (shared_depth_ > 0) push_shared(group, place, token);
    learn(group);
  }

  void push_shared(const Group& group, Group::Place& place, int32_t token) {
    if (!is_shared(place)) {
      place.shared_record = shared_.add_record(group.bit);
      place.generation = generation_;
    } else if (!shared_.record(place.shared_record).open) {
      shared_.reopen(place.shared_record);
    }
    shared_.push(place.shared_record, token);
  }

  // Both tries' levels in the order of `predict`.
  void learn(const Group& group) {
    levels_.clear();
    const auto own = group.trie.levels();
    const auto shared = shared_depth_ > 0 ? shared_.levels() : std::span<const Mixture::Level>{};
    std::merge(own.begin(), own.end(), shared.begin(), shared.end(), std::back_inserter(levels_),
               [](const Mixture::Level& a, const Mixture::Level& b) { return a.depth > b.depth; });
    if (!levels_.empty()) mixture_.learn(levels_, 0.9 * group.trie.base() + 1e-5);
  }

  void renew_shared() {
    shared_ = Trie(shared_depth_, true);
    ++generation_;
  }

  uint32_t max_depth_;
  uint32_t shared_depth_;
  uint64_t max_bytes_;
  uint64_t clock_ = 0;
  uint32_t serial_ = 0;
  uint32_t generation_ = 0;
  size_t group_bytes_ = 0;
  std::unordered_map<int64_t, std::unique_ptr<Group>> groups_;
  Trie shared_;
  Mixture mixture_;
  std::vector<Mixture::Level> levels_;
};

}  // namespace paceline
