// How the modules take arrays of numpy's, and refuse those that do not fit each other.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

namespace paceline {

namespace nb = nanobind;

template <typename T>
using Row = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using OutRow = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using OutTable = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using OutCube = nb::ndarray<T, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

inline void check(bool fits, const char* message) {
  if (!fits) throw std::invalid_argument(message);
}

}  // namespace paceline
