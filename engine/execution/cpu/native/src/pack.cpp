#include "pack.h"

#include <string.h>

#include "kernels.h"

namespace tide {

namespace {

// Where the weight of an output (0 .. 31 of its panel) and an input lies within the panel, in elements.
inline int64_t place(int32_t type, int64_t output, int64_t input) {
    if (type != TM_BFLOAT16) return input * PANEL + output;
    return input / 32 * 1024 + output / 16 * 512 + input % 32 / 2 * 32 + output % 16 * 2 + input % 2;
}

// The same of integers, behind the panel's head.
inline int64_t place_int8(int64_t output, int64_t input) { return input / 4 * (4 * PANEL) + output * 4 + input % 4; }

// The output of the weight that is number `i` of a panel; -1: padding.
inline int64_t output_of(int64_t panel, int64_t i, int64_t n, bool halves) {
    if (!halves) return panel * PANEL + i < n ? panel * PANEL + i : -1;
    const int64_t output = panel * (PANEL / 2) + i % (PANEL / 2);
    return output >= n / 2 ? -1 : output + (i < PANEL / 2 ? 0 : n / 2);
}

template <class T, bool BACK> void copy(int32_t type, int64_t n, int64_t k, bool halves, T *rows, T *panels) {
    const int64_t padded = round_up(k, K_STEP);
    for (int64_t panel = 0; panel < num_panels(n, halves); panel++, panels += padded * PANEL)
        for (int64_t i = 0; i < PANEL; i++) {
            const int64_t output = output_of(panel, i, n, halves);
            if (output < 0) continue;
            T *row = rows + output * k;
            for (int64_t j = 0; j < k; j++) {
                T &packed = panels[place(type, i, j)];
                if (BACK) row[j] = packed;
                else packed = row[j];
            }
        }
}

}  // namespace

int64_t element_bytes(int32_t type) { return type == TM_FLOAT32 ? 4 : 2; }

int64_t num_panels(int64_t n, bool halves) { return halves ? divide_up(n / 2, PANEL / 2) : divide_up(n, PANEL); }

int64_t packed_bytes(int32_t type, int64_t n, int64_t k) {
    return divide_up(n, PANEL) * PANEL * round_up(k, K_STEP) * element_bytes(type);
}

void pack(int32_t type, int64_t n, int64_t k, bool halves, const void *from, void *to) {
    memset(to, 0, size_t(packed_bytes(type, n, k)));
    if (type == TM_FLOAT32) copy<uint32_t, false>(type, n, k, halves, (uint32_t *)from, (uint32_t *)to);
    else copy<uint16_t, false>(type, n, k, halves, (uint16_t *)from, (uint16_t *)to);
}

void unpack(int32_t type, int64_t n, int64_t k, bool halves, const void *from, void *to) {
    if (type == TM_FLOAT32) copy<uint32_t, true>(type, n, k, halves, (uint32_t *)to, (uint32_t *)from);
    else copy<uint16_t, true>(type, n, k, halves, (uint16_t *)to, (uint16_t *)from);
}

int64_t int8_bytes(int64_t n, int64_t k) { return divide_up(n, PANEL) * int8_panel_bytes(k); }

void pack_int8(int64_t n, int64_t k, bool halves, const int8_t *from, const float *scales, void *to) {
    memset(to, 0, size_t(int8_bytes(n, k)));
    for (int64_t panel = 0; panel < num_panels(n, halves); panel++) {
        char *at = (char *)to + panel * int8_panel_bytes(k);
        for (int64_t i = 0; i < PANEL; i++) {
            const int64_t output = output_of(panel, i, n, halves);
            if (output < 0) continue;
            int32_t sum = 0;
            for (int64_t j = 0; j < k; j++) {
                const int8_t weight = from[output * k + j];
                sum += weight;
                at[INT8_HEAD + place_int8(i, j)] = char(weight);
            }
            ((float *)at)[i] = scales[output];
            ((int32_t *)at)[PANEL + i] = 128 * sum;
        }
    }
}

void unpack_int8(int64_t n, int64_t k, bool halves, const void *from, int8_t *to, float *scales) {
    for (int64_t panel = 0; panel < num_panels(n, halves); panel++) {
        const char *at = (const char *)from + panel * int8_panel_bytes(k);
        for (int64_t i = 0; i < PANEL; i++) {
            const int64_t output = output_of(panel, i, n, halves);
            if (output < 0) continue;
            for (int64_t j = 0; j < k; j++) to[output * k + j] = int8_t(at[INT8_HEAD + place_int8(i, j)]);
            scales[output] = ((const float *)at)[i];
        }
    }
}

}  // namespace tide
