// Products of bytes in AVX-512 (AVX512-VNNI): Cascade Lake and later, Zen 4 and later.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "target.h"

#define TIDE_WIDE
#define TIDE_BYTES
TIDE_TARGET_WIDE("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#ifdef TIDE_EMULATE_WIDE
#include "emulated_wide.h"
#endif
namespace tide {
namespace {
#include "vector_avx512.h"
#include "functions.h"
#include "epilogue.h"
#include "asks.h"
#include "linear_int8.h"
#include "linear_int4.h"
}  // namespace

const Integers *avx512_bytes(int32_t type, bool narrow) {
    return narrow ? integers_table<bf16, bf16>() : float_integers(type);
}
}  // namespace tide
TIDE_TARGET_END
