// Weights as the kernels read them: panels of 32 outputs, inputs padded with zeros to a multiple of 32.
//   float32, float16   [panel][input][32 outputs]
//   bfloat16           [panel][input / 32][2 tiles][16 pairs of inputs][16 outputs][2 inputs]: what AMX and AVX512-BF16
//                      multiply, and what AVX-512 and AVX2 widen with a shift and a mask
//   integers           [panel] of linear_int8.h and linear_int4.h
// With `halves` a panel is 16 outputs of the first half of the weight and the 16 of the second that belong to them.
#pragma once

#include <stdint.h>

#include "abi.h"

namespace tide {

int64_t element_bytes(int32_t type);
int64_t packed_bytes(int32_t type, int64_t n, int64_t k);
void pack(int32_t type, int64_t n, int64_t k, bool halves, const void *from, void *to);
void unpack(int32_t type, int64_t n, int64_t k, bool halves, const void *from, void *to);
int64_t int8_bytes(int64_t n, int64_t k);
void pack_int8(int64_t n, int64_t k, bool halves, const int8_t *from, const float *scales, void *to);
void unpack_int8(int64_t n, int64_t k, bool halves, const void *from, int8_t *to, float *scales);
int64_t int4_bytes(int64_t n, int64_t k, int64_t group);
void pack_int4(int64_t n, int64_t k, int64_t group, bool halves, const tm_int4 &from, void *to);
void unpack_int4(int64_t n, int64_t k, int64_t group, bool halves, const void *from, const tm_int4 &to);
int64_t num_panels(int64_t n, bool halves);

}  // namespace tide
