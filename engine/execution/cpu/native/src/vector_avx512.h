// Sixteen floats, by AVX-512 (F, BW, VL, DQ). Included inside a target region and a namespace of its level.

struct Vec {
    static constexpr int64_t W = 16;
    __m512 v;
};

inline __mmask16 lanes(int64_t n) { return __mmask16((1u << n) - 1); }  // n < 16

inline Vec set(float x) { return {_mm512_set1_ps(x)}; }
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // a * b + c
inline Vec fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a * b
inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float highest(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline bool has_nan(Vec a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }
inline uint32_t equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }  // a bit per lane
inline Vec absolute(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec with_sign(Vec a, Vec sign) {
    const __m512 bit = _mm512_set1_ps(-0.f);
    return {_mm512_or_ps(_mm512_andnot_ps(bit, a.v), _mm512_and_ps(bit, sign.v))};
}
inline Vec first_lanes(Vec a, int64_t n, float other) {
    return n >= Vec::W ? a : Vec{_mm512_mask_blend_ps(lanes(n), _mm512_set1_ps(other), a.v)};
}
inline Vec nearest(Vec a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// p * 2^n where x >= low or x is NaN, elsewhere 0
inline Vec scale_above(Vec p, Vec n, Vec x, float low) {
    return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(low), _CMP_NLT_UQ), p.v, n.v)};
}

inline __m512 widen(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
#ifdef TIDE_HAS_BF16
inline __m256i narrow(__m512 f) { return (__m256i)_mm512_cvtneps_pbh(f); }
#else
inline __m256i narrow(__m512 f) {  // to the nearest, ties to even; NaN stays NaN
    const __m512i u = _mm512_castps_si512(f);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(near, nan, _mm512_set1_epi32(0x7fc0)));
}
#endif

inline Vec load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const bf16 *p) { return {widen(_mm256_loadu_si256((const __m256i *)p))}; }
inline Vec load(const f16 *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))}; }
inline Vec load(const int8_t *p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)))}; }
inline Vec load_part(const int8_t *p, int64_t n) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes(n), p)))}; }
inline Vec load_part(const float *p, int64_t n) { return {_mm512_maskz_loadu_ps(lanes(n), p)}; }
inline Vec load_part(const bf16 *p, int64_t n) { return {widen(_mm256_maskz_loadu_epi16(lanes(n), p))}; }
inline Vec load_part(const f16 *p, int64_t n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes(n), p))}; }
inline void store(float *p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(bf16 *p, Vec a) { _mm256_storeu_si256((__m256i *)p, narrow(a.v)); }
inline void store(f16 *p, Vec a) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a.v, 8)); }
inline void store(int8_t *p, Vec a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v))); }
inline void store_part(int8_t *p, Vec a, int64_t n) { _mm_mask_storeu_epi8(p, lanes(n), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v))); }
inline void store_part(float *p, Vec a, int64_t n) { _mm512_mask_storeu_ps(p, lanes(n), a.v); }
inline void store_part(bf16 *p, Vec a, int64_t n) { _mm256_mask_storeu_epi16(p, lanes(n), narrow(a.v)); }
inline void store_part(f16 *p, Vec a, int64_t n) { _mm256_mask_storeu_epi16(p, lanes(n), _mm512_cvtps_ph(a.v, 8)); }

inline Vec rounded(Vec a, const float *) { return a; }
inline Vec rounded(Vec a, const bf16 *) { return {widen(narrow(a.v))}; }
inline Vec rounded(Vec a, const f16 *) { return {_mm512_cvtph_ps(_mm512_cvtps_ph(a.v, 8))}; }

// W vectors -> the vector of their sums
inline Vec sums(const Vec *v) {
    __m512 a[8], b[4];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i].v, v[2 * i + 1].v), _mm512_unpackhi_ps(v[2 * i].v, v[2 * i + 1].v));
    for (int i = 0; i < 4; i++) {
        const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }  // every 128 bits of b[i] hold parts of the sums 4i .. 4i + 3
    const __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
    const __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
    return {_mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd))};
}

inline void transpose(__m512i *r) {  // 16 x 16 of 32 bits
    __m512i t[16];
    for (int i = 0; i < 8; i++)
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]), t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]), r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88), r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88), r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}
inline void transpose(Vec *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i++) t[i] = _mm512_castps_si512(r[i].v);
    transpose(t);
    for (int i = 0; i < 16; i++) r[i].v = _mm512_castsi512_ps(t[i]);
}

// The weights of two inputs (even, odd) for 16 outputs, as they lie in a panel of bfloat16.
inline void load_pairs(const bf16 *p, Vec &even, Vec &odd) {
    const __m512i w = _mm512_loadu_si512(p);
    even.v = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    odd.v = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000))));
}
