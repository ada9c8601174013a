// Loops written out by the compiler.
#pragma once

#include <type_traits>
#include <utility>

#define INLINE __attribute__((always_inline))

namespace jaxserve {

template <typename F, int... kIndex>
INLINE inline void repeat_each(const F& f, std::integer_sequence<int, kIndex...>) {
  (f(std::integral_constant<int, kIndex>()), ...);
}

// f(0), ..., f(N - 1), the numbers known from the start: what arrays hold at such places can stay in registers.
// Of loops that are unrolled later, compilers leave a part in memory.
template <int N, typename F>
INLINE inline void repeat(const F& f) {
  repeat_each(f, std::make_integer_sequence<int, N>());
}

}  // namespace jaxserve
