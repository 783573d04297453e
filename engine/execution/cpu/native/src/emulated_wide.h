// The instructions of AVX-512 (F, BW, VL, DQ, VNNI) that the kernels use, by AVX2: for tests of the levels above it on
// processors that have none of them. Slow, and in no build that is installed. Included in a target region of AVX2, in front
// of everything that uses them; vectors are GCC's, lanes are looped over.
#pragma once

namespace tide {
namespace wide {

typedef uint32_t u32 __attribute__((vector_size(64), may_alias));
typedef uint64_t u64 __attribute__((vector_size(64), may_alias));

template <class To, class From> inline To as(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
struct Halves { __m256 low, high; };
struct IntHalves { __m256i low, high; };
inline __m512 whole(__m256 low, __m256 high) { return as<__m512>(Halves{low, high}); }
inline __m512i whole(__m256i low, __m256i high) { return as<__m512i>(IntHalves{low, high}); }
inline Halves halves(__m512 a) { return as<Halves>(a); }
inline IntHalves halves(__m512i a) { return as<IntHalves>(a); }

template <class T> inline T load(const void *p) {
    T a;
    memcpy(&a, p, sizeof a);
    return a;
}
template <class T> inline void store(void *p, T a) { memcpy(p, &a, sizeof a); }
// Lanes of E whose bit is set; the others are zero, or left as they are in memory.
template <class T, class E> inline T load_lanes(uint64_t mask, const void *p) {
    E lanes[sizeof(T) / sizeof(E)] = {};
    for (size_t i = 0; i < sizeof(T) / sizeof(E); i++)
        if (mask >> i & 1) memcpy(lanes + i, (const E *)p + i, sizeof(E));
    return load<T>(lanes);
}
template <class E, class T> inline void store_lanes(void *p, uint64_t mask, T a) {
    E lanes[sizeof(T) / sizeof(E)];
    store(lanes, a);
    for (size_t i = 0; i < sizeof(T) / sizeof(E); i++)
        if (mask >> i & 1) memcpy((E *)p + i, lanes + i, sizeof(E));
}

inline __m512 set(float x) { return whole(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
inline __m512i set16(int16_t x) { return whole(_mm256_set1_epi16(x), _mm256_set1_epi16(x)); }
inline __m512i set32(int32_t x) { return whole(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
inline __m512i set64(int64_t x) { return whole(_mm256_set1_epi64x(x), _mm256_set1_epi64x(x)); }

inline __m512 fmadd(__m512 a, __m512 b, __m512 c) {
    const Halves x = halves(a), y = halves(b), z = halves(c);
    return whole(_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high));
}
inline __m512 fnmadd(__m512 a, __m512 b, __m512 c) {
    const Halves x = halves(a), y = halves(b), z = halves(c);
    return whole(_mm256_fnmadd_ps(x.low, y.low, z.low), _mm256_fnmadd_ps(x.high, y.high, z.high));
}
inline __m512 max(__m512 a, __m512 b) { return whole(_mm256_max_ps(halves(a).low, halves(b).low), _mm256_max_ps(halves(a).high, halves(b).high)); }
inline __m512 min(__m512 a, __m512 b) { return whole(_mm256_min_ps(halves(a).low, halves(b).low), _mm256_min_ps(halves(a).high, halves(b).high)); }
inline __m512 nearest(__m512 a) { return whole(_mm256_round_ps(halves(a).low, 8), _mm256_round_ps(halves(a).high, 8)); }
inline __m512 fraction(__m512 a) { return a - whole(_mm256_floor_ps(halves(a).low), _mm256_floor_ps(halves(a).high)); }
// p * 2^floor(n), where the bit is set
inline __m512 scale(uint32_t mask, __m512 p, __m512 n) {
    float x[16], by[16];
    store(x, p), store(by, n);
    for (int i = 0; i < 16; i++) {
        const float power = by[i] > 1000.f ? 1000.f : by[i] < -1000.f ? -1000.f : by[i];
        if (!(mask >> i & 1)) x[i] = 0;
        else x[i] = power != power ? power : ldexpf(x[i], int(floorf(power)));
    }
    return load<__m512>(x);
}
inline float sum(__m512 a) {
    float x[16];
    store(x, a);
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
}
inline float highest(__m512 a) {
    float x[16];
    store(x, a);
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; i++) x[i] = x[i] > x[i + step] ? x[i] : x[i + step];
    return x[0];
}
template <int KIND> inline __mmask16 compare(__m512 a, __m512 b) {
    return __mmask16(_mm256_movemask_ps(_mm256_cmp_ps(halves(a).low, halves(b).low, KIND)) |
                     _mm256_movemask_ps(_mm256_cmp_ps(halves(a).high, halves(b).high, KIND)) << 8);
}
template <class E> inline uint32_t equal(__m512i a, __m512i b) {
    E x[64 / sizeof(E)], y[64 / sizeof(E)];
    store(x, a), store(y, b);
    uint32_t mask = 0;
    for (size_t i = 0; i < 64 / sizeof(E); i++) mask |= uint32_t(x[i] == y[i]) << i;
    return mask;
}
// Lanes of b where the bit is set, else of a.
template <class T> inline T choose(uint32_t mask, T a, T b) {
    int32_t x[16], y[16];
    store(x, a), store(y, b);
    for (int i = 0; i < 16; i++) x[i] = mask >> i & 1 ? y[i] : x[i];
    return load<T>(x);
}

inline __m512i bits(__m512 a) { return as<__m512i>(a); }
inline __m512 floats(__m512i a) { return as<__m512>(a); }
inline __m512 both(__m512 a, __m512 b) { return floats(__m512i(bits(a) & bits(b))); }
inline __m512 either(__m512 a, __m512 b) { return floats(__m512i(bits(a) | bits(b))); }
inline __m512 other(__m512 a, __m512 b) { return floats(__m512i(~bits(a) & bits(b))); }

// Each lane of From to To, cut off or, with LIMIT, at most as far as To goes.
template <class Result, class From, class To, bool LIMIT = false, class A> inline Result convert(A a) {
    constexpr size_t COUNT = sizeof(A) / sizeof(From) < sizeof(Result) / sizeof(To) ? sizeof(A) / sizeof(From) : sizeof(Result) / sizeof(To);
    From x[sizeof(A) / sizeof(From)];
    To y[sizeof(Result) / sizeof(To)] = {};
    store(x, a);
    for (size_t i = 0; i < COUNT; i++) {
        const int64_t most = (int64_t(1) << (8 * sizeof(To) - 1)) - 1, value = int64_t(x[i]);
        y[i] = To(!LIMIT ? value : value > most ? most : value < -most - 1 ? -most - 1 : value);
    }
    return load<Result>(y);
}
inline __m512i to_ints(__m512 a) { return whole(_mm256_cvtps_epi32(halves(a).low), _mm256_cvtps_epi32(halves(a).high)); }
inline __m512 to_floats(__m512i a) { return whole(_mm256_cvtepi32_ps(halves(a).low), _mm256_cvtepi32_ps(halves(a).high)); }
inline __m512 from_halves(__m256i a) { return whole(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))); }
inline __m256i to_halves(__m512 a) { return _mm256_set_m128i(_mm256_cvtps_ph(halves(a).high, 0), _mm256_cvtps_ph(halves(a).low, 0)); }

// Of every 128 bits the lower (FIRST = 0) or upper lanes of E, in turn from a and b.
template <class E, int FIRST, class T> inline T unpack(T a, T b) {
    constexpr int PER = 16 / sizeof(E), HALF = PER / 2;
    E x[4 * PER], y[4 * PER], to[4 * PER];
    store(x, a), store(y, b);
    for (int part = 0; part < 4; part++)
        for (int i = 0; i < HALF; i++) {
            to[part * PER + 2 * i] = x[part * PER + FIRST * HALF + i];
            to[part * PER + 2 * i + 1] = y[part * PER + FIRST * HALF + i];
        }
    return load<T>(to);
}
template <int ORDER, class T> inline T shuffle(T a, T b) {
    unsigned char x[4][16], y[4][16], to[4][16];
    store(x, a), store(y, b);
    for (int i = 0; i < 4; i++) memcpy(to[i], i < 2 ? x[ORDER >> (2 * i) & 3] : y[ORDER >> (2 * i) & 3], 16);
    return load<T>(to);
}

inline __m512i pairs(__m512i a, __m512i b) {
    return whole(_mm256_madd_epi16(halves(a).low, halves(b).low), _mm256_madd_epi16(halves(a).high, halves(b).high));
}
// Sums of two products of unsigned and signed bytes, none of which leaves 16 bits here.
inline __m512i byte_pairs(__m512i a, __m512i b) {
    return whole(_mm256_maddubs_epi16(halves(a).low, halves(b).low), _mm256_maddubs_epi16(halves(a).high, halves(b).high));
}
// sum + four products of unsigned and signed bytes (vpdpbusd); bytes in T: 256 or 512 bits
template <class T> inline T byte_products(T sum, T x, T w) {
    int32_t to[sizeof(T) / 4];
    uint8_t a[sizeof(T)];
    int8_t b[sizeof(T)];
    store(to, sum), store(a, x), store(b, w);
    for (size_t i = 0; i < sizeof(T); i++) to[i / 4] += a[i] * b[i];
    return load<T>(to);
}

}  // namespace wide
}  // namespace tide

#define _mm512_set1_ps(x) tide::wide::set(x)
#define _mm512_setzero_ps() tide::wide::set(0.f)
#define _mm512_setzero_si512() tide::wide::set32(0)
#define _mm512_set1_epi16(x) tide::wide::set16(int16_t(x))
#define _mm512_set1_epi32(x) tide::wide::set32(x)
#define _mm512_set1_epi64(x) tide::wide::set64(x)
#define _mm512_loadu_ps(p) tide::wide::load<__m512>(p)
#define _mm512_loadu_si512(p) tide::wide::load<__m512i>(p)
#define _mm512_storeu_ps(p, a) tide::wide::store<__m512>(p, a)
#define _mm512_storeu_si512(p, a) tide::wide::store<__m512i>(p, a)
#define _mm512_maskz_loadu_ps(m, p) tide::wide::load_lanes<__m512, float>(m, p)
#define _mm512_maskz_loadu_epi16(m, p) tide::wide::load_lanes<__m512i, int16_t>(m, p)
#define _mm256_maskz_loadu_epi16(m, p) tide::wide::load_lanes<__m256i, int16_t>(m, p)
#define _mm_maskz_loadu_epi8(m, p) tide::wide::load_lanes<__m128i, int8_t>(m, p)
#define _mm512_mask_storeu_ps(p, m, a) tide::wide::store_lanes<float>(p, m, a)
#define _mm256_mask_storeu_epi16(p, m, a) tide::wide::store_lanes<int16_t>(p, m, a)
#define _mm_mask_storeu_epi8(p, m, a) tide::wide::store_lanes<int8_t>(p, m, a)

#define _mm512_add_ps(a, b) __m512((a) + (b))
#define _mm512_sub_ps(a, b) __m512((a) - (b))
#define _mm512_mul_ps(a, b) __m512((a) * (b))
#define _mm512_div_ps(a, b) __m512((a) / (b))
#define _mm512_max_ps(a, b) tide::wide::max(a, b)
#define _mm512_min_ps(a, b) tide::wide::min(a, b)
#define _mm512_fmadd_ps(a, b, c) tide::wide::fmadd(a, b, c)
#define _mm512_fnmadd_ps(a, b, c) tide::wide::fnmadd(a, b, c)
#define _mm512_reduce_add_ps(a) tide::wide::sum(a)
#define _mm512_reduce_max_ps(a) tide::wide::highest(a)
#define _mm512_roundscale_ps(a, how) tide::wide::nearest(a)
#define _mm512_reduce_ps(a, how) tide::wide::fraction(a)
#define _mm512_scalef_ps(p, n) tide::wide::scale(0xffff, p, n)
#define _mm512_maskz_scalef_ps(m, p, n) tide::wide::scale(m, p, n)
#define _mm512_cmp_ps_mask(a, b, kind) tide::wide::compare<kind>(a, b)
#define _mm512_mask_blend_ps(m, a, b) tide::wide::choose<__m512>(m, a, b)
#define _mm512_mask_mov_ps(a, m, b) tide::wide::choose<__m512>(m, a, b)
#define _mm512_mask_mov_epi32(a, m, b) tide::wide::choose<__m512i>(m, a, b)
#define _mm512_cmpeq_epi16_mask(a, b) tide::wide::equal<int16_t>(a, b)
#define _mm512_cmpeq_epi32_mask(a, b) __mmask16(tide::wide::equal<int32_t>(a, b))

#define _mm512_castps_si512(a) tide::wide::bits(a)
#define _mm512_castsi512_ps(a) tide::wide::floats(a)
#define _mm512_castps_pd(a) (tide::wide::as<__m512d>(a))
#define _mm512_castpd_ps(a) (tide::wide::as<__m512>(a))
#define _mm512_castsi512_si256(a) tide::wide::halves(a).low
#define _mm512_extracti64x4_epi64(a, i) ((i) ? tide::wide::halves(a).high : tide::wide::halves(a).low)
#define _mm512_and_si512(a, b) __m512i(__m512i(a) & __m512i(b))
#define _mm512_or_si512(a, b) __m512i(__m512i(a) | __m512i(b))
#define _mm512_and_ps(a, b) tide::wide::both(a, b)
#define _mm512_or_ps(a, b) tide::wide::either(a, b)
#define _mm512_andnot_ps(a, b) tide::wide::other(a, b)
#define _mm512_abs_ps(a) tide::wide::other(tide::wide::set(-0.f), a)
#define _mm512_add_epi32(a, b) __m512i(tide::wide::u32(a) + tide::wide::u32(b))
#define _mm512_sub_epi32(a, b) __m512i(tide::wide::u32(a) - tide::wide::u32(b))
#define _mm512_add_epi64(a, b) __m512i(tide::wide::u64(a) + tide::wide::u64(b))
#define _mm512_slli_epi32(a, n) __m512i(tide::wide::u32(a) << (n))
#define _mm512_srli_epi32(a, n) __m512i(tide::wide::u32(a) >> (n))
#define _mm512_srli_epi64(a, n) __m512i(tide::wide::u64(a) >> (n))
#define _mm512_madd_epi16(a, b) tide::wide::pairs(a, b)
#define _mm512_maddubs_epi16(a, b) tide::wide::byte_pairs(a, b)

#define _mm512_cvtps_epi32(a) tide::wide::to_ints(a)
#define _mm512_cvtepi32_ps(a) tide::wide::to_floats(a)
#define _mm512_cvtph_ps(a) tide::wide::from_halves(a)
#define _mm512_cvtps_ph(a, how) tide::wide::to_halves(a)
#define _mm512_cvtepu16_epi32(a) tide::wide::convert<__m512i, uint16_t, int32_t>(a)
#define _mm512_cvtepi8_epi16(a) tide::wide::convert<__m512i, int8_t, int16_t>(a)
#define _mm512_cvtepi8_epi32(a) tide::wide::convert<__m512i, int8_t, int32_t>(a)
#define _mm512_cvtepi32_epi16(a) tide::wide::convert<__m256i, int32_t, int16_t>(a)
#define _mm512_cvtepi32_epi8(a) tide::wide::convert<__m128i, int32_t, int8_t>(a)
#define _mm512_cvtsepi32_epi8(a) tide::wide::convert<__m128i, int32_t, int8_t, true>(a)
#define _mm512_cvtepi64_epi32(a) tide::wide::convert<__m256i, int64_t, int32_t>(a)

#define _mm512_unpacklo_ps(a, b) tide::wide::unpack<float, 0, __m512>(a, b)
#define _mm512_unpackhi_ps(a, b) tide::wide::unpack<float, 1, __m512>(a, b)
#define _mm512_unpacklo_pd(a, b) tide::wide::unpack<double, 0, __m512d>(a, b)
#define _mm512_unpackhi_pd(a, b) tide::wide::unpack<double, 1, __m512d>(a, b)
#define _mm512_unpacklo_epi32(a, b) tide::wide::unpack<int32_t, 0, __m512i>(a, b)
#define _mm512_unpackhi_epi32(a, b) tide::wide::unpack<int32_t, 1, __m512i>(a, b)
#define _mm512_unpacklo_epi64(a, b) tide::wide::unpack<int64_t, 0, __m512i>(a, b)
#define _mm512_unpackhi_epi64(a, b) tide::wide::unpack<int64_t, 1, __m512i>(a, b)
#define _mm512_shuffle_f32x4(a, b, order) tide::wide::shuffle<order, __m512>(a, b)
#define _mm512_shuffle_i32x4(a, b, order) tide::wide::shuffle<order, __m512i>(a, b)
