// Linear layers on weights of 4 bits; included behind linear_int8.h. Each group of inputs has a scale and a zero point for each
// output; rows are rounded to 255 steps for each group of theirs. A product is the sum over groups of
//     (sum of x * w - zero * sum of x) * scale * (scale of x)
// whose parentheses are exact. Panels lie as [base: 32 float], then for each group of op.group inputs
//     [scales: 32 f16, of base][zeros: 32 int8][inputs / 8][32 outputs][4 bytes: inputs 0 .. 3 in the lower halves, 4 .. 7 in the upper]
// Weights are unsigned and rows signed: four products of bytes are one instruction with TIDE_BYTES; without, sums of two such
// products, at most 2 * 15 * 127, fit in 16 bits.

#ifdef TIDE_WIDE
inline Ints packed(const uint8_t *p) { return {_mm512_loadu_si512(p)}; }
inline Ints lower_halves(Ints w) { return {_mm512_and_si512(w.v, _mm512_set1_epi32(0x0f0f0f0f))}; }
inline Ints upper_halves(Ints w) { return lower_halves({_mm512_srli_epi32(w.v, 4)}); }
inline Ints four_inputs(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return {_mm512_set1_epi32(four)};
}
inline Vec floats_of(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints added(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
#else
inline Ints packed(const uint8_t *p) { return {_mm256_loadu_si256((const __m256i *)p)}; }
inline Ints lower_halves(Ints w) { return {_mm256_and_si256(w.v, _mm256_set1_epi32(0x0f0f0f0f))}; }
inline Ints upper_halves(Ints w) { return lower_halves({_mm256_srli_epi32(w.v, 4)}); }
inline Ints four_inputs(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return {_mm256_set1_epi32(four)};
}
inline Vec floats_of(Ints a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline Ints added(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
#endif

// HALF_ROWS: rows of a tile, whose sums lie in registers beside two vectors of packed weights and two of unpacked ones.
#ifdef TIDE_BYTES
constexpr int HALF_ROWS = Vec::W == 16 ? 12 : 4;
inline Ints half_dot(Ints sum, Ints w, Ints x) { return dot(sum, w, x); }
#elif defined(TIDE_WIDE)
constexpr int HALF_ROWS = 8;
inline Ints half_dot(Ints sum, Ints w, Ints x) {
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(_mm512_maddubs_epi16(w.v, x.v), _mm512_set1_epi16(1)))};
}
#else
constexpr int HALF_ROWS = 3;
inline Ints half_dot(Ints sum, Ints w, Ints x) {
    Ints products;  // see dot
    const __m256i ones = _mm256_set1_epi16(1);
    __asm__("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0" : "+x"(sum.v), "=&x"(products.v) : "x"(w.v), "x"(x.v), "x"(ones));
    return sum;
}
#endif

constexpr int64_t HALF_PART = 2 * Vec::W;   // outputs of a tile
constexpr int64_t HALF_DEPTH = 512;         // inputs of a block of a panel, at most, which stays in the first cache
constexpr int64_t HALF_STRIDE = 16;         // inputs between two requests for weights of the next block

// What the sums of a group are multiplied by and reduced by, for the outputs of a tile.
struct GroupFactors {
    Vec scale_a, scale_b, zero_a, zero_b;

    GroupFactors(const char *group, int64_t output) {
        const f16 *scales = (const f16 *)group + output;
        const int8_t *zeros = (const int8_t *)(group + 2 * PANEL) + output;
        scale_a = load(scales), scale_b = load(scales + Vec::W);
        zero_a = load(zeros), zero_b = load(zeros + Vec::W);
    }
};

// Scale and sum of a row's integers in a group.
struct RowGroup { float scale, sum; };

// The sums of R rows and one part of a panel: the last row's, and those before it, as in IntSums.
template <int R> struct HalfSums {
    HalfSums<R - 1> before;
    Ints a, b;

    void clear() {
        before.clear();
        a = b = no_ints();
    }
    void add(const int8_t *x, int64_t stride, Ints wa, Ints wb) {
        before.add(x, stride, wa, wb);
        const Ints four = four_inputs(x + (R - 1) * stride);
        a = half_dot(a, wa, four), b = half_dot(b, wb, four);
    }
    void join(const HalfSums &other) {
        before.join(other.before);
        a = added(a, other.a), b = added(b, other.b);
    }
    void put(float *c, const RowGroup *rows, int64_t groups, const GroupFactors &by) const {
        before.put(c, rows, groups, by);
        const RowGroup row = rows[(R - 1) * groups];
        const Vec scale = set(row.scale), sum = set(row.sum);
        c += (R - 1) * PANEL;
        store(c, fma(fnma(by.zero_a, sum, floats_of(a)), mul(by.scale_a, scale), load(c)));
        c += Vec::W;
        store(c, fma(fnma(by.zero_b, sum, floats_of(b)), mul(by.scale_b, scale), load(c)));
    }
};
template <> struct HalfSums<0> {
    void clear() {}
    void add(const int8_t *, int64_t, Ints, Ints) {}
    void join(const HalfSums &) {}
    void put(float *, const RowGroup *, int64_t, const GroupFactors &) const {}
};

// A block of a panel: `groups` groups of `group` inputs.
struct HalfBlock {
    const char *at;
    int64_t groups, group;
};

// c [R][PANEL] += x [R][stride] * a block. `rows` [R][all_groups].
template <int R> void half_tile(const int8_t *x, int64_t stride, const RowGroup *rows, int64_t all_groups, HalfBlock block, float *c, Asks &asks) {
    constexpr bool TWICE = R <= HALF_ROWS / 4;  // one sum would wait for itself
    for (int64_t g = 0; g < block.groups; g++, block.at += int4_group_bytes(block.group), x += block.group, rows++) {
        for (int64_t part = 0; part < PANEL; part += HALF_PART) {
            const uint8_t *w = (const uint8_t *)block.at + INT4_GROUP_HEAD + 4 * part;
            HalfSums<R> sums;
            HalfSums<TWICE ? R : 0> more;
            sums.clear();
            more.clear();
            for (int64_t i = 0; i < block.group; i += HALF_STRIDE) {
                asks();
                for (int64_t j = i; j < i + HALF_STRIDE; j += 8, w += 4 * PANEL) {
                    const Ints a = packed(w), b = packed(w + 4 * Vec::W);
                    sums.add(x + j, stride, lower_halves(a), lower_halves(b));
                    if constexpr (TWICE) more.add(x + j + 4, stride, upper_halves(a), upper_halves(b));
                    else sums.add(x + j + 4, stride, upper_halves(a), upper_halves(b));
                }
            }
            if constexpr (TWICE) sums.join(more);
            sums.put(c + part, rows, all_groups, GroupFactors(block.at, part));
        }
    }
}

using HalfTile = void (*)(const int8_t *, int64_t, const RowGroup *, int64_t, HalfBlock, float *, Asks &);
inline HalfTile half_tile_for(int64_t rows) {
    static constexpr HalfTile tiles[] = {
        half_tile<1>, half_tile<2>, half_tile<3>,
#if defined(TIDE_WIDE) || defined(TIDE_BYTES)
        half_tile<4>,
#endif
#ifdef TIDE_WIDE
        half_tile<5>, half_tile<6>, half_tile<7>, half_tile<8>,
#ifdef TIDE_BYTES
        half_tile<9>, half_tile<10>, half_tile<11>, half_tile<12>,
#endif
#endif
    };
    static_assert(sizeof tiles / sizeof *tiles == HALF_ROWS, "a tile for every number of rows");
    return tiles[rows - 1];
}

// For a model's type T and activations of type S.
template <class T, class S> struct HalfLinear {
    // Rows of `in` to integers in `out`, their scales and sums by groups to `residual`. A group with a value that is not
    // finite has the scale NaN.
    static void quantize(const tm_op &op, Span rows) {
        const int64_t groups = op.k / op.group;
        for (int64_t r = rows.first; r < rows.last; r++)
            for (int64_t g = 0; g < groups; g++) {
                const S *x = (const S *)op.in + r * op.in_stride + g * op.group;
                int8_t *out = (int8_t *)op.out + r * op.out_stride + g * op.group;
                Vec high = zero(), zeros = zero(), total = zero();
                for (int64_t i = 0; i < op.group; i += Vec::W) {
                    const Vec v = load(x + i);
                    high = max(high, absolute(v));
                    zeros = fma(v, zero(), zeros);
                }
                const float top = highest(high);
                const Vec factor = set(top > 1e-30f ? 127.f / top : 0.f);
                for (int64_t i = 0; i < op.group; i += Vec::W) {
                    const Vec v = nearest(mul(load(x + i), factor));
                    store(out + i, v);
                    total = add(total, v);
                }
                ((RowGroup *)op.residual)[r * groups + g] = {has_nan(zeros) ? NAN : top / 127.f, sum(total)};
            }
    }

    static void run(const tm_op &op, Span rows, Span panels, float *logits, int64_t logits_stride, Best best) {
        alignas(64) float c[INT_BLOCK_ROWS * PANEL];
        const Epilogue<T, S> epilogue{op, logits, logits_stride, best};
        const int64_t groups = op.k / op.group, depth = HALF_DEPTH / op.group, bytes = int4_group_bytes(op.group);
        for (int64_t row = rows.first; row < rows.last; row += INT_BLOCK_ROWS) {
            const int64_t count = least(INT_BLOCK_ROWS, rows.last - row), tiles = divide_up(count, HALF_ROWS);
            for (int64_t panel = panels.first; panel < panels.last; panel++) {
                const char *whole = (const char *)op.weight + panel * int4_panel_bytes(op.k, op.group);
                for (int64_t i = 0; i < count * PANEL; i += Vec::W) store(c + i, zero());
                for (int64_t g = 0; g < groups; g += depth) {
                    const HalfBlock block{whole + INT4_HEAD + g * bytes, least(depth, groups - g), op.group};
                    const int64_t size = block.groups * bytes, requests = block.groups * op.group / HALF_STRIDE * (PANEL / HALF_PART);
                    Asks asks(block.at + size, size, tiles * requests);
                    for (int64_t i = 0; i < tiles; i++) {
                        const int64_t first = i * count / tiles, some = (i + 1) * count / tiles - first;
                        const int8_t *x = (const int8_t *)op.in + (row + first) * op.in_stride + g * op.group;
                        const RowGroup *by = (const RowGroup *)op.scales + (row + first) * groups + g;
                        half_tile_for(some)(x, op.in_stride, by, groups, block, c + first * PANEL, asks);
                    }
                }
                for (int64_t i = 0; i < count * PANEL; i += Vec::W) store(c + i, mul(load(c + i), load((const float *)whole + i % PANEL)));
                epilogue(row, count, panel, c);
            }
        }
    }
};

// By bits: 8, then 4.
template <class T, class S> const Integers *integers_table() {
    static const Integers integers[] = {{sizeof(Input), IntLinear<T, S>::quantize, IntLinear<T, S>::run},
                                        {sizeof(int8_t), HalfLinear<T, S>::quantize, HalfLinear<T, S>::run}};
    return integers;
}

const Integers *float_integers(int32_t type) {
    switch (type) {
        case TM_FLOAT32: return integers_table<float, float>();
        case TM_FLOAT16: return integers_table<f16, float>();
        case TM_BFLOAT16: return integers_table<bf16, float>();
        default: return nullptr;
    }
}
