// Linear layers on float activations by broadcast and fused multiply-add; included behind epilogue.h.
//
// A tile is up to TILE rows by two vectors of outputs, held in registers; a panel is 32 / (2 W) tiles wide. Weights are
// widened on the way: a tile of many rows pays for that once.

#ifdef TIDE_WIDE
constexpr int TILE = 12;  // 24 sums, 2 weights, 1 activation of 32 registers
#else
constexpr int TILE = 6;  // 12 sums, 2 weights, 1 activation of 16 registers
#endif
constexpr int64_t PART = 2 * Vec::W;  // outputs of a tile

inline void prefetch_far(const void *p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)p + i, _MM_HINT_T1);
}
constexpr int64_t AHEAD = 4096;  // bytes, so that the next page is on its way: the hardware stops at its border

// Sums of R rows: a [R][lda], `w` the weights of the tile's outputs, PANEL apart for successive inputs.
template <class T, int R> inline void tile(const float *a, int64_t lda, const T *w, int64_t k, Vec (&c)[R][2]) {
    for (int r = 0; r < R; r++) c[r][0] = c[r][1] = zero();
    for (int64_t i = 0; i < k; i += 4) {
        prefetch_far((const char *)(w + i * PANEL) + AHEAD, 4 * PART * int64_t(sizeof(T)));
        for (int64_t j = i; j < i + 4; j++) {
            const Vec w0 = load(w + j * PANEL), w1 = load(w + j * PANEL + Vec::W);
            for (int r = 0; r < R; r++) {
                const Vec x = set(a[r * lda + j]);
                c[r][0] = fma(x, w0, c[r][0]);
                c[r][1] = fma(x, w1, c[r][1]);
            }
        }
    }
}

// bfloat16: 32 inputs of 16 outputs in 16 pairs, those of the other 16 outputs behind them.
template <int R> inline void tile(const float *a, int64_t lda, const bf16 *w, int64_t k, Vec (&c)[R][2]) {
    constexpr int64_t SECOND = Vec::W == 16 ? 512 : 16;  // from the first vector of outputs to the second
    for (int r = 0; r < R; r++) c[r][0] = c[r][1] = zero();
    for (int64_t i = 0; i < k; i += 32, w += 1024) {
        for (int64_t j = 0; j < 16; j++) {
            _mm_prefetch((const char *)(w + j * 32) + AHEAD, _MM_HINT_T1);
            if (SECOND == 512) _mm_prefetch((const char *)(w + 512 + j * 32) + AHEAD, _MM_HINT_T1);
            Vec even[2], odd[2];
            load_pairs(w + j * 32, even[0], odd[0]);
            load_pairs(w + j * 32 + SECOND, even[1], odd[1]);
            for (int r = 0; r < R; r++) {
                const Vec x = set(a[r * lda + i + 2 * j]);
                c[r][0] = fma(x, even[0], c[r][0]);
                c[r][1] = fma(x, even[1], c[r][1]);
            }
            for (int r = 0; r < R; r++) {
                const Vec y = set(a[r * lda + i + 2 * j + 1]);
                c[r][0] = fma(y, odd[0], c[r][0]);
                c[r][1] = fma(y, odd[1], c[r][1]);
            }
        }
    }
}

template <class T> inline const T *part_of_panel(const T *panel, int64_t part) { return panel + part * PART; }
inline const bf16 *part_of_panel(const bf16 *panel, int64_t part) { return panel + part * (PART == PANEL ? 0 : 512); }

template <class T, int R> inline void tile_of_panel(const float *a, int64_t lda, const T *panel, int64_t k, float *c) {
    for (int64_t part = 0; part < PANEL / PART; part++) {
        Vec sums[R][2];
        tile(a, lda, part_of_panel(panel, part), k, sums);
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) store(c + r * PANEL + part * PART + i * Vec::W, sums[r][i]);
    }
}

template <class T> struct Linear {
    using Tile = void (*)(const float *, int64_t, const T *, int64_t, float *);

    static Tile for_rows(int64_t rows) {
        static constexpr Tile tiles[] = {
            tile_of_panel<T, 1>, tile_of_panel<T, 2>, tile_of_panel<T, 3>, tile_of_panel<T, 4>, tile_of_panel<T, 5>, tile_of_panel<T, 6>,
#ifdef TIDE_WIDE
            tile_of_panel<T, 7>, tile_of_panel<T, 8>, tile_of_panel<T, 9>, tile_of_panel<T, 10>, tile_of_panel<T, 11>, tile_of_panel<T, 12>,
#endif
        };
        return tiles[rows - 1];
    }

    static void run(const tm_op &op, Span rows, Span panels, float *logits, int64_t logits_stride, Best best) {
        alignas(64) float c[TILE * PANEL];
        const Epilogue<T, float> epilogue{op, logits, logits_stride, best};
        const int64_t k = round_up(op.k, K_STEP), count = rows.last - rows.first;
        const int64_t tiles = divide_up(count, TILE);
        for (int64_t panel = panels.first; panel < panels.last; panel++) {
            const T *weight = (const T *)op.weight + panel * k * PANEL;
            for (int64_t i = 0; i < tiles; i++) {  // of nearly equal size
                const int64_t first = rows.first + i * count / tiles, last = rows.first + (i + 1) * count / tiles;
                const float *a = (const float *)op.in + first * op.in_stride;
                for_rows(last - first)(a, op.in_stride, weight, k, c);
                epilogue(first, last - first, panel, c);
            }
        }
    }
};
