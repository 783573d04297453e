// Linear layers on bfloat16 by AVX512-BF16: pairs of inputs times pairs of weights; included behind epilogue.h.

constexpr int TILE = 12;

// Weights come from memory while sums are made only if they are asked for early enough. A tile that has its panel for
// itself asks for what it needs next (one row waits for memory anyhow, and only has to cross the borders of pages, where
// the hardware stops); where several tiles share a panel, the first two ask for half of the next panel each.
enum class Asks { NOTHING, NEAR, FAR, HALF_A_PANEL };
constexpr int64_t AHEAD = 4096, SOON = 1024, LATER = 16384;  // bytes; AHEAD: the next page

template <Asks A> inline void ask(const bf16 *w, const char *&next) {
    if (A == Asks::HALF_A_PANEL) {
        _mm_prefetch(next, _MM_HINT_T1);
        next += 64;
    }
    for (const bf16 *line = w; line <= w + 512; line += 512) {
        if (A == Asks::NEAR) _mm_prefetch((const char *)line + AHEAD, _MM_HINT_T1);
        if (A == Asks::FAR) {
            _mm_prefetch((const char *)line + SOON, _MM_HINT_T0);
            _mm_prefetch((const char *)line + LATER, _MM_HINT_T1);
        }
    }
}

inline __m512bh pair_of(const bf16 *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}
inline __m512bh line_of(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }

// The sums of R rows and the 32 outputs of a panel, the last row's and those before it: arrays of them, numbered by loops
// within loops, GCC 12 keeps in memory.
template <int R> struct Sums {
    Sums<R - 1> before;
    __m512 first, second;

    void clear() {
        before.clear();
        first = second = _mm512_setzero_ps();
    }
    void add(const bf16 *a, int64_t lda, __m512bh w0, __m512bh w1) {
        before.add(a, lda, w0, w1);
        const __m512bh x = pair_of(a + (R - 1) * lda);
        first = _mm512_dpbf16_ps(first, x, w0);
        second = _mm512_dpbf16_ps(second, x, w1);
    }
    void join(const Sums &other) {
        before.join(other.before);
        first = _mm512_add_ps(first, other.first);
        second = _mm512_add_ps(second, other.second);
    }
    void put(float *c, int64_t ldc) const {
        before.put(c, ldc);
        _mm512_storeu_ps(c + (R - 1) * ldc, first);
        _mm512_storeu_ps(c + (R - 1) * ldc + 16, second);
    }
    void take(const float *c, int64_t ldc) {
        before.take(c, ldc);
        first = _mm512_loadu_ps(c + (R - 1) * ldc);
        second = _mm512_loadu_ps(c + (R - 1) * ldc + 16);
    }
    void scale(__m512 by) {
        before.scale(by);
        first = _mm512_mul_ps(first, by);
        second = _mm512_mul_ps(second, by);
    }
};
template <> struct Sums<0> {
    void clear() {}
    void add(const bf16 *, int64_t, __m512bh, __m512bh) {}
    void join(const Sums &) {}
    void put(float *, int64_t) const {}
    void take(const float *, int64_t) {}
    void scale(__m512) {}
};

// c [R][PANEL] = a [R][lda] * a panel. Few rows have two sums for each output, as one would wait for itself.
template <int R, Asks A, bool TWICE = R <= 3> void tile_of_panel(const bf16 *a, int64_t lda, const bf16 *w, int64_t k, float *c, const char *next) {
    Sums<R> sums;
    Sums<TWICE ? R : 0> more;
    sums.clear();
    more.clear();
    for (int64_t i = 0; i < k; i += 32, w += 1024)
        for (int j = 0; j < 16; j += TWICE ? 2 : 1) {
            ask<A>(w + j * 32, next);
            sums.add(a + i + 2 * j, lda, line_of(w + j * 32), line_of(w + j * 32 + 512));
            if constexpr (TWICE) {
                ask<A>(w + (j + 1) * 32, next);
                more.add(a + i + 2 * j + 2, lda, line_of(w + (j + 1) * 32), line_of(w + (j + 1) * 32 + 512));
            }
        }
    if constexpr (TWICE) sums.join(more);
    sums.put(c, PANEL);
}

using Tile = void (*)(const bf16 *, int64_t, const bf16 *, int64_t, float *, const char *);
template <Asks A> inline Tile tile_for(int64_t rows) {
    static constexpr Tile tiles[] = {
        tile_of_panel<1, A>, tile_of_panel<2, A>, tile_of_panel<3, A>, tile_of_panel<4, A>, tile_of_panel<5, A>, tile_of_panel<6, A>,
        tile_of_panel<7, A>, tile_of_panel<8, A>, tile_of_panel<9, A>, tile_of_panel<10, A>, tile_of_panel<11, A>, tile_of_panel<12, A>,
    };
    return tiles[rows - 1];
}
inline Tile tile_for(int64_t rows, int64_t tile, int64_t tiles, bool as_many) {
    static constexpr Tile few[] = {tile_of_panel<1, Asks::NEAR, false>, tile_of_panel<2, Asks::NEAR, false>, tile_of_panel<3, Asks::NEAR, false>};
    if (as_many && rows <= 3) return few[rows - 1];
    if (tiles == 1) return rows <= 3 ? tile_for<Asks::NEAR>(rows) : tile_for<Asks::FAR>(rows);
    return tile < 2 ? tile_for<Asks::HALF_A_PANEL>(rows) : tile_for<Asks::NOTHING>(rows);
}

void linear_bf16(const tm_op &op, Span rows, Span panels, float *logits, int64_t logits_stride, Best best) {
    alignas(64) float c[TILE * PANEL];
    const Epilogue<bf16, bf16> epilogue{op, logits, logits_stride, best};
    const int64_t k = round_up(op.k, K_STEP), count = rows.last - rows.first, tiles = divide_up(count, TILE);
    for (int64_t panel = panels.first; panel < panels.last; panel++) {
        const bf16 *weight = (const bf16 *)op.weight + panel * k * PANEL;
        for (int64_t i = 0; i < tiles; i++) {  // of nearly equal size
            const int64_t first = rows.first + i * count / tiles, last = rows.first + (i + 1) * count / tiles;
            const bf16 *next = weight + k * PANEL + i * k * PANEL / 2, *a = (const bf16 *)op.in + first * op.in_stride;
            tile_for(last - first, i, tiles, best.as_many)(a, op.in_stride, weight, k, c, (const char *)next);
            epilogue(first, last - first, panel, c);
        }
    }
}
