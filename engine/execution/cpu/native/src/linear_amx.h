// Linear layers on bfloat16 by AMX tiles of 16 rows and 16 outputs; included behind linear_bf16.h. Rows are read in 16s:
// those behind the last one must be readable, what they hold has no part in the results.

void enter_tiles() {
    struct alignas(64) {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config{};
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    // GCC 12 declares only the first 8 bytes of the operand as read, and would drop the stores behind them.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}
void leave_tiles() { _tile_release(); }

inline void prefetch_lines(const char *p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
}

inline void sixteen_rows(const bf16 *x, int64_t stride, const bf16 *w, int64_t k, float *c) {
    const int64_t bytes = stride * 2;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t i = 0; i < k; i += 32, w += 1024) {
        prefetch_lines((const char *)w + AHEAD, 2048);
        _tile_loadd(2, x + i, bytes);
        _tile_loadd(3, w, 64);
        _tile_dpbf16ps(0, 2, 3);
        _tile_loadd(4, w + 512, 64);
        _tile_dpbf16ps(1, 2, 4);
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
}

inline void thirty_two_rows(const bf16 *x, int64_t stride, const bf16 *w, int64_t k, float *c) {
    const int64_t bytes = stride * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < k; i += 32, w += 1024) {
        _tile_loadd(4, x + i, bytes);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + 16 * stride + i, bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    _tile_stored(2, c + 16 * PANEL, 128);
    _tile_stored(3, c + 16 * PANEL + 16, 128);
}

void linear_amx(const tm_op &op, Span rows, Span panels, float *logits, int64_t logits_stride, Best best) {
    if (rows.last - rows.first == 1 && !best.as_many) return linear_bf16(op, rows, panels, logits, logits_stride, best);
    alignas(64) float c[32 * PANEL];
    const Epilogue<bf16, bf16> epilogue{op, logits, logits_stride, best};
    const int64_t k = round_up(op.k, K_STEP), tiles = divide_up(rows.last - rows.first, 32);
    for (int64_t panel = panels.first; panel < panels.last; panel++) {
        const bf16 *weight = (const bf16 *)op.weight + panel * k * PANEL;
        const int64_t piece = round_up(k * PANEL * 2 / tiles, 64);  // of the next panel, fetched beside each tile of rows
        for (int64_t row = rows.first, done = 0; row < rows.last; row += 32, done += piece) {
            const int64_t count = least(32, rows.last - row);
            const bf16 *x = (const bf16 *)op.in + row * op.in_stride;
            if (count <= 16) {
                sixteen_rows(x, op.in_stride, weight, k, c);
            } else {
                if (panel + 1 < panels.last) prefetch_lines((const char *)(weight + k * PANEL) + done, least(piece, most(0, k * PANEL * 2 - done)));
                thirty_two_rows(x, op.in_stride, weight, k, c);
            }
            epilogue(row, count, panel, c);
        }
    }
}
