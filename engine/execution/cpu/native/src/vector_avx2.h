// Eight floats, by AVX2, FMA and F16C. Included inside a target region and a namespace of its level.

struct Vec {
    static constexpr int64_t W = 8;
    __m256 v;
};

inline Vec set(float x) { return {_mm256_set1_ps(x)}; }
inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }    // a * b + c
inline Vec fnma(Vec a, Vec b, Vec c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a * b
inline float sum(Vec a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
inline float highest(Vec a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
inline bool has_nan(Vec a) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)) != 0; }
inline uint32_t equal(Vec a, Vec b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ))); }
inline Vec absolute(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.f), a.v)}; }
inline Vec with_sign(Vec a, Vec sign) {
    const __m256 bit = _mm256_set1_ps(-0.f);
    return {_mm256_or_ps(_mm256_andnot_ps(bit, a.v), _mm256_and_ps(bit, sign.v))};
}
inline Vec first_lanes(Vec a, int64_t n, float other) {
    if (n >= Vec::W) return a;
    const __m256i live = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return {_mm256_blendv_ps(_mm256_set1_ps(other), a.v, _mm256_castsi256_ps(live))};
}
inline Vec nearest(Vec a) { return {_mm256_round_ps(a.v, 8)}; }
// p * 2^n where x >= low or x is NaN, elsewhere 0; for p of about 1 and n of -126 .. 127 there: n goes to p's exponent
inline Vec scale_above(Vec p, Vec n, Vec x, float low) {
    const __m256i bits = _mm256_add_epi32(_mm256_castps_si256(p.v), _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23));
    return {_mm256_and_ps(_mm256_castsi256_ps(bits), _mm256_cmp_ps(x.v, _mm256_set1_ps(low), _CMP_NLT_UQ))};
}

inline __m256 widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
inline __m128i narrow(__m256 f) {  // to the nearest, ties to even; NaN stays NaN
    const __m256i u = _mm256_castps_si256(f);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q));
    const __m256i all = _mm256_blendv_epi8(near, _mm256_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

inline Vec load(const float *p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const bf16 *p) { return {widen(_mm_loadu_si128((const __m128i *)p))}; }
inline Vec load(const f16 *p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p))}; }
inline Vec load(const int8_t *p) { return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)))}; }
inline void store(int8_t *p, Vec a) {
    const __m256i n = _mm256_cvtps_epi32(a.v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}
inline void store(float *p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void store(bf16 *p, Vec a) { _mm_storeu_si128((__m128i *)p, narrow(a.v)); }
inline void store(f16 *p, Vec a) { _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.v, 8)); }
template <class T> inline Vec load_part(const T *p, int64_t n) {
    T room[Vec::W];
    memset(room, 0, sizeof room);
    memcpy(room, p, size_t(n) * sizeof(T));
    return load(room);
}
template <class T> inline void store_part(T *p, Vec a, int64_t n) {
    T room[Vec::W];
    store(room, a);
    memcpy(p, room, size_t(n) * sizeof(T));
}

inline Vec rounded(Vec a, const float *) { return a; }
inline Vec rounded(Vec a, const bf16 *) { return {widen(narrow(a.v))}; }
inline Vec rounded(Vec a, const f16 *) { return {_mm256_cvtph_ps(_mm256_cvtps_ph(a.v, 8))}; }

// W vectors -> the vector of their sums
inline Vec sums(const Vec *v) {
    __m256 a[4];
    for (int i = 0; i < 4; i++) a[i] = _mm256_hadd_ps(v[2 * i].v, v[2 * i + 1].v);
    const __m256 b = _mm256_hadd_ps(a[0], a[1]), c = _mm256_hadd_ps(a[2], a[3]);
    return {_mm256_add_ps(_mm256_permute2f128_ps(b, c, 0x20), _mm256_permute2f128_ps(b, c, 0x31))};
}

inline void transpose(Vec *r) {  // 8 x 8
    __m256 t[8], u[8];
    for (int i = 0; i < 4; i++)
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i].v, r[2 * i + 1].v), t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i].v, r[2 * i + 1].v);
    for (int i = 0; i < 2; i++) {
        u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44), u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

// The weights of two inputs (even, odd) for 8 outputs, as they lie in a panel of bfloat16.
inline void load_pairs(const bf16 *p, Vec &even, Vec &odd) {
    const __m256i w = _mm256_loadu_si256((const __m256i *)p);
    even.v = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
    odd.v = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000))));
}
