// paceline._step: what a step's tokens say about its drafts, and which of them stand. Each function is one pass over small
// arrays, which in numpy is a handful of calls of some microseconds each.

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "arrays.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace paceline;

template <typename T>
using NewRow = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
template <typename T>
using NewTable = nb::ndarray<nb::numpy, T, nb::ndim<2>>;

template <typename T>
nb::capsule owner_of(std::unique_ptr<T[]>& data) {
  return nb::capsule(data.release(), [](void* held) noexcept { delete[] static_cast<T*>(held); });
}

template <typename T>
NewRow<T> make_row(std::unique_ptr<T[]> data, size_t size) {
  T* values = data.get();
  return NewRow<T>(values, {size}, owner_of(data));
}

template <typename T>
NewTable<T> make_table(std::unique_ptr<T[]> data, size_t rows, size_t columns) {
  T* values = data.get();
  return NewTable<T>(values, {rows, columns}, owner_of(data));
}

int32_t token_of(nb::handle item) { return nb::cast<int32_t>(item); }

// Lists of token ids as a table, -1 behind them, at least one column wide.
NewTable<int32_t> table_of(const nb::list& lists) {
  const size_t rows = lists.size();
  size_t most = 1;
  for (nb::handle list : lists) most = std::max(most, nb::len(nb::handle(list)));
  auto table = std::make_unique_for_overwrite<int32_t[]>(rows * most);
  int32_t* out = table.get();
  for (nb::handle list : lists) {
    int32_t* end = out + most;
    for (nb::handle token : list) *out++ = token_of(token);
    while (out != end) *out++ = -1;
  }
  return make_table(std::move(table), rows, most);
}

// The tokens of those lists that count, one behind the other, and where each begins and ends.
std::pair<NewRow<int32_t>, NewRow<int32_t>> joined(const nb::list& lists, const Row<bool>& counts) {
  check(counts.shape(0) == lists.size(), "one flag per list is wanted");
  size_t num_lists = 0, num_tokens = 0;
  for (size_t i = 0; i < lists.size(); ++i) {
    if (!counts(i)) continue;
    ++num_lists;
    num_tokens += nb::len(nb::handle(lists[i]));
  }
  auto offsets = std::make_unique_for_overwrite<int32_t[]>(num_lists + 1);
  auto tokens = std::make_unique_for_overwrite<int32_t[]>(num_tokens);
  int32_t at = 0;
  int32_t* offset = offsets.get();
  *offset++ = 0;
  for (size_t i = 0; i < lists.size(); ++i) {
    if (!counts(i)) continue;
    for (nb::handle token : nb::handle(lists[i])) tokens[static_cast<size_t>(at++)] = token_of(token);
    *offset++ = at;
  }
  return {make_row(std::move(offsets), num_lists + 1), make_row(std::move(tokens), num_tokens)};
}

NewRow<int32_t> leading_matches(const Table<int32_t>& tokens, const Row<int32_t>& lengths,
                                const Table<int32_t>& decided) {
  const size_t rows = tokens.shape(0);
  check(lengths.shape(0) == rows && decided.shape(0) == rows, "as many lengths and decided rows as drafts are wanted");
  const auto width = static_cast<int32_t>(std::min(tokens.shape(1), decided.shape(1)));
  auto matches = std::make_unique_for_overwrite<int32_t[]>(rows);
  for (size_t i = 0; i < rows; ++i) {
    const int32_t* draft = tokens.data() + i * tokens.shape(1);
    const int32_t* found = decided.data() + i * decided.shape(1);
    const int32_t most = std::min(lengths(i), width);
    int32_t count = 0;
    while (count < most && draft[count] == found[count]) ++count;
    matches[i] = count;
  }
  return make_row(std::move(matches), rows);
}

// Each row from behind its first `ahead` entries on, 0 beyond its end; as wide as the longest of them, at least 1.
NewTable<float> behind(const Table<float>& values, const Row<int32_t>& ahead) {
  const size_t rows = values.shape(0), width = values.shape(1);
  check(ahead.shape(0) == rows, "one number of entries per row is wanted");
  size_t most = 1;
  for (size_t i = 0; i < rows; ++i) {
    check(ahead(i) >= 0, "a number of entries is negative");
    most = std::max(most, width - std::min(width, static_cast<size_t>(ahead(i))));
  }
  auto rest = std::make_unique<float[]>(rows * most);
  for (size_t i = 0; i < rows; ++i) {
    const size_t first = std::min(width, static_cast<size_t>(ahead(i)));
    std::copy(values.data() + i * width + first, values.data() + (i + 1) * width, rest.get() + i * most);
  }
  return make_table(std::move(rest), rows, most);
}

// Of each cell, tokens that were accepted and tokens that the step says something about: min(seen, right + 1) of each
// draft.
std::pair<NewRow<double>, NewRow<double>> count_outcomes(const Table<int32_t>& cells, const Row<int32_t>& seen,
                                                         const Row<int32_t>& right, uint32_t num_cells) {
  const size_t rows = cells.shape(0);
  check(seen.shape(0) == rows && right.shape(0) == rows, "as many numbers of tokens as drafts are wanted");
  auto accepted = std::make_unique<double[]>(num_cells);
  auto verified = std::make_unique<double[]>(num_cells);
  for (size_t i = 0; i < rows; ++i) {
    const int32_t* row = cells.data() + i * cells.shape(1);
    const int32_t told = std::min({seen(i), right(i) + 1, static_cast<int32_t>(cells.shape(1))});
    for (int32_t j = 0; j < told; ++j) {
      check(row[j] >= 0 && static_cast<uint32_t>(row[j]) < num_cells, "a cell is none of the table's");
      verified[row[j]] += 1.0;
      if (j < right(i)) accepted[row[j]] += 1.0;
    }
  }
  return {make_row(std::move(accepted), num_cells), make_row(std::move(verified), num_cells)};
}

// How often the proposal of one column was the target's token while that of another was not, and how many tokens of the
// target are known.
std::pair<NewTable<double>, size_t> count_wins(const Table<int32_t>& proposals, const Row<int32_t>& targets) {
  const size_t rows = proposals.shape(0), columns = proposals.shape(1);
  check(targets.shape(0) == rows, "one token of the target per row is wanted");
  auto wins = std::make_unique<double[]>(columns * columns);
  size_t num_known = 0;
  for (size_t i = 0; i < rows; ++i) {
    if (targets(i) < 0) continue;
    ++num_known;
    const int32_t* row = proposals.data() + i * columns;
    for (size_t a = 0; a < columns; ++a) {
      if (row[a] != targets(i)) continue;
      for (size_t b = 0; b < columns; ++b) wins[a * columns + b] += row[b] != targets(i);
    }
  }
  return {make_table(std::move(wins), columns, columns), num_known};
}

NewTable<float> path_probability(const Row<int32_t>& num_tokens, const Table<float>& acceptance) {
  const size_t rows = acceptance.shape(0), columns = acceptance.shape(1);
  check(num_tokens.shape(0) == rows, "one number of tokens per row is wanted");
  auto path = std::make_unique<float[]>(rows * columns);
  for (size_t i = 0; i < rows; ++i) {
    float product = 1.0f;
    const auto length = static_cast<int32_t>(columns) < num_tokens(i) ? static_cast<int32_t>(columns) : num_tokens(i);
    for (int32_t j = 0; j < length; ++j) {
      const size_t at = i * columns + static_cast<size_t>(j);
      path[at] = product *= acceptance.data()[at];
    }
  }
  return make_table(std::move(path), rows, columns);
}

// Of `requests` of a batch the tokens that stand: those before the sampled rows, the last decided one and the accepted
// drafts. A step's tokens are those of the requests, one request behind another, each with its first path's drafts, and
// then those of the alternative paths.
struct Batch {
  Row<int64_t> scheduled;   // [num_requests] tokens of each in the step, drafts included
  Row<int64_t> num_drafts;  // [num_paths], those of the requests first
  Row<int64_t> first;       // [num_paths] first sampled row of each path
  Row<int64_t> winners;     // [num_requests] the path that won
  Row<int64_t> accepted;    // [num_requests] its accepted drafts
  Row<int32_t> computed;    // [num_requests or more] tokens of each before the step
  Table<int32_t> tokens;    // [num_requests or more, most] of each, decided ones of this step included

  size_t size() const { return scheduled.shape(0); }

  void check_shapes() const {
    const size_t n = size();
    check(num_drafts.shape(0) >= n && first.shape(0) == num_drafts.shape(0) && winners.shape(0) == n &&
              accepted.shape(0) == n && computed.shape(0) >= n && tokens.shape(0) >= n,
          "the batch's arrays differ in length");
  }
};

// Where each request's tokens are in a step: begins, the step's tokens before it, and behind, those among them of which no row
// was sampled. [num_requests + 1] each
struct Layout {
  explicit Layout(const Batch& batch)
      : begins(std::make_unique<int64_t[]>(batch.size() + 1)), behind(std::make_unique<int64_t[]>(batch.size() + 1)) {
    for (size_t i = 0; i < batch.size(); ++i) {
      begins[i + 1] = begins[i] + batch.scheduled(i);
      behind[i + 1] = behind[i] + batch.scheduled(i) - 1 - batch.num_drafts(i);
      check(behind[i + 1] >= behind[i], "a request has fewer tokens than rows");
    }
  }

  int64_t before(size_t request) const { return behind[request + 1] - behind[request]; }

  std::unique_ptr<int64_t[]> begins, behind;
};

// How many tokens of a request stand.
int64_t count_standing(const Batch& batch, const Layout& layout, size_t request) {
  const int64_t winner = batch.winners(request), accepted = batch.accepted(request);
  check(winner >= 0 && static_cast<size_t>(winner) < batch.num_drafts.shape(0) && accepted >= 0,
        "a verdict is none of this step");
  return layout.before(request) + 1 + accepted;
}

nb::tuple standing(const Row<int64_t>& scheduled, const Row<int64_t>& num_drafts, const Row<int64_t>& first,
                   const Row<int64_t>& winners, const Row<int64_t>& accepted, const Row<int32_t>& computed,
                   const Table<int32_t>& tokens, const Row<int64_t>& requests, const Row<bool>& stands) {
  const Batch batch{scheduled, num_drafts, first, winners, accepted, computed, tokens};
  batch.check_shapes();
  const Layout layout(batch);
  const size_t count = requests.shape(0), width = tokens.shape(1);
  check(stands.shape(0) == count, "one flag per request is wanted");
  auto counts = std::make_unique_for_overwrite<int64_t[]>(count);
  auto starts = std::make_unique_for_overwrite<int64_t[]>(count);
  size_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    check(requests(i) >= 0 && static_cast<size_t>(requests(i)) < batch.size(), "a request is none of the batch's");
    const auto request = static_cast<size_t>(requests(i));
    const int64_t standing = count_standing(batch, layout, request);
    counts[i] = stands(i) ? standing : 0;
    starts[i] = computed(request);
    check(starts[i] >= 0 && starts[i] + counts[i] < static_cast<int64_t>(width),
          "a request has more tokens than there is room for");
    total += static_cast<size_t>(counts[i]);
  }
  auto places = std::make_unique_for_overwrite<int64_t[]>(total);
  auto ids = std::make_unique_for_overwrite<int32_t[]>(total);
  auto next_ids = std::make_unique_for_overwrite<int32_t[]>(total);
  for (size_t i = 0, at = 0; i < count; ++i) {
    const auto request = static_cast<size_t>(requests(i)), winner = static_cast<size_t>(winners(request));
    const int64_t before = layout.before(request);
    const int64_t rows = first(winner) + layout.behind[std::min(winner + 1, batch.size())];  // where the winner's are
    const int32_t* own = tokens.data() + request * width + starts[i];
    for (int64_t k = 0; k < counts[i]; ++k, ++at) {
      places[at] = k < before ? layout.begins[request] + k : rows + k - before;
      ids[at] = own[k];
      next_ids[at] = own[k + 1];
    }
  }
  return nb::make_tuple(make_row(std::move(counts), count), make_row(std::move(starts), count),
                        make_row(std::move(places), total), make_row(std::move(ids), total),
                        make_row(std::move(next_ids), total));
}

}  // namespace

NB_MODULE(_step, m) {
  m.def("table_of", &table_of, "lists"_a);
  m.def("joined", &joined, "lists"_a, "counts"_a);
  m.def("leading_matches", &leading_matches, "tokens"_a, "lengths"_a, "decided"_a);
  m.def("behind", &behind, "values"_a, "ahead"_a);
  m.def("count_outcomes", &count_outcomes, "cells"_a, "seen"_a, "right"_a, "num_cells"_a);
  m.def("count_wins", &count_wins, "proposals"_a, "targets"_a);
  m.def("path_probability", &path_probability, "num_tokens"_a, "acceptance"_a);
  m.def("standing", &standing, "scheduled"_a, "num_drafts"_a, "first"_a, "winners"_a, "accepted"_a,
        "computed"_a.noconvert(), "tokens"_a.noconvert(), "requests"_a, "stands"_a,
        "Returns (counts, starts) of the requests and (places among the step's tokens, ids, next ids) of what stands.");
}
