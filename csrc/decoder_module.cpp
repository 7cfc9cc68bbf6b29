// paceline._decoder: a small decoder (decoder.hpp) that drafts with the shared dice, whole drafts in one call; and the
// layer of a draft head, between whose levels the target's embedding and output head have their turn.
//
// A drafter's pass over a few tokens is some 0.3 million multiplications: any call between two of them costs as much.
// So one call feeds what is new of each row and then proposes, feeds the proposals and so on while drafts may grow,
// without the interpreter lock. The rules of growth are those of drafting/proposal.py. Large levels
// are split among threads by their rows, small ones of a large model by its weights. Compiled with -ffp-contract=off for the dice's sake.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "decoder.hpp"
#include "dice.hpp"
#include "keyed_sampling.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace paceline;

constexpr int64_t kTileRows = 32;    // whose logits are made and sampled together, so that they stay in the cache
constexpr int64_t kThreadRows = 8;  // fewer read the weights for too little

template <typename T, size_t kDims>
using Array = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
using Matrix = Array<const float, 2>;
using Floats = Array<const float, 1>;
using Ints = Array<const int64_t, 1>;
using LayerArrays = std::tuple<Matrix, std::optional<Floats>, Matrix, std::optional<Floats>, Matrix, Matrix>;

template <typename T>
int64_t length(const T& array, size_t axis = 0) {
  return static_cast<int64_t>(array.shape(axis));
}

// Calls use(part, begin, end, threads) for shares of the rows 0..count, each on a thread of its own; few rows stay
// together, and the threads share the work over each of their weights.
template <typename Use>
void split(int64_t threads, int64_t count, const Use& use) {
  const int64_t parts = std::clamp(count / kThreadRows, int64_t{1}, threads);
  if (parts == 1) return use(0, 0, count, threads);
  share(parts, parts, [&](int64_t, int64_t part) {
    use(part, count * part / parts, count * (part + 1) / parts, 1);
  });
}

// The tokens of one pass, row after row; those of the i-th row end before ends[i]. A head's have no ids.
struct Pass {
  std::vector<int64_t> ids, rows, positions, ends;

  void add(int64_t row, int64_t start, int64_t count) {
    rows.insert(rows.end(), static_cast<size_t>(count), row);
    for (int64_t i = 0; i < count; ++i) positions.push_back(start + i);
    ends.push_back(static_cast<int64_t>(rows.size()));
  }

  void clear() {
    for (auto* column : {&ids, &rows, &positions, &ends}) column->clear();
  }
};

[[noreturn]] void refuse() { throw std::invalid_argument("the arrays do not fit the model, its cache or each other"); }

bool within(int64_t value, int64_t limit) { return 0 <= value && value < limit; }

// Where `num_tokens` tokens go: counts[i] of them into row rows[i] from position starts[i] on.
Pass place(const DecoderShape& shape, const Ints& rows, const Ints& starts, const Ints& counts, int64_t num_tokens) {
  if (starts.shape(0) != rows.shape(0) || counts.shape(0) != rows.shape(0)) refuse();
  Pass pass;
  for (int64_t i = 0, left = num_tokens; i < length(rows); ++i) {
    const int64_t row = rows.data()[i], start = starts.data()[i], count = counts.data()[i];
    if (!within(row, shape.rows) || !within(start, shape.positions) || count < 1 || count > shape.positions - start ||
        count > left)
      refuse();
    pass.add(row, start, count);
    left -= count;
  }
  if (static_cast<int64_t>(pass.rows.size()) != num_tokens) refuse();
  return pass;
}

void check_copy(const DecoderShape& shape, int64_t source, int64_t target, int64_t known, int64_t count) {
  if (!within(source, shape.rows) || !within(target, shape.rows) || !within(count, shape.positions + 1) ||
      !within(known, count + 1))
    refuse();
}

MatrixView view(const Matrix& matrix) { return {matrix.data(), length(matrix), length(matrix, 1)}; }
const float* view(const std::optional<Floats>& bias) { return bias ? bias->data() : nullptr; }

Storage storage_of(const std::string& name) {
  if (name == "bfloat16") return Storage::kBfloat16;
  if (name == "int8") return Storage::kInt8;
  if (name == "int8-dot" && has_octet_dot()) return Storage::kInt8Dot;
  throw std::invalid_argument("no weights can be kept here as " + name);
}

// cos, sin: [positions, head_dim / 2].
LayerStack stack(const std::vector<LayerArrays>& layers, const Matrix& cos, const Matrix& sin, float eps, float scaling,
                 int64_t num_kv_heads, int64_t max_requests, Storage storage) {
  const int64_t head_dim = 2 * length(cos, 1), heads = length(std::get<0>(layers.at(0))) / head_dim;
  std::vector<DecoderLayer> packed;
  for (const auto& [qkv, qkv_bias, output, output_bias, gate_up, down] : layers)
    packed.push_back({{view(qkv), view(qkv_bias), storage},
                      {view(output), view(output_bias), storage},
                      {view(gate_up), nullptr, storage},
                      {view(down), nullptr, storage}});
  return {{heads - 2 * num_kv_heads, num_kv_heads, head_dim, max_requests, length(cos), eps, scaling},
          std::move(packed), cos.data(), sin.data()};
}

// What a share of the rows needs.
struct Room {
  Scratch scratch;
  std::vector<float> hidden, logits, tops;
};

class Drafter {
 public:
  Drafter(const Matrix& embedding, const Matrix& head, const Floats& norm, const std::vector<LayerArrays>& layers,
          const Matrix& cos, const Matrix& sin, float eps, float scaling, int64_t num_kv_heads, int64_t max_requests,
          const std::string& storage)
      : decoder_(stack(layers, cos, sin, eps, scaling, num_kv_heads, max_requests, storage_of(storage)),
                 view(embedding), view(head), storage_of(storage), norm.data()) {}
  Drafter(const Drafter&) = delete;

  // Feeds counts[i] of the ids to row rows[i] from position starts[i] on; logits [num_rows, vocab] of each one's last.
  void feed(const Ints& rows, const Ints& starts, const Ints& counts, const Ints& ids, int64_t num_threads,
            const Array<float, 2>& logits) {
    const Pass pass = read_pass(rows, starts, counts, ids);
    if (length(logits) != length(rows) || length(logits, 1) != decoder_.vocab()) refuse();
    nb::gil_scoped_release release;
    split(std::max(num_threads, int64_t{1}), length(rows), [&](int64_t, int64_t begin, int64_t end, int64_t threads) {
      Room room;
      for (int64_t first = begin; first < end; first += kTileRows) {
        const int64_t last = std::min(first + kTileRows, end);
        run(pass, first, last, room, threads);
        for (int64_t i = first; i < last; ++i)
          std::copy_n(room.logits.data() + (i - first) * decoder_.logits_stride(), decoder_.vocab(),
                      logits.data() + i * decoder_.vocab());
      }
    });
  }

  void copy_row(int64_t source, int64_t target, int64_t known, int64_t count) {
    check_copy(decoder_.shape(), source, target, known, count);
    decoder_.copy_row(source, target, known, count);
  }

  // Logits of the last tokens of rows first..last of a pass, in room.logits.
  void run(const Pass& pass, int64_t first, int64_t last, Room& room, int64_t threads) {
    const int64_t begin = first > 0 ? pass.ends[static_cast<size_t>(first - 1)] : 0;
    const int64_t end = pass.ends[static_cast<size_t>(last - 1)], stride = decoder_.hidden_stride();
    room.hidden.resize(static_cast<size_t>((end - begin) * stride));
    room.logits.resize(static_cast<size_t>((last - first) * decoder_.logits_stride()));
    float* hidden = room.hidden.data();
    decoder_.run({pass.ids.data() + begin, pass.rows.data() + begin, pass.positions.data() + begin, end - begin}, hidden,
                 room.scratch, threads);
    for (int64_t i = first; i < last; ++i) {
      const int64_t from = pass.ends[static_cast<size_t>(i)] - 1 - begin;
      if (from > i - first) std::copy_n(hidden + from * stride, stride, hidden + (i - first) * stride);
    }
    decoder_.project(hidden, last - first, room.logits.data(), room.scratch, threads);
  }

  Pass read_pass(const Ints& rows, const Ints& starts, const Ints& counts, const Ints& ids) const {
    Pass pass = place(decoder_.shape(), rows, starts, counts, length(ids));
    pass.ids.assign(ids.data(), ids.data() + length(ids));
    for (const int64_t id : pass.ids)
      if (!within(id, decoder_.context_ids())) refuse();
    return pass;
  }

  // Whether drafts of these lengths fit behind what is fed first; the last token of a draft is not fed.
  bool has_room(const Ints& starts, const Ints& counts, const Ints& limits) const {
    for (int64_t i = 0; i < length(starts); ++i)
      if (starts.data()[i] + counts.data()[i] + limits.data()[i] - 1 > decoder_.shape().positions) return false;
    return true;
  }

  const Decoder& decoder() const { return decoder_; }

 private:
  Decoder decoder_;
};

// A draft head's layer.
class Head {
 public:
  Head(const Matrix& fused, const LayerArrays& layer, const Matrix& cos, const Matrix& sin, float eps, float scaling,
       int64_t num_kv_heads, int64_t max_requests, const std::string& storage)
      : layer_(stack({layer}, cos, sin, eps, scaling, num_kv_heads, max_requests, storage_of(storage)),
               {view(fused), nullptr, storage_of(storage)}) {}
  Head(const Head&) = delete;

  void fuse(const Matrix& x, int64_t num_threads, const Array<float, 2>& made) {
    if (length(made) != length(x) || length(x, 1) != layer_.fuse().inputs || length(made, 1) != layer_.fuse().outputs)
      refuse();
    nb::gil_scoped_release release;
    layer_.fuse_all(x.data(), length(x), made.data(), std::max(num_threads, int64_t{1}));
  }

  void run(const Ints& rows, const Ints& starts, const Ints& counts, const Matrix& x, int64_t num_threads,
           const Array<float, 2>& hidden) {
    const LayerStack& stack = layer_.layer();
    const Pass pass = place(stack.shape(), rows, starts, counts, length(x));
    if (length(hidden) != length(x) || length(x, 1) != stack.inputs() || length(hidden, 1) != stack.hidden()) refuse();
    nb::gil_scoped_release release;
    layer_.run({nullptr, pass.rows.data(), pass.positions.data(), length(x)}, x.data(), hidden.data(),
               std::max(num_threads, int64_t{1}));
  }

  void copy_row(int64_t source, int64_t target, int64_t known, int64_t count) {
    check_copy(layer_.layer().shape(), source, target, known, count);
    layer_.copy_row(source, target, known, count);
  }

 private:
  HeadLayer layer_;
};

// What a draft is asked for and what becomes of it; one entry per row of the pass that it starts with.
struct Draft {
  Array<const uint64_t, 1> keys;
  Floats temperatures;
  Ints limits;  // longest draft, >= 1
  float sharpness;
  Floats sharpness_grid, calibration, confidence_edges, margin_edges;
  float floor;
  std::optional<Floats> level_costs;
  Array<int32_t, 2> tokens;      // [num_rows, depth]
  Array<int32_t, 1> num_tokens;  // [num_rows]
  Array<float, 2> acceptance;    // [num_rows, depth]
  Array<int32_t, 2> cells;       // [num_rows, depth]
  Array<int32_t, 2> rivals;      // [num_rows, depth]
  Array<int32_t, 2> probes;      // [num_rows, num_sharpness]
  Array<bool, 1> failed;         // [num_rows], ended by a row of logits from which nothing can be drawn

  bool fits(int64_t num_rows) const {
    const int64_t depth = length(tokens, 1);
    const auto num_cells = (length(confidence_edges) + 1) * (length(margin_edges) + 1);
    const auto table = [&](const auto& array, int64_t width) {
      return length(array) == num_rows && length(array, 1) == width;
    };
    return length(keys) == num_rows && length(temperatures) == num_rows && length(limits) == num_rows &&
           length(num_tokens) == num_rows && length(failed) == num_rows && table(tokens, depth) && table(acceptance, depth) && table(cells, depth) &&
           table(rivals, depth) && table(probes, length(sharpness_grid)) && length(calibration) == num_cells &&
           (!level_costs || length(*level_costs) > 0) &&
           std::all_of(limits.data(), limits.data() + num_rows, [&](int64_t n) { return 1 <= n && n <= depth; }) &&
           std::all_of(temperatures.data(), temperatures.data() + num_rows, [](float t) { return is_sound(t, 1); });
  }

  int32_t cell(float log_q, float margin) const {
    const float log_rest = std::log(std::max(-std::expm1(log_q), 1e-7f));
    const auto level = [](const Floats& edges, float value) {
      return static_cast<int32_t>(std::lower_bound(edges.data(), edges.data() + edges.shape(0), value) - edges.data());
    };
    const auto margin_levels = static_cast<int32_t>(margin_edges.shape(0) + 1);
    return level(confidence_edges, log_q - log_rest) * margin_levels + level(margin_edges, margin);
  }
};

class Growth {
 public:
  Growth(Drafter& drafter, Pass pass, const Draft& draft, int64_t num_threads)
      : drafter_(drafter), pass_(std::move(pass)), draft_(draft), threads_(std::max(num_threads, int64_t{1})), active_(pass_.ends.size()),
        paths_(pass_.ends.size(), 1.0f) {
    std::iota(active_.begin(), active_.end(), 0);
    for (const int64_t end : pass_.ends) {
      rows_.push_back(pass_.rows[static_cast<size_t>(end - 1)]);
      lengths_.push_back(pass_.positions[static_cast<size_t>(end - 1)] + 1);
    }
  }

  void run() {
    std::vector<Room> rooms(static_cast<size_t>(threads_));
    for (Room& room : rooms) room.tops = block_tops(drafter_.decoder().vocab());
    for (int64_t level = 0; !active_.empty(); ++level) {
      const auto count = static_cast<int64_t>(active_.size());
      split(threads_, count, [&](int64_t part, int64_t begin, int64_t end, int64_t threads) {
        propose(level, begin, end, rooms[static_cast<size_t>(part)], threads);
      });
      advance(level);
    }
  }

 private:
  // One level of active rows begin..end.
  void propose(int64_t level, int64_t begin, int64_t end, Room& room, int64_t threads) {
    for (int64_t first = begin; first < end; first += kTileRows) {
      const int64_t last = std::min(first + kTileRows, end);
      drafter_.run(pass_, first, last, room, threads);
      for (int64_t i = first; i < last; ++i)
        propose_one(level, active_[static_cast<size_t>(i)],
                    room.logits.data() + (i - first) * drafter_.decoder().logits_stride(), room.tops);
    }
  }

  void propose_one(int64_t level, int64_t row, float* logits, std::vector<float>& tops) {
    const Row given{logits, drafter_.decoder().vocab(),
                    dice_prefix(draft_.keys.data()[row], lengths_[static_cast<size_t>(row)] + level),
                    draft_.temperatures.data()[row]};
    if (level == 0) probe(row, given, tops);
    const Offer offer = propose_row(logits, given, draft_.sharpness, tops);
    draft_.failed.data()[row] = offer.token < 0;
    if (offer.token < 0) return;
    const int64_t slot = row * length(draft_.tokens, 1) + level;
    const int32_t cell = draft_.cell(offer.log_q, offer.margin);
    draft_.tokens.data()[slot] = static_cast<int32_t>(offer.token);
    draft_.cells.data()[slot] = cell;
    draft_.rivals.data()[slot] = static_cast<int32_t>(offer.rival);
    draft_.acceptance.data()[slot] = draft_.calibration.data()[cell];
  }

  // What each sharpness of the grid would propose.
  void probe(int64_t row, const Row& given, std::vector<float>& tops) {
    const int64_t count = length(draft_.sharpness_grid);
    Row sharp = given;
    for (int64_t s = 0; s < count; ++s) {
      sharp.temperature = given.temperature / draft_.sharpness_grid.data()[s];
      draft_.probes.data()[row * count + s] = static_cast<int32_t>(sample_row(sharp, tops));
    }
  }

  // Books the level and keeps the rows that grow further: what they promise is their path probability above the floor.
  void advance(int64_t level) {
    const int64_t depth = length(draft_.tokens, 1);
    float promised = 0.0f;
    std::vector<int64_t> growing;
    for (const int64_t row : active_) {
      if (draft_.failed.data()[row]) continue;
      float& path = paths_[static_cast<size_t>(row)];
      path *= draft_.acceptance.data()[row * depth + level];
      draft_.num_tokens.data()[row] = static_cast<int32_t>(level + 1);
      if (draft_.limits.data()[row] <= level + 1 || !(path >= draft_.floor)) continue;
      growing.push_back(row);
      promised += path - draft_.floor;
    }
    if (draft_.level_costs) {
      const auto place = std::min(growing.size(), draft_.level_costs->shape(0) - 1);
      if (!(promised >= draft_.level_costs->data()[place])) growing.clear();
    }
    active_ = std::move(growing);
    pass_.clear();
    for (const int64_t row : active_) {
      const int64_t token = draft_.tokens.data()[row * depth + level];
      pass_.ids.push_back(token);
      pass_.add(rows_[static_cast<size_t>(row)], lengths_[static_cast<size_t>(row)] + level, 1);
    }
  }

  Drafter& drafter_;
  Pass pass_;  // of the active rows
  const Draft& draft_;
  int64_t threads_;
  std::vector<int64_t> active_, rows_, lengths_;  // rows_: of the cache
  std::vector<float> paths_;
};

}  // namespace

NB_MODULE(_decoder, m) {
  m.doc() = "A small decoder that drafts with the shared dice. Use paceline.drafting.native_decoder.";
  m.def("has_octet_dot", &has_octet_dot, "Whether the processor has a dot product of octets: storage int8-dot.");
  nb::class_<Head>(m, "Head")
      .def(nb::init<const Matrix&, const LayerArrays&, const Matrix&, const Matrix&, float, float, int64_t, int64_t,
                    const std::string&>(),
           "fused"_a, "layer"_a, "cos"_a, "sin"_a, "eps"_a, "scaling"_a, "num_kv_heads"_a, "max_requests"_a, "storage"_a)
      .def("fuse", &Head::fuse, "x"_a, "num_threads"_a, "made"_a.noconvert(), "Fill made with x times the fused weight.")
      .def("run", &Head::run, "rows"_a, "starts"_a, "counts"_a, "x"_a, "num_threads"_a, "hidden"_a.noconvert(),
           "Attention over x, whose counts[i] tokens go to row rows[i] from starts[i] on, and MLP, both added to hidden.")
      .def("copy_row", &Head::copy_row, "source"_a, "target"_a, "known"_a, "count"_a, "As Decoder.copy_row.");
  nb::class_<Drafter>(m, "Decoder")
      .def(nb::init<const Matrix&, const Matrix&, const Floats&, const std::vector<LayerArrays>&, const Matrix&,
                    const Matrix&, float, float, int64_t, int64_t, const std::string&>(),
           "embedding"_a, "head"_a, "norm"_a, "layers"_a, "cos"_a, "sin"_a, "eps"_a, "scaling"_a, "num_kv_heads"_a,
           "max_requests"_a, "storage"_a)
      .def("feed", &Drafter::feed, "rows"_a, "starts"_a, "counts"_a,
           "ids"_a, "num_threads"_a, "logits"_a.noconvert(),
           "Feed counts[i] ids to row rows[i] from starts[i] on; fill logits[num_rows, vocab] of each one's last.")
      .def("copy_row", &Drafter::copy_row, "source"_a, "target"_a, "known"_a, "count"_a,
           "Copy the first `count` positions of one row of the cache into another, which has the first `known` already.")
      .def(
          "grow",
          [](Drafter& drafter, const Ints& rows, const Ints& starts, const Ints& counts, const Ints& ids,
             const Array<const uint64_t, 1>& keys, const Floats& temperatures, const Ints& limits, float sharpness,
             const Floats& sharpness_grid, const Floats& calibration, const Floats& confidence_edges,
             const Floats& margin_edges, float floor, const std::optional<Floats>& level_costs, int64_t num_threads,
             const Array<int32_t, 2>& tokens, const Array<int32_t, 1>& num_tokens, const Array<float, 2>& acceptance,
             const Array<int32_t, 2>& cells, const Array<int32_t, 2>& rivals, const Array<int32_t, 2>& probes,
             const Array<bool, 1>& failed) {
            const Draft draft{keys,         temperatures, limits,      sharpness, sharpness_grid,
                              calibration,  confidence_edges, margin_edges, floor,  level_costs,
                              tokens,       num_tokens,   acceptance,  cells,     rivals, probes, failed};
            Growth growth(drafter, drafter.read_pass(rows, starts, counts, ids), draft, num_threads);
            if (!draft.fits(length(rows)) || !drafter.has_room(starts, counts, limits)) refuse();
            nb::gil_scoped_release release;
            growth.run();
          },
          "rows"_a, "starts"_a, "counts"_a, "ids"_a, "keys"_a, "temperatures"_a, "limits"_a, "sharpness"_a,
          "sharpness_grid"_a, "calibration"_a, "confidence_edges"_a, "margin_edges"_a, "floor"_a,
          "level_costs"_a.none(), "num_threads"_a, "tokens"_a.noconvert(), "num_tokens"_a.noconvert(),
          "acceptance"_a.noconvert(), "cells"_a.noconvert(), "rivals"_a.noconvert(), "probes"_a.noconvert(),
          "failed"_a.noconvert(), "Feed as `feed`, then grow drafts level by level; fills the last seven arrays.");
}
