// Elementary functions on vectors; included behind a level's vectors. Errors are a few units in the last place of float.

inline Vec get(const float *p, int64_t left) { return left >= Vec::W ? load(p) : load_part(p, left); }
inline Vec get(const bf16 *p, int64_t left) { return left >= Vec::W ? load(p) : load_part(p, left); }
inline Vec get(const int8_t *p, int64_t left) { return left >= Vec::W ? load(p) : load_part(p, left); }
inline Vec get(const f16 *p, int64_t left) { return left >= Vec::W ? load(p) : load_part(p, left); }

// Rounds to the model's type T and stores as S: T itself, or float.
template <class T, class S> inline void put(S *p, Vec a, int64_t left) {
    const Vec r = rounded(a, (const T *)nullptr);
    if (left >= Vec::W) store(p, r);
    else store_part(p, r, left);
}
template <class T> inline Vec rounded_to(Vec a) { return rounded(a, (const T *)nullptr); }

inline Vec negative(Vec a) { return sub(zero(), a); }

inline Vec exp(Vec x) {  // of what is at most 88; 0 below -87, NaN stays NaN
    const Vec n = nearest(mul(x, set(1.44269504f)));
    Vec r = fnma(n, set(0.693359375f), x);
    r = fnma(n, set(-2.12194440e-4f), r);
    Vec p = set(1.f / 5040);
    p = fma(p, r, set(1.f / 720));
    p = fma(p, r, set(1.f / 120));
    p = fma(p, r, set(1.f / 24));
    p = fma(p, r, set(1.f / 6));
    p = fma(p, r, set(0.5f));
    p = fma(p, mul(r, r), add(r, set(1.f)));
    return scale_above(p, n, x, -87.f);
}

#ifdef TIDE_HAS_BF16
constexpr float LOG2_E = 1.44269504f;

// 2^x to 3e-6 of it, for what is rounded to bfloat16: a polynomial of least error in the fraction of x. 0 far below,
// infinite far above, NaN stays NaN.
inline Vec power(Vec x) {
    const __m512 from = _mm512_max_ps(_mm512_set1_ps(-200.f), x.v);
    const Vec f = {_mm512_reduce_ps(from, 9)};
    Vec p = set(0.0135341678f);
    p = fma(p, f, set(0.0520114638f));
    p = fma(p, f, set(0.241442755f));
    p = fma(p, f, set(0.693003833f));
    p = fma(p, f, set(1.00000262f));
    return {_mm512_scalef_ps(p.v, from)};
}
inline Vec quick_exp(Vec x) { return power(mul(x, set(LOG2_E))); }
#else
inline Vec quick_exp(Vec x) { return exp(x); }
#endif

inline Vec silu(Vec x) { return div(x, add(set(1.f), quick_exp(min(negative(x), set(88.f))))); }

// 1 - exp(-x^2) * (a polynomial in 1 / (1 + 0.45 |x|)), fitted by least squares to 1e-9.
inline Vec erf(Vec x) {
    const Vec a = absolute(x), t = div(set(1.f), fma(a, set(0.45f), set(1.f)));
    Vec p = set(0.09256994f);
    p = fma(p, t, set(-0.49410575f));
    p = fma(p, t, set(0.85717061f));
    p = fma(p, t, set(-0.37580579f));
    p = fma(p, t, set(0.46017239f));
    p = fma(p, t, set(0.20100884f));
    p = fma(p, t, set(0.25898976f));
    return with_sign(fnma(mul(p, t), exp(negative(mul(a, a))), set(1.f)), x);
}
inline Vec gelu(Vec x) { return mul(mul(x, set(0.5f)), add(set(1.f), erf(mul(x, set(0.70710678f))))); }

inline Vec tanh(Vec x) {  // (1 - e) / (1 + e), e = exp(-2 |x|)
    const Vec e = quick_exp(mul(absolute(x), set(-2.f)));
    return with_sign(div(sub(set(1.f), e), add(set(1.f), e)), x);
}
inline Vec capped(Vec x, float cap) { return cap > 0 ? mul(tanh(div(x, set(cap))), set(cap)) : x; }
inline Vec gelu_tanh(Vec x) {
    const Vec inner = mul(set(0.79788456f), fma(mul(mul(x, x), x), set(0.044715f), x));
    return mul(mul(x, set(0.5f)), add(set(1.f), tanh(inner)));
}
