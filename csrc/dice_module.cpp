// paceline._dice: the shared dice for NumPy arrays, and the pruned sampler (keyed_sampling.hpp).
//
// Nothing here keeps state between calls; calls may run in parallel and hold no interpreter lock.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "dice.hpp"
#include "keyed_sampling.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace paceline;

template <typename T>
using In1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MutableLogits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Calls visit(r, row, tops) for every row. `results`: rows of the arrays to be filled.
// Returns -1, or the first row that has wrong arguments; those behind it were not visited.
template <typename Table, typename Visit>
int64_t for_each_row(const Table& logits, const In1<uint64_t>& keys, const In1<int64_t>& positions,
                     const In1<float>& temperatures, std::initializer_list<size_t> results, Visit visit) {
  const size_t num_rows = logits.shape(0);
  const auto vocab = static_cast<int64_t>(logits.shape(1));
  bool fits = keys.shape(0) == num_rows && positions.shape(0) == num_rows && temperatures.shape(0) == num_rows;
  for (const size_t size : results) fits = fits && size == num_rows;
  if (!fits) throw nb::value_error("logits, keys, positions, temperatures and results differ in their number of rows");
  nb::gil_scoped_release unlocked;
  std::vector<float> tops = block_tops(vocab);
  for (size_t r = 0; r < num_rows; ++r) {
    const float temperature = temperatures.data()[r];
    const int64_t position = positions.data()[r];
    if (!is_sound(temperature, position)) return static_cast<int64_t>(r);
    const Row row{logits.data() + r * static_cast<size_t>(vocab), vocab, dice_prefix(keys.data()[r], position),
                  temperature};
    visit(r, row, tops);
  }
  return -1;
}

int64_t sample(const Logits& logits, const In1<uint64_t>& keys, const In1<int64_t>& positions,
               const In1<float>& temperatures, const Out1<int64_t>& out) {
  return for_each_row(logits, keys, positions, temperatures, {out.shape(0)},
                      [&out](size_t r, const Row& row, std::vector<float>& tops) {
                        out.data()[r] = sample_row(row, tops);
                      });
}

int64_t propose(const MutableLogits& logits, const In1<uint64_t>& keys, const In1<int64_t>& positions,
                const In1<float>& temperatures, float sharpness, const Out1<int64_t>& tokens,
                const Out1<float>& log_q, const Out1<float>& margins, const Out1<int64_t>& rivals) {
  return for_each_row(logits, keys, positions, temperatures,
                      {tokens.shape(0), log_q.shape(0), margins.shape(0), rivals.shape(0)},
                      [&](size_t r, const Row& row, std::vector<float>& tops) {
                        float* own = logits.data() + r * static_cast<size_t>(row.vocab);
                        const Offer offer = propose_row(own, row, sharpness, tops);
                        tokens.data()[r] = offer.token;
                        log_q.data()[r] = offer.log_q;
                        margins.data()[r] = offer.margin;
                        rivals.data()[r] = offer.rival;
                      });
}

void gumbel_array(const In1<uint64_t>& keys, const In1<int64_t>& positions, const In1<uint32_t>& tokens,
                  const Out1<float>& out) {
  const size_t size = out.shape(0);
  if (keys.shape(0) != size || positions.shape(0) != size || tokens.shape(0) != size) {
    throw nb::value_error("keys, positions, tokens and out differ in length");
  }
  nb::gil_scoped_release unlocked;
  for (size_t i = 0; i < size; ++i) {
    out.data()[i] = gumbel(keys.data()[i], positions.data()[i], tokens.data()[i]);
  }
}

}  // namespace

NB_MODULE(_dice, m) {
  m.doc() = "Shared dice: keyed Gumbel noise and exact pruned sampling. Use paceline.dice.";
  m.def("sample", &sample, "logits"_a.noconvert(), "keys"_a.noconvert(), "positions"_a.noconvert(),
        "temperatures"_a.noconvert(), "out"_a.noconvert(),
        "Fill out[num_rows] with one token per row; returns -1, or the first row with wrong arguments.");
  m.def("propose", &propose, "logits"_a.noconvert(), "keys"_a.noconvert(), "positions"_a.noconvert(),
        "temperatures"_a.noconvert(), "sharpness"_a, "tokens"_a.noconvert(), "log_q"_a.noconvert(),
        "margins"_a.noconvert(), "rivals"_a.noconvert(), "As sample, at temperature / sharpness, with what a drafter says of each token.");
  m.def("gumbel", &gumbel_array, "keys"_a.noconvert(), "positions"_a.noconvert(), "tokens"_a.noconvert(),
        "out"_a.noconvert(), "Fill out[n] with the noise of n (key, position, token) triples.");
}
