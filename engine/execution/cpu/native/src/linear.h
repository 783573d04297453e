// Linear layers on float activations by broadcast and fused multiply-add; included behind epilogue.h and asks.h.
//
// A panel's weights are taken some inputs at a time: such a block stays in the first cache while all rows take it, tile by
// tile, and their sums wait in memory for the next. Where many rows share it, its weights are widened once.

#ifdef TIDE_WIDE
constexpr int TILE = 12;  // rows of a tile: 24 sums, 2 weights, 1 activation of 32 registers
#else
constexpr int TILE = 6;  // 12 sums, 2 weights, 1 activation of 16 registers
#endif
constexpr int64_t ROWS = 48;   // whose sums are kept
constexpr int64_t DEPTH = 64;  // inputs of a block: 8 KiB of weights in float
constexpr int64_t FEW = 24;    // rows, beyond which sums cost more than a block that is larger:
constexpr int64_t DEEP = 96;

// Sums of a tile, [R][V] vectors of the outputs from `c` on.
template <int R, int V> struct Sums {
    Vec v[R][V];

    Sums(const float *c, bool first) {
        for (int r = 0; r < R; r++)
            for (int i = 0; i < V; i++) v[r][i] = first ? zero() : load(c + r * PANEL + i * Vec::W);
    }
    void put(float *c) const {
        for (int r = 0; r < R; r++)
            for (int i = 0; i < V; i++) store(c + r * PANEL + i * Vec::W, v[r][i]);
    }
    // Adds one input: a [R], lda apart, times its weights.
    void add(const float *a, int64_t lda, const Vec (&w)[V]) {
        for (int r = 0; r < R; r++) {
            const Vec x = set(a[r * lda]);
            for (int i = 0; i < V; i++) v[r][i] = fma(x, w[i], v[r][i]);
        }
    }
};

// bfloat16 lies in panels as pairs: 32 inputs of 16 outputs, and those of the other 16 outputs behind them.
constexpr int64_t OTHER = 512;
template <class T> constexpr bool IN_PAIRS = false;
template <> constexpr bool IN_PAIRS<bf16> = true;
inline void load_pairs(const bf16 *w, int64_t output, Vec &even, Vec &odd) {
    load_pairs(w + output / 16 * OTHER + output % 16 * 2, even, odd);
}

// How many vectors of outputs a tile of R rows has: all of the panel if the sums of few rows leave room for it.
template <class T> constexpr int vectors(int rows) {
    return PANEL / Vec::W == 2 || rows > (IN_PAIRS<T> ? 1 : 3) ? 2 : 4;
}

// c [R][PANEL] (+)= a [R][lda] * k inputs of a panel.
template <class T, int R> void tile(const float *a, int64_t lda, const T *w, int64_t k, float *c, bool first, Asks &asks) {
    constexpr int V = vectors<T>(R);
    for (int64_t part = 0; part < PANEL; part += V * Vec::W) {
        Sums<R, V> sums(c + part, first);
        for (int64_t i = 0; i < k; i += STRIDE<T>) {
            asks();
            if constexpr (IN_PAIRS<T>) {
                const bf16 *at = w + i / 32 * (2 * OTHER) + i % 32 * 16;
#pragma GCC unroll 8
                for (int64_t j = 0; j < STRIDE<T>; j += 2) {
                    Vec even[V], odd[V];
                    for (int n = 0; n < V; n++) load_pairs(at + j * 16, part + n * Vec::W, even[n], odd[n]);
                    sums.add(a + i + j, lda, even);
                    sums.add(a + i + j + 1, lda, odd);
                }
            } else {
#pragma GCC unroll 8
                for (int64_t j = 0; j < STRIDE<T>; j++) {  // a constant count, or the loop is not unrolled
                    Vec x[V];
                    for (int n = 0; n < V; n++) x[n] = load(w + (i + j) * PANEL + part + n * Vec::W);
                    sums.add(a + i + j, lda, x);
                }
            }
        }
        sums.put(c + part);
    }
}

// `k` inputs of a panel as floats, [k][PANEL].
template <class T> void widen(const T *w, int64_t k, float *to) {
    for (int64_t i = 0; i < k; i += IN_PAIRS<T> ? 2 : 1)
        for (int64_t n = 0; n < PANEL; n += Vec::W) {
            if constexpr (IN_PAIRS<T>) {
                Vec even, odd;
                load_pairs(w + i / 32 * (2 * OTHER) + i % 32 * 16, n, even, odd);
                store(to + i * PANEL + n, even);
                store(to + (i + 1) * PANEL + n, odd);
            } else {
                store(to + i * PANEL + n, load(w + i * PANEL + n));
            }
        }
}

template <class T> struct Linear {
    template <class S> using Tile = void (*)(const float *, int64_t, const S *, int64_t, float *, bool, Asks &);

    // bfloat16 in pairs needs a register more for each vector, and gets smaller tiles where there are few.
    static constexpr int64_t FUSED = sizeof(T) == 2 && Vec::W == 8 ? 4 : TILE;
    static constexpr int64_t MOST_FUSED = sizeof(T) == 4 ? ROWS : 4 * FUSED;  // rows, beyond which weights are widened

    template <class S> static Tile<S> for_rows(int64_t rows) {
        static constexpr Tile<S> tiles[] = {
            tile<S, 1>, tile<S, 2>, tile<S, 3>, tile<S, 4>, tile<S, 5>, tile<S, 6>,
#ifdef TIDE_WIDE
            tile<S, 7>, tile<S, 8>, tile<S, 9>, tile<S, 10>, tile<S, 11>, tile<S, 12>,
#endif
        };
        return tiles[rows - 1];
    }

    // Tiles of nearly equal size, of at most `most` rows. `block`: the weights as they are stored.
    template <class S> static void take(const float *a, int64_t lda, int64_t rows, int64_t most, const S *w, int64_t k, float *c, bool first, const T *block) {
        const int64_t tiles = divide_up(rows, most), parts = PANEL / Vec::W / vectors<S>(int(divide_up(rows, tiles)));
        // For one row a panel that lies in order is a stream, which the processor fetches ahead by itself; asking beside it
        // costs a tenth. (Measured where a vector has 8 lanes.)
        const bool stream = Vec::W == 8 && !IN_PAIRS<T> && rows == 1;
        const int64_t bytes = stream ? 0 : k * PANEL * int64_t(sizeof(T));
        Asks asks(block + k * PANEL, bytes, tiles * parts * (k / STRIDE<S>));
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t begin = i * rows / tiles, size = (i + 1) * rows / tiles - begin;
            for_rows<S>(size)(a + begin * lda, lda, w, k, c + begin * PANEL, first, asks);
        }
    }

    static void run(const tm_op &op, Span rows, Span panels, float *logits, int64_t logits_stride, Best best) {
        alignas(64) float c[ROWS * PANEL], wide[sizeof(T) == 4 ? 1 : DEEP * PANEL];
        const Epilogue<T, float> epilogue{op, logits, logits_stride, best};
        const int64_t k = round_up(op.k, K_STEP);
        for (int64_t row = rows.first; row < rows.last; row += ROWS) {
            const int64_t count = least(ROWS, rows.last - row), most_depth = count > FEW ? DEEP : DEPTH;
            for (int64_t panel = panels.first; panel < panels.last; panel++) {
                for (int64_t i = 0; i < k; i += most_depth) {
                    const float *a = (const float *)op.in + row * op.in_stride + i;
                    const T *block = (const T *)op.weight + (panel * k + i) * PANEL;
                    const int64_t depth = least(most_depth, k - i);
                    if (count <= MOST_FUSED) {
                        take(a, op.in_stride, count, FUSED, block, depth, c, i == 0, block);
                    } else {
                        widen(block, depth, wide);
                        take(a, op.in_stride, count, TILE, wide, depth, c, i == 0, block);
                    }
                }
                epilogue(row, count, panel, c);
            }
        }
    }
};
