// Products of bytes in AVX2 (AVX-VNNI): Alder Lake and later.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "target.h"

#define TIDE_BYTES
#ifdef TIDE_EMULATE
TIDE_TARGET_WIDE("avx2,fma,f16c,avx512f,avx512vl,avx512vnni")
#ifdef TIDE_EMULATE_WIDE
#include "emulated_wide.h"
#endif
#else
TIDE_TARGET("avx2,fma,f16c,avxvnni")
#endif
namespace tide {
namespace {
#include "vector_avx2.h"
#include "functions.h"
#include "epilogue.h"
#include "asks.h"
#include "linear_int8.h"
#include "linear_int4.h"
}  // namespace

const Integers *avx2_bytes(int32_t type) { return float_integers(type); }
}  // namespace tide
TIDE_TARGET_END
