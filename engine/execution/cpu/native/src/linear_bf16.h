// Linear layers on bfloat16 by AVX512-BF16: pairs of inputs times pairs of weights; included behind epilogue.h.

constexpr int TILE = 12;
constexpr int64_t AHEAD = 4096;  // bytes, so that the next page is on its way: the hardware stops at its border

inline __m512bh pair_of(const bf16 *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}
inline __m512bh line_of(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }

// c [R][PANEL] = a [R][lda] * a panel. Few rows have two sums for each output, as one would wait for itself.
template <int R> void tile_of_panel(const bf16 *a, int64_t lda, const bf16 *w, int64_t k, float *c) {
    constexpr int SUMS = R <= 3 ? 2 : 1;
    __m512 sums[SUMS][R][2];
    for (int s = 0; s < SUMS; s++)
        for (int r = 0; r < R; r++) sums[s][r][0] = sums[s][r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += 32, w += 1024)
        for (int j = 0; j < 16; j += SUMS)
            for (int s = 0; s < SUMS; s++) {
                const bf16 *at = w + (j + s) * 32;
                _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T1);
                _mm_prefetch((const char *)(at + 512) + AHEAD, _MM_HINT_T1);
                const __m512bh w0 = line_of(at), w1 = line_of(at + 512);
                for (int r = 0; r < R; r++) {
                    const __m512bh x = pair_of(a + r * lda + i + 2 * (j + s));
                    sums[s][r][0] = _mm512_dpbf16_ps(sums[s][r][0], x, w0);
                    sums[s][r][1] = _mm512_dpbf16_ps(sums[s][r][1], x, w1);
                }
            }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 2; i++) {
            __m512 sum = sums[0][r][i];
            for (int s = 1; s < SUMS; s++) sum = _mm512_add_ps(sum, sums[s][r][i]);
            _mm512_storeu_ps(c + r * PANEL + i * 16, sum);
        }
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
