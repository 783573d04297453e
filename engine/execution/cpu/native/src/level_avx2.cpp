// AVX2, FMA and F16C: laptops, Zen 1 to 3.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "target.h"

TIDE_TARGET("avx2,fma,f16c")
namespace tide {
namespace {
#include "vector_avx2.h"
#include "functions.h"
#include "cells.h"
#include "elementwise.h"
#include "epilogue.h"
#include "asks.h"
#include "linear.h"
#include "attention.h"
#include "linear_int8.h"
#include "linear_int4.h"
#include "level.h"
}  // namespace

const Kernels *avx2_kernels(int32_t type) { return float_kernels("avx2", type); }
const Integers *avx2_words(int32_t type) { return float_integers(type); }
}  // namespace tide
TIDE_TARGET_END
