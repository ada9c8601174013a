// e^x for x <= 0, and tanh: polynomials of least relative error, fitted for these intervals.
#pragma once

#include "isa.h"

namespace jaxserve {

// e^x for x <= 0, with a relative error of about 1e-7; 0 below -87.7, and for minus infinity. NaN stays NaN.
inline Floats exp_negative(Floats x) {
  x = max(splat(-88.0f), x);  // in this order NaN is kept
  const Floats n = round_even(x * splat(1.44269504f));
  // ln 2 in two parts, the first short enough for exact products
  const Floats r = fma(n, splat(-1.42860677e-6f), fma(n, splat(-0.693145752f), x));
  Floats p = splat(0.0013814539f);
  p = fma(p, r, splat(0.008368745f));
  p = fma(p, r, splat(0.04166839f));
  p = fma(p, r, splat(0.16666521f));
  p = fma(p, r, splat(0.49999994f));
  p = fma(p, r * r, r);
  const Floats scale = power_of_two(n);
  return fma(p, scale, scale);
}

inline Floats tanh(Floats x) {
  const Floats size = abs(x), z = x * x;
  const Floats e = exp_negative(size * splat(-2.0f));
  const Floats far = (splat(1.0f) - e) / (splat(1.0f) + e);
  Floats p = splat(-0.0057170424f);
  p = fma(p, z, splat(0.020650584f));
  p = fma(p, z, splat(-0.053743497f));
  p = fma(p, z, splat(0.13331491f));
  p = fma(p, z, splat(-0.33333284f));
  const Floats near = fma(p * z, size, size);
  return with_sign_of(where_less(size, splat(0.625f), near, far), x);
}

}  // namespace jaxserve
