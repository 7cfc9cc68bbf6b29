// paceline._suffix: all groups of an engine, with a memory bound, for NumPy arrays.
//
// One thread at a time may call a forest; while it works, the GIL is free. The drafts of a call, which only read, are
// shared among threads. Appends are not: what a token teaches the mixture depends on all tokens before it. A helper
// may append and draft while its caller goes on; every other call waits until it is done.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <stdexcept>
#include <string>

#include "arrays.hpp"
#include "helper.hpp"
#include "suffix_draft.hpp"
#include "suffix_forest.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace paceline;

template <typename T>
std::span<const T> view(const Row<T>& row) {
  return {row.data(), row.shape(0)};
}

void check_tokens(std::span<const int32_t> tokens) {
  int32_t any = 0;
  for (int32_t token : tokens) any |= token;
  if (any < 0) throw std::invalid_argument("a token id is negative: token ids count from 0");
}

struct Query {
  Row<int64_t> groups;
  Row<int64_t> responses;
  Row<uint64_t> keys;
  Row<int64_t> positions;
  Row<float> temperatures;
  Row<int32_t> max_tokens;

  size_t size() const { return groups.shape(0); }

  void check_shapes() const {
    const size_t n = size();
    check(responses.shape(0) == n && keys.shape(0) == n && positions.shape(0) == n && temperatures.shape(0) == n &&
              max_tokens.shape(0) == n,
          "the query's arrays differ in length: give one entry per request in each");
  }

  Request request(size_t r, size_t width) const {
    const int32_t limit = std::min<int32_t>(max_tokens(r), static_cast<int32_t>(width));
    return {responses(r), keys(r), positions(r), temperatures(r), limit};
  }
};

// Tokens that responses grow by.
struct Growth {
  Row<int64_t> groups;
  Row<int64_t> responses;
  Row<int32_t> offsets;
  Row<int32_t> tokens;

  void check_shapes() const {
    const size_t n = groups.shape(0);
    check(responses.shape(0) == n && offsets.shape(0) == n + 1,
          "append_batch needs n groups, n responses and n + 1 offsets");
    check(offsets(0) == 0 && static_cast<size_t>(offsets(n)) == tokens.shape(0),
          "append_batch offsets must run from 0 to the number of tokens");
    for (size_t i = 0; i < n; ++i) check(offsets(i) <= offsets(i + 1), "append_batch offsets must not fall");
    check_tokens(view(tokens));
  }
};

// Where drafts are written to.
struct Outputs {
  OutTable<int32_t> tokens;
  OutRow<int32_t> num_tokens;
  OutTable<float> acceptance;
  OutTable<int32_t> cells;
  OutTable<int32_t> probes;
};

// Where paths are written to; without a column for them none are wanted.
struct PathOutputs {
  OutCube<int32_t> tokens;
  OutTable<int32_t> num_tokens;
  OutCube<float> acceptance;
  OutCube<int32_t> cells;
};

// What the helper does; holds the arrays that it reads and writes.
struct Job {
  Growth growth;
  Query query;
  Row<float> grid;
  Row<float> calibration;
  Outputs outputs;
  PathOutputs paths;
};

inline constexpr int64_t kBlockRows = 8;        // drafted by one thread: most often of one group
inline constexpr int64_t kBlocksPerThread = 2;  // at least, or waking the thread takes longer than its work

// What a thread drafts with.
struct Desk {
  explicit Desk(const Forest& forest) : drafter(forest) {}

  Drafter drafter;
  Path path;
  std::vector<Path> paths;
};

class SuffixForest {
 public:
  SuffixForest(uint32_t max_depth, uint32_t shared_depth, uint64_t max_bytes, int64_t num_threads)
      : forest_(max_depth, shared_depth, max_bytes), num_threads_(num_threads) {
    check(max_depth >= 1 && max_depth <= kMaxDepth && shared_depth <= max_depth,
          "the context depths are out of range: choose 1 to 256 tokens, the shared depth no larger");
    check(num_threads >= 1, "a forest drafts with at least one thread");
  }

  SuffixForest(const SuffixForest&) = delete;
  SuffixForest& operator=(const SuffixForest&) = delete;

  void open_group(int64_t id, Row<int32_t> prompt) {
    const nb::gil_scoped_release unlocked;
    helper_.wait();
    const auto tokens = view(prompt);
    check_tokens(tokens);
    Group& group = forest_.open(id);
    if (group.trie.has_prompt()) {
      check(std::ranges::equal(group.trie.prompt(), tokens),
            "the group already has another prompt: drop it first, or give each prompt its own group");
      return;
    }
    forest_.insert_prompt(group, tokens);
    forest_.enforce_bound();
  }

  void append(int64_t id, int64_t response, Row<int32_t> tokens) {
    const nb::gil_scoped_release unlocked;
    helper_.wait();
    check_tokens(view(tokens));
    forest_.append(id, response, view(tokens));
    forest_.enforce_bound();
  }

  void append_batch(Row<int64_t> groups, Row<int64_t> responses, Row<int32_t> offsets, Row<int32_t> tokens) {
    const Growth growth{groups, responses, offsets, tokens};
    const nb::gil_scoped_release unlocked;
    helper_.wait();
    growth.check_shapes();
    grow(growth);
  }

  void resync(int64_t id, int64_t response, Row<int32_t> tokens) {
    const nb::gil_scoped_release unlocked;
    helper_.wait();
    check_tokens(view(tokens));
    forest_.resync(id, response, view(tokens));
    forest_.enforce_bound();
  }

  void close_response(int64_t id, int64_t response) {
    settle();
    forest_.close(id, response);
  }

  void drop_group(int64_t id) {
    settle();
    forest_.drop(id);
  }

  void clear() {
    settle();
    forest_.clear();
  }

  void draft(Row<int64_t> groups, Row<int64_t> responses, Row<uint64_t> keys, Row<int64_t> positions,
             Row<float> temperatures, Row<int32_t> max_tokens, double sharpness, Row<float> grid,
             Row<float> calibration, double floor, OutTable<int32_t> tokens, OutRow<int32_t> num_tokens,
             OutTable<float> acceptance, OutTable<int32_t> cells, OutTable<int32_t> probes) {
    const Query query{groups, responses, keys, positions, temperatures, max_tokens};
    query.check_shapes();
    const Settings settings = settings_of(sharpness, view(grid), calibration, floor);
    const Outputs outputs{tokens, num_tokens, acceptance, cells, probes};
    const nb::gil_scoped_release unlocked;
    helper_.wait();
    write_drafts(query, settings, outputs);
  }

  // `append_batch`, then `draft` and `draft_paths` (none where there is room for none), by the helper: the arrays are not
  // to be touched before `settle`.
  void draft_later(Row<int64_t> grown_groups, Row<int64_t> grown_responses, Row<int32_t> offsets,
                   Row<int32_t> grown_tokens, Row<int64_t> groups, Row<int64_t> responses, Row<uint64_t> keys,
                   Row<int64_t> positions, Row<float> temperatures, Row<int32_t> max_tokens, double sharpness,
                   Row<float> grid, Row<float> calibration, double floor, OutTable<int32_t> tokens,
                   OutRow<int32_t> num_tokens, OutTable<float> acceptance, OutTable<int32_t> cells,
                   OutTable<int32_t> probes, OutCube<int32_t> path_tokens, OutTable<int32_t> path_num_tokens,
                   OutCube<float> path_acceptance, OutCube<int32_t> path_cells) {
    settle();
    job_ = Job{{grown_groups, grown_responses, offsets, grown_tokens},
               {groups, responses, keys, positions, temperatures, max_tokens},
               grid,
               calibration,
               {tokens, num_tokens, acceptance, cells, probes},
               {path_tokens, path_num_tokens, path_acceptance, path_cells}};
    job_->growth.check_shapes();
    job_->query.check_shapes();
    const Settings settings = settings_of(sharpness, view(job_->grid), job_->calibration, floor);
    helper_.begin([this, settings] {
      grow(job_->growth);
      write_drafts(job_->query, settings, job_->outputs);
      if (job_->paths.num_tokens.shape(1) > 0) write_paths(job_->query, settings, job_->paths);
    });
  }

  // Waits until the helper is done.
  void settle() {
    {
      const nb::gil_scoped_release unlocked;
      helper_.wait();
    }
    job_.reset();
  }

  void draft_paths(Row<int64_t> groups, Row<int64_t> responses, Row<uint64_t> keys, Row<int64_t> positions,
                   Row<float> temperatures, Row<int32_t> max_tokens, double sharpness, Row<float> calibration,
                   double floor, OutCube<int32_t> tokens, OutTable<int32_t> num_tokens, OutCube<float> acceptance,
                   OutCube<int32_t> cells) {
    const Query query{groups, responses, keys, positions, temperatures, max_tokens};
    query.check_shapes();
    const Settings settings = settings_of(sharpness, {}, calibration, floor);
    const PathOutputs outputs{tokens, num_tokens, acceptance, cells};
    const nb::gil_scoped_release unlocked;
    helper_.wait();
    write_paths(query, settings, outputs);
  }

  uint64_t count(int64_t id, Row<int32_t> context) {
    settle();
    check(context.shape(0) <= forest_.max_depth() + 1, "the context is longer than the forest counts");
    const Group* group = forest_.find(id);
    return group == nullptr ? 0 : group->trie.count(view(context));
  }

  uint64_t count_shared(Row<int32_t> context) {
    settle();
    check(context.shape(0) <= forest_.shared().max_depth() + 1, "the context is longer than the forest counts");
    return forest_.shared().count(view(context));
  }

  uint64_t memory_bytes() {
    settle();
    return forest_.bytes();
  }

  size_t num_groups() {
    settle();
    return forest_.num_groups();
  }

  uint64_t num_tokens() {
    settle();
    return forest_.num_tokens();
  }

  std::vector<double> escapes() {
    settle();
    return {forest_.mixture().escapes().begin(), forest_.mixture().escapes().end()};
  }

 private:
  static Settings settings_of(double sharpness, std::span<const float> grid, const Row<float>& calibration,
                              double floor) {
    check(calibration.shape(0) == kNumCells, "the calibration table has the wrong length: give NUM_CELLS values");
    check(sharpness > 0.0, "the sharpness must be positive (inf: greedy)");
    return {sharpness, grid, view(calibration), floor};
  }

  void grow(const Growth& growth) {
    for (size_t i = 0; i < growth.groups.shape(0); ++i) {
      const auto begin = static_cast<size_t>(growth.offsets(i));
      const auto end = static_cast<size_t>(growth.offsets(i + 1));
      forest_.append(growth.groups(i), growth.responses(i), view(growth.tokens).subspan(begin, end - begin));
    }
    forest_.enforce_bound();
  }

  void write_drafts(const Query& query, const Settings& settings, const Outputs& to) {
    const size_t width = to.tokens.shape(1);
    const size_t num_probes = to.probes.shape(1);
    share_rows(query.groups, [&](Desk& desk, const Group* group, size_t r) {
      const std::span<int32_t> row{to.probes.data() + r * num_probes, num_probes};
      if (group == nullptr) {
        std::ranges::fill(row, -1);
        to.num_tokens(r) = 0;
        return;
      }
      desk.drafter.draft(*group, query.request(r, width), settings, desk.path, row);
      to.num_tokens(r) = write(desk.path, to.tokens.data() + r * width, to.acceptance.data() + r * width,
                               to.cells.data() + r * width);
    });
  }

  void write_paths(const Query& query, const Settings& settings, const PathOutputs& to) {
    const size_t num_paths = to.tokens.shape(1);
    const size_t width = to.tokens.shape(2);
    share_rows(query.groups, [&](Desk& desk, const Group* group, size_t r) {
      std::vector<Path>& paths = desk.paths;
      paths.clear();
      if (group != nullptr) {
        desk.drafter.draft_paths(*group, query.request(r, width), settings, static_cast<uint32_t>(num_paths), paths);
      }
      for (size_t p = 0; p < num_paths; ++p) {
        const size_t at = (r * num_paths + p) * width;
        to.num_tokens(r, p) = p < paths.size() ? write(paths[p], to.tokens.data() + at, to.acceptance.data() + at,
                                                       to.cells.data() + at)
                                               : 0;
      }
    });
  }

  static int32_t write(const Path& path, int32_t* tokens, float* acceptance, int32_t* cells) {
    for (size_t j = 0; j < path.tokens.size(); ++j) {
      tokens[j] = path.tokens[j].token;
      acceptance[j] = path.tokens[j].acceptance;
      cells[j] = path.tokens[j].cell;
    }
    return static_cast<int32_t>(path.tokens.size());
  }

  // Calls draft(desk, group or null, r) for every row. What a row gets does not depend on the thread that drafts it.
  template <typename Draft>
  void share_rows(const Row<int64_t>& groups, const Draft& draft) {
    const auto count = static_cast<int64_t>(groups.shape(0));
    groups_.clear();
    for (int64_t r = 0; r < count; ++r) groups_.push_back(forest_.use(groups(r)));
    const int64_t blocks = (count + kBlockRows - 1) / kBlockRows;
    const int64_t threads = std::clamp(blocks / kBlocksPerThread, int64_t{1}, num_threads_);
    while (std::ssize(desks_) < threads) desks_.emplace_back(forest_);
    share(threads, blocks, [&](int64_t thread, int64_t block) {
      Desk& desk = desks_[static_cast<size_t>(thread)];
      for (int64_t r = block * kBlockRows; r < std::min((block + 1) * kBlockRows, count); ++r) {
        draft(desk, groups_[static_cast<size_t>(r)], static_cast<size_t>(r));
      }
    });
  }

  Forest forest_;
  int64_t num_threads_;               // at most
  std::deque<Desk> desks_;            // of the threads
  std::vector<const Group*> groups_;  // of a call's rows
  std::optional<Job> job_;
  Helper helper_;  // goes first
};

}  // namespace

NB_MODULE(_suffix, m) {
  m.attr("NUM_CELLS") = kNumCells;
  m.attr("MAX_DEPTH") = kMaxDepth;
  m.attr("PROBABILITY_EDGES") = std::vector<double>(kProbabilityEdges.begin(), kProbabilityEdges.end());
  m.attr("MARGIN_EDGES") = std::vector<double>(kMarginEdges.begin(), kMarginEdges.end());
  nb::class_<SuffixForest>(m, "SuffixForest")
      .def(nb::init<uint32_t, uint32_t, uint64_t, int64_t>(), "max_depth"_a, "shared_depth"_a, "max_bytes"_a,
           "num_threads"_a)
      .def("open_group", &SuffixForest::open_group, "group"_a, "prompt"_a)
      .def("append", &SuffixForest::append, "group"_a, "response"_a, "tokens"_a)
      .def("append_batch", &SuffixForest::append_batch, "groups"_a, "responses"_a, "offsets"_a, "tokens"_a)
      .def("resync", &SuffixForest::resync, "group"_a, "response"_a, "tokens"_a)
      .def("close_response", &SuffixForest::close_response, "group"_a, "response"_a)
      .def("drop_group", &SuffixForest::drop_group, "group"_a)
      .def("clear", &SuffixForest::clear)
      .def("draft", &SuffixForest::draft)
      .def("draft_later", &SuffixForest::draft_later)
      .def("settle", &SuffixForest::settle)
      .def("draft_paths", &SuffixForest::draft_paths)
      .def("count", &SuffixForest::count, "group"_a, "context"_a)
      .def("count_shared", &SuffixForest::count_shared, "context"_a)
      .def("escapes", &SuffixForest::escapes)
      .def_prop_ro("memory_bytes", &SuffixForest::memory_bytes)
      .def_prop_ro("num_groups", &SuffixForest::num_groups)
      .def_prop_ro("num_tokens", &SuffixForest::num_tokens);
}
