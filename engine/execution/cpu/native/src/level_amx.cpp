// AMX tiles for bfloat16: Sapphire Rapids and later.
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
TIDE_TARGET_WIDE("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c")
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
#include "level_of_bf16.h"
#include "linear_amx.h"
#include "attention_amx.h"
}  // namespace

const Kernels *amx_kernels(int32_t type) {
    static const Kernels kernels = kernels_of_bf16<AmxAttention>("amx", linear_amx, enter_tiles, leave_tiles);
    return type == TM_BFLOAT16 ? &kernels : nullptr;
}
}  // namespace tide
TIDE_TARGET_END
