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

int64_t int4_bytes(int64_t n, int64_t k, int64_t group) { return divide_up(n, PANEL) * int4_panel_bytes(k, group); }

namespace {

// Where the weight of an output (0 .. 31) and an input (of its group) lies behind the group's head, in halves of bytes.
inline int64_t place_int4(int64_t output, int64_t input) { return 2 * (input / 8 * (4 * PANEL) + output * 4 + input % 4) + input % 8 / 4; }

inline int nibble(const uint8_t *bytes, int64_t i) { return bytes[i / 2] >> i % 2 * 4 & 15; }
inline void set_nibble(uint8_t *bytes, int64_t i, int value) {
    const int kept = bytes[i / 2] & (i % 2 ? 15 : 240);
    bytes[i / 2] = uint8_t(kept | value << i % 2 * 4);
}

template <bool BACK> void copy_int4(int64_t n, int64_t k, int64_t group, bool halves, const tm_int4 &rows, char *panels) {
    const int64_t groups = k / group;
    for (int64_t panel = 0; panel < num_panels(n, halves); panel++) {
        char *at = panels + panel * int4_panel_bytes(k, group);
        for (int64_t i = 0; i < PANEL; i++) {
            const int64_t output = output_of(panel, i, n, halves);
            if (output < 0) continue;
            if (BACK) rows.base[output] = ((float *)at)[i];
            else ((float *)at)[i] = rows.base[output];
            for (int64_t g = 0; g < groups; g++) {
                char *head = at + INT4_HEAD + g * int4_group_bytes(group);
                uint16_t &scale = ((uint16_t *)head)[i];
                uint8_t &zero = ((uint8_t *)head)[2 * PANEL + i];
                if (BACK) rows.scales[output * groups + g] = scale, rows.zeros[output * groups + g] = zero;
                else scale = rows.scales[output * groups + g], zero = rows.zeros[output * groups + g];
                uint8_t *row = rows.values + output * (k / 2) + g * (group / 2), *packed = (uint8_t *)head + INT4_GROUP_HEAD;
                for (int64_t j = 0; j < group; j++) {
                    if (BACK) set_nibble(row, j, nibble(packed, place_int4(i, j)));
                    else set_nibble(packed, place_int4(i, j), nibble(row, j));
                }
            }
        }
    }
}

}  // namespace

void pack_int4(int64_t n, int64_t k, int64_t group, bool halves, const tm_int4 &from, void *to) {
    memset(to, 0, size_t(int4_bytes(n, k, group)));
    copy_int4<false>(n, k, group, halves, from, (char *)to);
}

void unpack_int4(int64_t n, int64_t k, int64_t group, bool halves, const void *from, const tm_int4 &to) {
    copy_int4<true>(n, k, group, halves, to, (char *)from);
}

}  // namespace tide
