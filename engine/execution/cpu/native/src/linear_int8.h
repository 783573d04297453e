// Linear layers on integers of 8 bits; included behind epilogue.h and asks.h. Rows are rounded to 255 steps of their own (quantize),
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
#ifdef TIDE_EMULATE_WIDE
    return {wide::byte_products(sum.v, x.v, w.v)};
#else
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(x.v), "v"(w.v));  // of the intrinsic GCC 12 keeps sums in memory
    return sum;
#endif
}
inline Ints weights(const int8_t *p) { return {_mm512_loadu_si512(p)}; }
inline Ints inputs(const Input *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return {_mm512_set1_epi32(four)};
}
inline Ints plus(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline void add_sums(int32_t *p, Ints a, bool first) { _mm512_storeu_si512(p, first ? a.v : _mm512_add_epi32(a.v, _mm512_loadu_si512(p))); }
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
#ifdef TIDE_EMULATE_WIDE
    return {wide::byte_products(sum.v, x.v, w.v)};
#else
    __asm__(TIDE_VEX "vpdpbusd %2, %1, %0" : "+x"(sum.v) : "x"(x.v), "x"(w.v));
    return sum;
#endif
}
inline Ints weights(const int8_t *p) { return {_mm256_loadu_si256((const __m256i *)p)}; }
inline Ints inputs(const Input *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return {_mm256_set1_epi32(four)};
}
inline Ints plus(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline void add_sums(int32_t *p, Ints a, bool first) {
    _mm256_storeu_si256((__m256i *)p, first ? a.v : _mm256_add_epi32(a.v, _mm256_loadu_si256((const __m256i *)p)));
}
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
inline Ints weights(const int16_t *p) { return {_mm512_loadu_si512(p)}; }
inline void store_weights(int16_t *p, Ints a) { _mm512_storeu_si512(p, a.v); }
inline Ints inputs(const Input *p) {
    int64_t four;
    memcpy(&four, p, sizeof four);
    return {_mm512_set1_epi64(four)};
}
inline Ints plus(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline void add_sums(int32_t *p, Ints a, bool first) {
    const __m256i sum = _mm512_cvtepi64_epi32(_mm512_add_epi64(a.v, _mm512_srli_epi64(a.v, 32)));
    _mm256_storeu_si256((__m256i *)p, first ? sum : _mm256_add_epi32(sum, _mm256_loadu_si256((const __m256i *)p)));
}
inline void store_inputs(Input *p, Vec x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.v))); }
#else
constexpr int VECTORS = 2, INT_ROWS = 4;
inline Ints dot(Ints sum, Ints x, Ints w) {
    Ints products;  // GCC 12 makes the products of all rows first, and has no registers left for their sums
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum.v), "=&x"(products.v) : "x"(x.v), "x"(w.v));
    return sum;
}
inline Ints weights(const int8_t *p) { return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p))}; }
inline Ints weights(const int16_t *p) { return {_mm256_loadu_si256((const __m256i *)p)}; }
inline void store_weights(int16_t *p, Ints a) { _mm256_storeu_si256((__m256i *)p, a.v); }
inline Ints inputs(const Input *p) {
    int64_t four;
    memcpy(&four, p, sizeof four);
    return {_mm256_set1_epi64x(four)};
}
inline Ints plus(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline void add_sums(int32_t *p, Ints a, bool first) {
    const __m256i both = _mm256_add_epi64(a.v, _mm256_srli_epi64(a.v, 32));
    const __m128i sum = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(both, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6)));
    _mm_storeu_si128((__m128i *)p, first ? sum : _mm_add_epi32(sum, _mm_loadu_si128((const __m128i *)p)));
}
inline void store_inputs(Input *p, Vec x) {
    const __m256i n = _mm256_cvtps_epi32(x.v);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1)));
}
#endif
#endif

constexpr int64_t INT_PART = VECTORS * OUTPUTS;  // outputs of a tile
constexpr int64_t INT_DEPTH = 256;               // inputs of a block of a panel, which stays in the first cache: see linear.h
constexpr int64_t INT_BLOCK_ROWS = 48;           // whose sums are kept

struct Weights { Ints a, b, c, d; };
template <class W> inline Weights part_of_four(const W *w) {
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
    void put(int32_t *to, bool first) const {
        before.put(to, first);
        to += (R - 1) * PANEL;
        add_sums(to, a, first), add_sums(to + OUTPUTS, b, first);
        if (VECTORS == 4) add_sums(to + 2 * OUTPUTS, c, first), add_sums(to + 3 * OUTPUTS, d, first);
    }
};
template <> struct IntSums<0> {
    void clear() {}
    void add(const Input *, int64_t, const Weights &) {}
    void join(const IntSums &) {}
    void put(int32_t *, bool) const {}
};

// c [R][PANEL] (+)= x [R][stride] * k inputs of a panel. Few rows have two sums for each output, as one would wait for itself.
template <class W, int R> void int_tile(const Input *x, int64_t stride, const W *w, int64_t k, int32_t *c, bool first, Asks &asks) {
    constexpr bool TWICE = R <= INT_ROWS / 4;
    for (int64_t part = 0; part < PANEL; part += INT_PART) {
        IntSums<R> sums;
        IntSums<TWICE ? R : 0> more;
        sums.clear();
        more.clear();
        for (int64_t i = 0; i < k; i += STRIDE<int8_t>) {
            asks();
            for (int64_t j = i; j < i + STRIDE<int8_t>; j += TWICE ? 8 : 4) {
                sums.add(x + j, stride, part_of_four(w + j * PANEL + 4 * part));
                if (TWICE) more.add(x + j + 4, stride, part_of_four(w + (j + 4) * PANEL + 4 * part));
            }
        }
        if constexpr (TWICE) sums.join(more);
        sums.put(c + part, first);
    }
}

template <class W> using IntTile = void (*)(const Input *, int64_t, const W *, int64_t, int32_t *, bool, Asks &);
template <class W> inline IntTile<W> int_tile_for(int64_t rows) {
    static constexpr IntTile<W> tiles[] = {
        int_tile<W, 1>, int_tile<W, 2>, int_tile<W, 3>, int_tile<W, 4>,
#if defined(TIDE_WIDE) || defined(TIDE_BYTES)
        int_tile<W, 5>,
#endif
#ifdef TIDE_BYTES
        int_tile<W, 6>,
#endif
#if defined(TIDE_WIDE) && defined(TIDE_BYTES)
        int_tile<W, 7>, int_tile<W, 8>, int_tile<W, 9>, int_tile<W, 10>, int_tile<W, 11>, int_tile<W, 12>,
#endif
    };
    static_assert(sizeof tiles / sizeof *tiles == INT_ROWS, "a tile for every number of rows");
    return tiles[rows - 1];
}

// Sums of `rows` rows by tiles of nearly equal size. `block`: the weights as they are stored, in front of the next.
template <class W> inline void take_block(const Input *x, int64_t stride, int64_t rows, const W *w, int64_t k, int32_t *sums, bool first, const int8_t *block) {
    const int64_t tiles = divide_up(rows, INT_ROWS);
    Asks asks(block + k * PANEL, k * PANEL, tiles * (PANEL / INT_PART) * (k / STRIDE<int8_t>));
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t begin = i * rows / tiles, size = (i + 1) * rows / tiles - begin;
        int_tile_for<W>(size)(x + begin * stride, stride, w, k, sums + begin * PANEL, first, asks);
    }
}

// The same where words are multiplied and several tiles share them: bytes become words once.
#ifndef TIDE_BYTES
inline void take_widened(const Input *x, int64_t stride, int64_t rows, int64_t k, int32_t *sums, bool first, const int8_t *block) {
    alignas(64) int16_t words[INT_DEPTH * PANEL];
    for (int64_t i = 0; i < k * PANEL; i += OUTPUTS * 4) store_weights(words + i, weights(block + i));
    take_block(x, stride, rows, words, k, sums, first, block);
}
#endif

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
        alignas(64) int32_t sums[INT_BLOCK_ROWS * PANEL];
        alignas(64) float c[INT_BLOCK_ROWS * PANEL];
        const Epilogue<T, S> epilogue{op, logits, logits_stride, best};
        const int64_t k = round_up(op.k, K_STEP);
        for (int64_t row = rows.first; row < rows.last; row += INT_BLOCK_ROWS) {
            const int64_t count = least(INT_BLOCK_ROWS, rows.last - row);
            for (int64_t panel = panels.first; panel < panels.last; panel++) {
                const char *packed = (const char *)op.weight + panel * int8_panel_bytes(op.k);
                const float *scales = (const float *)packed;
                const int32_t *offsets = UNSIGNED ? (const int32_t *)packed + PANEL : nullptr;
                for (int64_t i = 0; i < k; i += INT_DEPTH) {
                    const Input *x = (const Input *)op.in + row * op.in_stride + i;
                    const int8_t *block = (const int8_t *)packed + INT8_HEAD + i * PANEL;
                    take(x, op.in_stride, count, least(INT_DEPTH, k - i), sums, i == 0, block);
                }
                for (int64_t r = 0; r < count; r++)
                    for (int64_t j = 0; j < PANEL; j += Vec::W)
                        store_floats(c + r * PANEL + j, sums + r * PANEL + j, offsets ? offsets + j : nullptr, scales + j, set(op.scales[row + r]));
                epilogue(row, count, panel, c);
            }
        }
    }

    static void take(const Input *x, int64_t stride, int64_t rows, int64_t k, int32_t *sums, bool first, const int8_t *block) {
#ifndef TIDE_BYTES
        if (rows > 2 * INT_ROWS) return take_widened(x, stride, rows, k, sums, first, block);
#endif
        take_block(x, stride, rows, block, k, sums, first, block);
    }
};
