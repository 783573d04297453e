// AVX512-BF16: Cooper Lake, Zen 4 and later. Activations are bfloat16.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "target.h"

#define TIDE_WIDE
#define TIDE_HAS_BF16
#ifdef TIDE_EMULATE
TIDE_TARGET_WIDE("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "emulated.h"
#else
TIDE_TARGET_WIDE("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#endif
namespace tide {
namespace {
#include "vector_avx512.h"
#include "functions.h"
#include "cells.h"
#include "elementwise.h"
#include "epilogue.h"
#include "linear_bf16.h"
#include "attention.h"
#include "attention_bf16.h"
#include "level_of_bf16.h"
}  // namespace

const Kernels *bf16_kernels(int32_t type) {
    static const Kernels kernels = kernels_of_bf16<PairedTiles>("bf16", linear_bf16, nullptr, nullptr);
    return type == TM_BFLOAT16 ? &kernels : nullptr;
}
}  // namespace tide
TIDE_TARGET_END
