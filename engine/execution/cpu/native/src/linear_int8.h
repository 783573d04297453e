// Linear layers on integers of 8 bits; included behind epilogue.h. Rows are rounded to 255 steps of their own (quantize),
// weights were when they were packed: [panel][scales: 32 float][128 * sums: 32 int32][inputs / 4][32 outputs][4 inputs].
//
// With TIDE_BYTES four products of bytes are one instruction (AVX512-VNNI, AVX-VNNI), which takes rows unsigned: 128 above
// their value, so that 128 times the sum of an output's weights is taken off again. Without, rows are 16 bits wide and
// weights are widened on the way, once for all rows of a tile: a pair of products does not fit in 16 bits, a sum of two
// such pairs that saturates would be wrong.

#ifdef TIDE_WIDE
struct Ints { __m512i v; };
inline Ints no_ints() { return {_mm512_setzero_si512()}; }
inline void store_floats(float *to, const int32_t *sums, const int32_t *offsets, const float *scales, Vec row) {
    const __m512i sum = _mm512_loadu_si512(sums);
    const Vec x = {_mm512_cvtepi32_ps(offsets ? _mm512_sub_epi32(sum, _mm512_loadu_si512(offsets)) : sum)};
    store(to, mul(mul(x, load(scales)), row));
}
#else
struct Ints { __m256i v; };
inline Ints no_ints() { return {_mm256_setzero_si256()}; }
inline void store_floats(float *to, const int32_t *sums, const int32_t *offsets, const float *scales, Vec row) {
    const __m256i sum = _mm256_loadu_si256((const __m256i *)sums);
    const Vec x = {_mm256_cvtepi32_ps(offsets ? _mm256_sub_epi32(sum, _mm256_loadu_si256((const __m256i *)offsets)) : sum)};
    store(to, mul(mul(x, load(scales)), row));
}
#endif

// VECTORS of OUTPUTS by up to INT_ROWS sums lie in registers.
#ifdef TIDE_BYTES
using Input = uint8_t;
constexpr bool UNSIGNED = true;
constexpr int64_t OUTPUTS = Vec::W;
#ifdef TIDE_WIDE
constexpr int VECTORS = 2, INT_ROWS = 12;
inline Ints dot(Ints sum, Ints x, Ints w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(x.v), "v"(w.v));  // of the intrinsic GCC 12 keeps sums in memory
    return sum;
}
inline Ints weights(const int8_t *p) { return {_mm512_loadu_si512(p)}; }
inline Ints inputs(const Input *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return {_mm512_set1_epi32(four)};
}
inline Ints plus(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline void store_sums(int32_t *p, Ints a) { _mm512_storeu_si512(p, a.v); }
inline void store_inputs(Input *p, Vec x) {
    const __m512i n = _mm512_add_epi32(_mm512_cvtps_epi32(x.v), _mm512_set1_epi32(128));
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(n));
}
#else
constexpr int VECTORS = 2, INT_ROWS = 6;
#ifdef TIDE_EMULATE
#define TIDE_VEX
#else
#define TIDE_VEX "%{vex%} "
#endif
inline Ints dot(Ints sum, Ints x, Ints w) {
    __asm__(TIDE_VEX "vpdpbusd %2, %1, %0" : "+x"(sum.v) : "x"(x.v), "x"(w.v));
    return sum;
}
inline Ints weights(const int8_t *p) { return {_mm256_loadu_si256((const __m256i *)p)}; }
inline Ints inputs(const Input *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return {_mm256_set1_epi32(four)};
}
inline Ints plus(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline void store_sums(int32_t *p, Ints a) { _mm256_storeu_si256((__m256i *)p, a.v); }
inline void store_inputs(Input *p, Vec x) {
    const __m256i n = _mm256_add_epi32(_mm256_cvtps_epi32(x.v), _mm256_set1_epi32(128));
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}
#endif
#else
using Input = int16_t;
constexpr bool UNSIGNED = false;
constexpr int64_t OUTPUTS = Vec::W / 2;  // each with two sums side by side
#ifdef TIDE_WIDE
constexpr int VECTORS = 4, INT_ROWS = 5;
inline Ints dot(Ints sum, Ints x, Ints w) { return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(x.v, w.v))}; }
inline Ints weights(const int8_t *p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p))}; }
inline Ints inputs(const Input *p) {
    int64_t four;
    memcpy(&four, p, sizeof four);
    return {_mm512_set1_epi64(four)};
}
inline Ints plus(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline void store_sums(int32_t *p, Ints a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi64_epi32(_mm512_add_epi64(a.v, _mm512_srli_epi64(a.v, 32))));
}
inline void store_inputs(Input *p, Vec x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.v))); }
#else
constexpr int VECTORS = 2, INT_ROWS = 4;
inline Ints dot(Ints sum, Ints x, Ints w) { return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(x.v, w.v))}; }
inline Ints weights(const int8_t *p) { return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p))}; }
inline Ints inputs(const Input *p) {
    int64_t four;
    memcpy(&four, p, sizeof four);
    return {_mm256_set1_epi64x(four)};
}
inline Ints plus(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline void store_sums(int32_t *p, Ints a) {
    const __m256i both = _mm256_add_epi64(a.v, _mm256_srli_epi64(a.v, 32));
    const __m256i first = _mm256_permutevar8x32_epi32(both, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(first));
}
inline void store_inputs(Input *p, Vec x) {
    const __m256i n = _mm256_cvtps_epi32(x.v);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1)));
}
#endif
#endif

constexpr int64_t INT_PART = VECTORS * OUTPUTS;  // outputs of a tile
constexpr int64_t INT_AHEAD = 4096;              // bytes, as in the other kernels

struct Weights { Ints a, b, c, d; };
inline Weights part_of_four(const int8_t *w) {
    for (int64_t line = 0; line < 4 * INT_PART; line += 64) _mm_prefetch((const char *)w + INT_AHEAD + line, _MM_HINT_T1);
    if (VECTORS == 2) return {weights(w), weights(w + OUTPUTS * 4), no_ints(), no_ints()};
    return {weights(w), weights(w + OUTPUTS * 4), weights(w + OUTPUTS * 8), weights(w + OUTPUTS * 12)};
}

// The sums of R rows and one part of a panel, the last row's and those before it: GCC 12 keeps arrays of them in memory.
template <int R> struct IntSums {
    IntSums<R - 1> before;
    Ints a, b, c, d;

    void clear() {
        before.clear();
        a = b = c = d = no_ints();
    }
    void add(const Input *x, int64_t stride, const Weights &w) {
        before.add(x, stride, w);
        const Ints four = inputs(x + (R - 1) * stride);
        a = dot(a, four, w.a), b = dot(b, four, w.b);
        if (VECTORS == 4) c = dot(c, four, w.c), d = dot(d, four, w.d);
    }
    void join(const IntSums &other) {
        before.join(other.before);
        a = plus(a, other.a), b = plus(b, other.b), c = plus(c, other.c), d = plus(d, other.d);
    }
    void put(int32_t *to) const {
        before.put(to);
        to += (R - 1) * PANEL;
        store_sums(to, a), store_sums(to + OUTPUTS, b);
        if (VECTORS == 4) store_sums(to + 2 * OUTPUTS, c), store_sums(to + 3 * OUTPUTS, d);
    }
};
template <> struct IntSums<0> {
    void clear() {}
    void add(const Input *, int64_t, const Weights &) {}
    void join(const IntSums &) {}
    void put(int32_t *) const {}
};

// To c [R][PANEL]. Few rows have two sums for each output, as one would wait for itself.
template <int R> inline void int_tile(const Input *x, int64_t stride, const int8_t *w, int64_t k, int32_t *c) {
    constexpr bool TWICE = R <= INT_ROWS / 4;
    IntSums<R> sums;
    IntSums<TWICE ? R : 0> more;
    sums.clear();
    more.clear();
    for (int64_t i = 0; i < k; i += TWICE ? 8 : 4) {
        sums.add(x + i, stride, part_of_four(w + i * PANEL));
        if (TWICE) more.add(x + i + 4, stride, part_of_four(w + (i + 4) * PANEL));
    }
    if constexpr (TWICE) sums.join(more);
    sums.put(c);
}
template <int R> void int_tile_of_panel(const Input *x, int64_t stride, const int8_t *w, int64_t k, int32_t *c) {
    for (int64_t part = 0; part < PANEL; part += INT_PART) int_tile<R>(x, stride, w + 4 * part, k, c + part);
}

using IntTile = void (*)(const Input *, int64_t, const int8_t *, int64_t, int32_t *);
inline IntTile int_tile_for(int64_t rows) {
    static constexpr IntTile tiles[] = {
        int_tile_of_panel<1>, int_tile_of_panel<2>, int_tile_of_panel<3>, int_tile_of_panel<4>,
#if defined(TIDE_WIDE) || defined(TIDE_BYTES)
        int_tile_of_panel<5>,
#endif
#ifdef TIDE_BYTES
        int_tile_of_panel<6>,
#endif
#if defined(TIDE_WIDE) && defined(TIDE_BYTES)
        int_tile_of_panel<7>, int_tile_of_panel<8>, int_tile_of_panel<9>, int_tile_of_panel<10>, int_tile_of_panel<11>, int_tile_of_panel<12>,
#endif
    };
    static_assert(sizeof tiles / sizeof *tiles == INT_ROWS, "a tile for every number of rows");
    return tiles[rows - 1];
}

// For a model's type T and activations of type S.
template <class T, class S> struct IntLinear {
    // Rows of `in` to integers in `out`, their scales to `residual`. One with a value that is not finite has the scale NaN.
    static void quantize(const tm_op &op, Span rows) {
        const int64_t k = round_up(op.k, K_STEP);
        for (int64_t r = rows.first; r < rows.last; r++) {
            const S *x = (const S *)op.in + r * op.in_stride;
            Input *out = (Input *)op.out + r * op.out_stride;
            Vec high = zero(), zeros = zero();
            for (int64_t i = 0; i < k; i += Vec::W) {
                const Vec v = load(x + i);
                high = max(high, absolute(v));
                zeros = fma(v, zero(), zeros);
            }
            const float top = highest(high);
            ((float *)op.residual)[r] = has_nan(zeros) ? NAN : top / 127.f;
            const Vec factor = set(top > 1e-30f ? 127.f / top : 0.f);
            for (int64_t i = 0; i < k; i += Vec::W) store_inputs(out + i, mul(load(x + i), factor));
        }
    }

    static void run(const tm_op &op, Span rows, Span panels, float *logits, int64_t logits_stride, Best best) {
        alignas(64) int32_t sums[INT_ROWS * PANEL];
        alignas(64) float c[INT_ROWS * PANEL];
        const Epilogue<T, S> epilogue{op, logits, logits_stride, best};
        const int64_t k = round_up(op.k, K_STEP), count = rows.last - rows.first, tiles = divide_up(count, INT_ROWS);
        for (int64_t panel = panels.first; panel < panels.last; panel++) {
            const char *packed = (const char *)op.weight + panel * int8_panel_bytes(op.k);
            const float *scales = (const float *)packed;
            const int32_t *offsets = UNSIGNED ? (const int32_t *)packed + PANEL : nullptr;
            for (int64_t i = 0; i < tiles; i++) {  // of nearly equal size
                const int64_t first = rows.first + i * count / tiles, last = rows.first + (i + 1) * count / tiles;
                int_tile_for(last - first)((const Input *)op.in + first * op.in_stride, op.in_stride, (const int8_t *)packed + INT8_HEAD, k, sums);
                for (int64_t r = 0; r < last - first; r++)
                    for (int64_t j = 0; j < PANEL; j += Vec::W)
                        store_floats(c + r * PANEL + j, sums + r * PANEL + j, offsets ? offsets + j : nullptr, scales + j, set(op.scales[first + r]));
                epilogue(first, last - first, panel, c);
            }
        }
    }

    static const Integers *table() {
        static const Integers integers = {sizeof(Input), quantize, run};
        return &integers;
    }
};

const Integers *float_integers(int32_t type) {
    switch (type) {
        case TM_FLOAT32: return IntLinear<float, float>::table();
        case TM_FLOAT16: return IntLinear<f16, float>::table();
        case TM_BFLOAT16: return IntLinear<bf16, float>::table();
        default: return nullptr;
    }
}
