// AVX-512 without bfloat16: Skylake to Ice Lake servers.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "target.h"

#define TIDE_WIDE
TIDE_TARGET_WIDE("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#ifdef TIDE_EMULATE_WIDE
#include "emulated_wide.h"
#endif
namespace tide {
namespace {
#include "vector_avx512.h"
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

const Kernels *avx512_kernels(int32_t type) { return float_kernels("avx512", type); }
const Integers *avx512_words(int32_t type, bool narrow) {
    return narrow ? integers_table<bf16, bf16>() : float_integers(type);
}
}  // namespace tide
TIDE_TARGET_END
