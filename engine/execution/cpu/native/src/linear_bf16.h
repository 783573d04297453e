// Linear layers on bfloat16 by AVX512-BF16: pairs of inputs times pairs of weights; included behind epilogue.h.

constexpr int TILE = 12;
constexpr int64_t AHEAD = 4096;  // bytes, so that the next page is on its way: the hardware stops at its border

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
    void put(float *c) const {
        before.put(c);
        _mm512_storeu_ps(c + (R - 1) * PANEL, first);
        _mm512_storeu_ps(c + (R - 1) * PANEL + 16, second);
    }
};
template <> struct Sums<0> {
    void clear() {}
    void add(const bf16 *, int64_t, __m512bh, __m512bh) {}
    void join(const Sums &) {}
    void put(float *) const {}
};

template <int R> inline void add_pair(Sums<R> &sums, const bf16 *a, int64_t lda, const bf16 *w) {
    _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T1);
    _mm_prefetch((const char *)(w + 512) + AHEAD, _MM_HINT_T1);
    sums.add(a, lda, line_of(w), line_of(w + 512));
}

// c [R][PANEL] = a [R][lda] * a panel. Few rows have two sums for each output, as one would wait for itself.
template <int R> void tile_of_panel(const bf16 *a, int64_t lda, const bf16 *w, int64_t k, float *c) {
    constexpr bool TWICE = R <= 3;
    Sums<R> sums;
    Sums<TWICE ? R : 0> more;
    sums.clear();
    more.clear();
    for (int64_t i = 0; i < k; i += 32, w += 1024)
        for (int j = 0; j < 16; j += TWICE ? 2 : 1) {
            add_pair(sums, a + i + 2 * j, lda, w + j * 32);
            if constexpr (TWICE) add_pair(more, a + i + 2 * j + 2, lda, w + (j + 1) * 32);
        }
    if constexpr (TWICE) sums.join(more);
    sums.put(c);
}

using Tile = void (*)(const bf16 *, int64_t, const bf16 *, int64_t, float *);
inline Tile tile_for(int64_t rows) {
    static constexpr Tile tiles[] = {
        tile_of_panel<1>, tile_of_panel<2>, tile_of_panel<3>, tile_of_panel<4>, tile_of_panel<5>, tile_of_panel<6>,
        tile_of_panel<7>, tile_of_panel<8>, tile_of_panel<9>, tile_of_panel<10>, tile_of_panel<11>, tile_of_panel<12>,
    };
    return tiles[rows - 1];
}

void linear_bf16(const tm_op &op, Span rows, Span panels, float *logits, int64_t logits_stride, Best best) {
    alignas(64) float c[TILE * PANEL];
    const Epilogue<bf16, bf16> epilogue{op, logits, logits_stride, best};
    const int64_t k = round_up(op.k, K_STEP), count = rows.last - rows.first, tiles = divide_up(count, TILE);
    for (int64_t panel = panels.first; panel < panels.last; panel++) {
        const bf16 *weight = (const bf16 *)op.weight + panel * k * PANEL;
        for (int64_t i = 0; i < tiles; i++) {  // of nearly equal size
            const int64_t first = rows.first + i * count / tiles, last = rows.first + (i + 1) * count / tiles;
            tile_for(last - first)((const bf16 *)op.in + first * op.in_stride, op.in_stride, weight, k, c);
            epilogue(first, last - first, panel, c);
        }
    }
}
