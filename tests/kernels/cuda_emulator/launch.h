// How Python starts the kernel ENTRY, whatever its parameters are.
#pragma once
#include <type_traits>
#include <utility>

namespace emulator {

// A class is what its address stands for among the values.
template <class T>
constexpr char kind_of() {
  static_assert(std::is_pointer_v<T> || std::is_class_v<T> || std::is_same_v<T, int> || std::is_same_v<T, float>);
  return std::is_pointer_v<T> ? 'p' : std::is_class_v<T> ? 'm' : std::is_same_v<T, int> ? 'i' : 'f';
}

template <class T>
const T& value_at(const char* place) {
  if constexpr (std::is_class_v<T>) return **(const T* const*)place;
  else return *(const T*)place;
}

template <class... Parameters>
const char* kinds_of(void (*)(Parameters...)) {
  static const char kinds[] = {kind_of<Parameters>()..., 0};
  return kinds;
}

static const char* values;  // of the parameters, 8 bytes each

template <class... Parameters, size_t... indices>
void call(void (*kernel)(Parameters...), std::index_sequence<indices...>) {
  kernel(value_at<Parameters>(values + indices * 8)...);
}

template <class... Parameters>
void call(void (*kernel)(Parameters...)) {
  call(kernel, std::index_sequence_for<Parameters...>());
}

}  // namespace emulator

// Of the parameters, a letter each: pointer, tensor map, int or float.
extern "C" const char* parameter_kinds() { return emulator::kinds_of(ENTRY); }

// What went wrong, or null.
extern "C" const char* launch(unsigned x, unsigned y, unsigned z, unsigned threads, size_t shared_bytes,
                              unsigned cluster, const char* values, const emulator::Tensor* tensors,
                              size_t num_tensors) {
  emulator::values = values;
  emulator::tensors.assign(tensors, tensors + num_tensors);
  emulator::body = [] { emulator::call(ENTRY); };
  return emulator::run_grid({x, y, z}, threads, shared_bytes, cluster);
}
