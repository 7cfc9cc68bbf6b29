// The part of PyTorch's C interface that its extensions may rely on from version to version, without its headers.
//
// Found in the library that has been loaded already, so nothing here is linked with it. What is declared is what
// torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h declare (PyTorch 2.10 and later).

#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

namespace paceline {

// An argument or a result of an operator: a number in its lowest bytes, or a tensor, which belongs to whoever has it.
using TorchValue = uint64_t;
using TorchKernel = void (*)(TorchValue* stack, uint64_t inputs, uint64_t outputs);

struct TorchShim {
  int32_t (*get_data_ptr)(void* tensor, void** data);
  int32_t (*get_dim)(void* tensor, int64_t* dims);
  int32_t (*get_sizes)(void* tensor, int64_t** sizes);
  int32_t (*get_strides)(void* tensor, int64_t** strides);
  int32_t (*get_dtype)(void* tensor, int32_t* dtype);
  int32_t (*is_contiguous)(void* tensor, bool* whether);
  int32_t (*empty_strided)(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device,
                           int32_t index, void** tensor);
  int32_t (*delete_tensor_object)(void* tensor);
  int32_t (*dtype_bfloat16)();
  int32_t (*dtype_int32)();
  int32_t (*dtype_int64)();
  int32_t (*device_type_cpu)();
  int32_t (*library_init_impl)(const char* space, const char* key, const char* file, uint32_t line, void** library);
  int32_t (*library_impl)(void* library, const char* name, TorchKernel kernel);
  int32_t (*get_num_threads)(uint32_t* threads);

  // path: libtorch_cpu's. Throws std::runtime_error where it is not loaded, or has not all of this.
  explicit TorchShim(const char* path) {
    void* const library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) throw std::runtime_error(std::string(path) + " is not loaded: import torch first");
    find(library, "aoti_torch_get_data_ptr", get_data_ptr);
    find(library, "aoti_torch_get_dim", get_dim);
    find(library, "aoti_torch_get_sizes", get_sizes);
    find(library, "aoti_torch_get_strides", get_strides);
    find(library, "aoti_torch_get_dtype", get_dtype);
    find(library, "aoti_torch_is_contiguous", is_contiguous);
    find(library, "aoti_torch_empty_strided", empty_strided);
    find(library, "aoti_torch_delete_tensor_object", delete_tensor_object);
    find(library, "aoti_torch_dtype_bfloat16", dtype_bfloat16);
    find(library, "aoti_torch_dtype_int32", dtype_int32);
    find(library, "aoti_torch_dtype_int64", dtype_int64);
    find(library, "aoti_torch_device_type_cpu", device_type_cpu);
    find(library, "aoti_torch_library_init_impl", library_init_impl);
    find(library, "aoti_torch_library_impl", library_impl);
    find(library, "torch_get_num_threads", get_num_threads);
  }

  // Implements operators of the space `paceline` on the CPU.
  void implement(std::initializer_list<std::pair<const char*, TorchKernel>> kernels) const;

 private:
  template <class Function>
  static void find(void* library, const char* name, Function& found) {
    void* const address = dlsym(library, name);
    if (address == nullptr) throw std::runtime_error(std::string("this PyTorch has no ") + name);
    std::memcpy(&found, &address, sizeof found);
  }
};

// Throws std::runtime_error where a call of the interface has failed.
inline void check_torch(int32_t error) {
  if (error != 0) throw std::runtime_error("a call of PyTorch's C interface has failed");
}

inline void TorchShim::implement(std::initializer_list<std::pair<const char*, TorchKernel>> kernels) const {
  void* library = nullptr;  // for as long as the process lives
  check_torch(library_init_impl("paceline", "CPU", __FILE__, __LINE__, &library));
  for (const auto& [name, kernel] : kernels) check_torch(library_impl(library, name, kernel));
}

inline int64_t torch_threads(const TorchShim& torch) {
  uint32_t threads = 1;
  check_torch(torch.get_num_threads(&threads));
  return threads;
}

// A tensor that is held here; its sizes and strides are its own.
class TorchTensor {
 public:
  TorchTensor(const TorchShim& torch, TorchValue value) : torch_(torch), handle_(reinterpret_cast<void*>(value)) {
    check_torch(torch.get_dim(handle_, &dims));
    check_torch(torch.get_sizes(handle_, &sizes));
    check_torch(torch.get_strides(handle_, &strides));
    check_torch(torch.get_dtype(handle_, &dtype));
    for (int64_t i = 0; i < dims; ++i) count *= sizes[i];
  }
  TorchTensor(const TorchTensor&) = delete;
  TorchTensor& operator=(const TorchTensor&) = delete;
  ~TorchTensor() {
    if (handle_ != nullptr) torch_.delete_tensor_object(handle_);
  }

  bool is_contiguous() const {
    bool whether = false;
    check_torch(torch_.is_contiguous(handle_, &whether));
    return whether;
  }

  template <class Element>
  Element* data() const {
    void* found = nullptr;
    check_torch(torch_.get_data_ptr(handle_, &found));
    return static_cast<Element*>(found);
  }

  // For messages: sizes and strides, and which of the formats it has that are known here.
  std::string describe() const {
    std::string text = "sizes (";
    for (int64_t i = 0; i < dims; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
    text += "), strides (";
    for (int64_t i = 0; i < dims; ++i) text += (i ? ", " : "") + std::to_string(strides[i]);
    const bool is_half = dtype == torch_.dtype_bfloat16(), is_int = dtype == torch_.dtype_int32();
    return text + "), " + (is_half ? "bfloat16" : is_int ? "int32" : dtype == torch_.dtype_int64() ? "int64" : "another format");
  }

  // Gives it away.
  TorchValue release() {
    const auto value = reinterpret_cast<TorchValue>(handle_);
    handle_ = nullptr;
    return value;
  }

  int64_t dims = 0, *sizes = nullptr, *strides = nullptr, count = 1;
  int32_t dtype = -1;

 private:
  const TorchShim& torch_;
  void* handle_;
};

}  // namespace paceline
