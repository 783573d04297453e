// The instructions for bfloat16 and tiles in AVX-512, by Intel's description of them: for tests of the code that uses
// them, on processors that have none of them. Slow, and in no build that is installed. Included in a target region.
#pragma once

#ifdef TIDE_EMULATE_WIDE
#include "emulated_wide.h"
#endif

namespace tide {
namespace emulated {

inline __m512 low(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline __m512 high(__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000)))); }

inline __m512 dot(__m512 c, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(low(a), low(b), _mm512_fmadd_ps(high(a), high(b), c));
}
inline __m256i narrow(__m512 f) {
    const __m512i u = _mm512_castps_si512(f);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(near, nan, _mm512_set1_epi32(0x7fc0)));
}

struct Tiles { unsigned char rows[8][16][64]; };
inline Tiles &tiles() {
    static thread_local Tiles all;
    return all;
}
inline void load(int t, const void *p, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy(tiles().rows[t][r], (const char *)p + r * stride, 64);
}
inline void store(int t, void *p, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy((char *)p + r * stride, tiles().rows[t][r], 64);
}
inline void clear(int t) { memset(tiles().rows[t], 0, sizeof tiles().rows[t]); }
inline void multiply(int c, int a, int b) {
    for (int r = 0; r < 16; r++) {
        __m512 sum = _mm512_loadu_ps(tiles().rows[c][r]);
        for (int k = 0; k < 16; k++) {
            int pair;
            memcpy(&pair, tiles().rows[a][r] + 4 * k, 4);
            sum = dot(sum, _mm512_set1_epi32(pair), _mm512_loadu_si512(tiles().rows[b][k]));
        }
        _mm512_storeu_ps(tiles().rows[c][r], sum);
    }
}

}  // namespace emulated
}  // namespace tide

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadd(t, p, stride) tide::emulated::load(t, p, stride)
#define _tile_stored(t, p, stride) tide::emulated::store(t, p, stride)
#define _tile_zero(t) tide::emulated::clear(t)
#define _tile_dpbf16ps(c, a, b) tide::emulated::multiply(c, a, b)
#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)
#define _mm512_dpbf16_ps(c, a, b) tide::emulated::dot(c, (__m512i)(a), (__m512i)(b))
#define _mm512_cvtneps_pbh(f) tide::emulated::narrow(f)
