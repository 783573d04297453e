// Tiles of queries by AMX; included behind attention.h and linear_amx.h.
//
// S^T = K Q^T needs no packing of K, and its exponentials, in pairs of keys, are the right operand of O^T = V^T P^T. A
// column is one query and head, 32 at a time; V is turned once for all of them.

// Keys of 8 bits are made bfloat16 first, those of a round of keys at once.

template <class C> struct AmxAttention {
    using Plain = Attention<bf16, bf16, C>;
    static constexpr bool SCALED = Cells<C>::SCALED;
    static constexpr int64_t COLUMNS = 32, KEYS = TILE_KEYS;
    static constexpr float LOWEST = -3e38f;  // a maximum of nothing: a column may see none of its first keys

    // What is known of 32 columns so far. `out` [value_dim][32] lies behind it.
    struct Columns {
        float score[KEYS][COLUMNS], top[COLUMNS], total[COLUMNS], first_key[COLUMNS], last_key[COLUMNS];
        uint32_t share[2][KEYS / 32][16][16];
    };

    static bool fits(const tm_shape &s) { return s.head_dim % 32 == 0 && s.value_dim % 32 == 0 && s.block_size % 16 == 0; }
    static int64_t bytes_of_columns(const tm_shape &s) { return int64_t(sizeof(Columns)) + s.value_dim * COLUMNS * 4 + 2 * s.head_dim / 32 * 1024; }

    struct Room {  // of the group of columns `index`
        Columns *columns;
        float *out;
        uint32_t *query;  // [2][head_dim / 32][16 pairs][16 columns]

        Room(char *scratch, int64_t index, const tm_shape &s) {
            char *at = scratch + index * bytes_of_columns(s);
            columns = (Columns *)at;
            out = (float *)(at + sizeof(Columns));
            query = (uint32_t *)(at + sizeof(Columns)) + s.value_dim * COLUMNS;
        }
    };

    static void begin(const View &view, const tm_op &op, const Piece &piece, int64_t first_column, const Room &room) {
        const tm_shape &s = *view.shape;
        const Chunk &chunk = view.chunks[piece.chunk];
        const int64_t dim = s.head_dim, group = s.heads / s.kv_heads, count = piece.queries * group;
        const bf16 *from[COLUMNS];
        for (int64_t c = 0; c < COLUMNS; c++) {
            const int64_t column = least(first_column + c, count - 1), query = piece.query + column / group;
            const int64_t head = piece.kv_head * group + column % group;
            from[c] = (const bf16 *)op.in + (chunk.first + query) * op.in_stride + head * dim;
            room.columns->first_key[c] = float(first_seen(op, chunk.start + query));
            room.columns->last_key[c] = float(chunk.start + query);
            room.columns->top[c] = LOWEST, room.columns->total[c] = 0;
        }
        for (int64_t h = 0; h < 2; h++)
            for (int64_t d = 0; d < dim / 32; d++) {
                __m512i r[16];
                for (int64_t c = 0; c < 16; c++) r[c] = _mm512_loadu_si512(from[h * 16 + c] + d * 32);
                transpose(r);
                for (int64_t j = 0; j < 16; j++) _mm512_storeu_si512(room.query + ((h * dim / 32 + d) * 16 + j) * 16, r[j]);
            }
        memset(room.out, 0, size_t(s.value_dim * COLUMNS) * sizeof(float));
    }

    // Keys [key, key + keys) of one head, to [KEYS][dim]; behind the end any, as they are masked.
    static void widen_keys(const View &view, const tm_op &op, const Piece &piece, int64_t key, int64_t keys, int64_t end, bf16 *to) {
        const Cells<C> pool(view);
        const int64_t *table = view.chunks[piece.chunk].k_table, dim = pool.dim;
        for (int64_t i = 0; i < keys; i++) {
            const int64_t token = least(key + i, end - 1);
            const C *from = pool.values(table, op.layer, token) + piece.kv_head * dim;
            const Vec scale = set(pool.scale(table, op.layer, token, piece.kv_head));
            for (int64_t d = 0; d < dim; d += Vec::W) store(to + i * dim + d, mul(load(from + d), scale));
        }
    }

    // `widened`: the keys, if they are of 8 bits.
    static void score(const View &view, const tm_op &op, const Piece &piece, int64_t key, int64_t keys, int64_t end, const Room &room, const bf16 *widened) {
        const tm_shape &s = *view.shape;
        const Chunk &chunk = view.chunks[piece.chunk];
        const Cells<C> pool(view);
        const int64_t dim = s.head_dim, cell = (SCALED ? dim : s.cell) * 2;
        for (int64_t i = 0; i < keys; i += 32) {
            const bf16 *k[2];
            for (int64_t j = 0; j < 2; j++)  // behind the end: any block, as it is masked
                if (SCALED) k[j] = widened + (i + 16 * j) * dim;
                else k[j] = (const bf16 *)pool.values(chunk.k_table, op.layer, least(key + i + 16 * j, (end - 1) / 16 * 16)) + piece.kv_head * dim;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t d = 0; d < dim / 32; d++) {
                _tile_loadd(4, k[0] + d * 32, cell);
                _tile_loadd(6, room.query + d * 256, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, room.query + (dim / 32 + d) * 256, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, k[1] + d * 32, cell);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            float(*to)[COLUMNS] = room.columns->score + i;
            _tile_stored(0, &to[0][0], 128);
            _tile_stored(1, &to[0][16], 128);
            _tile_stored(2, &to[16][0], 128);
            _tile_stored(3, &to[16][16], 128);
        }
    }

    // Scores of 16 columns become shares; what they have gathered shrinks to the new maximum.
    static void weigh(const tm_op &op, Columns &c, int64_t half, int64_t key, int64_t keys, int64_t begin, int64_t first, int64_t end, Vec scale, float *out, int64_t dim) {
        const int64_t at = half * 16;
        const Vec earliest = load(c.first_key + at), last = load(c.last_key + at), before = load(c.top + at);
        for (int64_t i = 0; op.softcap > 0 && i < keys; i++) store(&c.score[i][at], capped(mul(load(&c.score[i][at]), scale), op.softcap));
        if (op.softcap > 0) scale = set(1.f);
        for (int64_t i = 0; i < least(keys, first_seen(op, end - 1) - key); i++)
            _mm512_mask_storeu_ps(&c.score[i][at], _mm512_cmp_ps_mask(_mm512_set1_ps(float(key + i)), earliest.v, _CMP_LT_OQ), _mm512_set1_ps(-INFINITY));
        for (int64_t i = most(first + 1 - key, 0); i < keys; i++)
            _mm512_mask_storeu_ps(&c.score[i][at], _mm512_cmp_ps_mask(_mm512_set1_ps(float(key + i)), last.v, _CMP_GT_OQ), _mm512_set1_ps(-INFINITY));
        Vec high = before;
        for (int64_t i = 0; i < keys; i++) high = max(high, mul(load(&c.score[i][at]), scale));
        Vec all = zero();
        for (int64_t i = 0; i < keys; i += 2) {
            const Vec a = exp(sub(mul(load(&c.score[i][at]), scale), high)), b = exp(sub(mul(load(&c.score[i + 1][at]), scale), high));
            all = add(all, add(a, b));
            const __m512i low = _mm512_cvtepu16_epi32(narrow(a.v)), up = _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(b.v)), 16);
            _mm512_storeu_si512(c.share[half][i / 32][i % 32 / 2], _mm512_or_si512(low, up));
        }
        const Vec factor = key > begin ? exp(sub(before, high)) : zero();
        store(c.total + at, fma(load(c.total + at), factor, all));
        store(c.top + at, high);
        if (key > begin)
            for (int64_t d = 0; d < dim; d++) store(out + d * COLUMNS + at, mul(load(out + d * COLUMNS + at), factor));
    }

    // V of `keys` tokens, zero behind the end: turned [dim][KEYS]. False if one is not finite.
    static bool turn_values(const View &view, const tm_op &op, const Piece &piece, int64_t key, int64_t keys, int64_t end, bf16 *turned) {
        const tm_shape &s = *view.shape;
        const Chunk &chunk = view.chunks[piece.chunk];
        const Cells<C> pool(view);
        const __m512i exponent = _mm512_set1_epi32(0x7f80);
        __mmask16 wrong = 0;
        for (int64_t i = 0; i < keys; i += 16)
            for (int64_t d = 0; d < s.value_dim; d += 16) {
                __m512i r[16];
                for (int64_t j = 0; j < 16; j++) {
                    r[j] = _mm512_setzero_si512();
                    if (key + i + j >= end) continue;
                    const int64_t token = key + i + j, at = piece.kv_head * s.value_dim + d;
                    const C *from = pool.values(chunk.v_table, op.layer, token) + at;
                    if constexpr (SCALED)
                        r[j] = _mm512_cvtepu16_epi32(narrow(mul(load(from), set(pool.scale(chunk.v_table, op.layer, key + i + j, piece.kv_head))).v));
                    else r[j] = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
                    wrong |= _mm512_cmpeq_epi32_mask(_mm512_and_si512(r[j], exponent), exponent);
                }
                transpose(r);
                for (int64_t c = 0; c < 16; c++) _mm256_storeu_si256((__m256i *)(turned + (d + c) * KEYS + i), _mm512_cvtepi32_epi16(r[c]));
            }
        return wrong == 0;
    }

    static void gather(const bf16 *turned, int64_t keys, int64_t dim, const Room &room) {
        for (int64_t d = 0; d < dim; d += 32) {
            float *out = room.out + d * COLUMNS;
            _tile_loadd(0, out, 128);
            _tile_loadd(1, out + 16, 128);
            _tile_loadd(2, out + 16 * COLUMNS, 128);
            _tile_loadd(3, out + 16 * COLUMNS + 16, 128);
            for (int64_t i = 0; i < keys; i += 32) {
                _tile_loadd(4, turned + d * KEYS + i, KEYS * 2);
                _tile_loadd(6, room.columns->share[0][i / 32], 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, room.columns->share[1][i / 32], 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, turned + (d + 16) * KEYS + i, KEYS * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, out, 128);
            _tile_stored(1, out + 16, 128);
            _tile_stored(2, out + 16 * COLUMNS, 128);
            _tile_stored(3, out + 16 * COLUMNS + 16, 128);
        }
    }

    // What 16 columns from `column` on are multiplied by, as in Plain::share_of.
    static Vec shares(const tm_op &op, const Piece &piece, int64_t column, int64_t group, Vec top, Vec total) {
        if (!op.other) return div(set(1.f), total);
        float sinks[16];
        for (int64_t c = 0; c < 16; c++) sinks[c] = ((const float *)op.other)[piece.kv_head * group + (column + c) % group];
        const Vec high = max(top, load(sinks)), factor = exp(sub(top, high));
        return div(factor, fma(total, factor, exp(sub(load(sinks), high))));
    }

    static void finish(const View &view, const tm_op &op, const Piece &piece, int64_t first_column, const Room &room) {
        const tm_shape &s = *view.shape;
        const Chunk &chunk = view.chunks[piece.chunk];
        const int64_t dim = s.value_dim, group = s.heads / s.kv_heads, count = piece.queries * group;
        for (int64_t h = 0; h < 2; h++) {
            const Vec share = shares(op, piece, first_column + h * 16, group, load(room.columns->top + h * 16), load(room.columns->total + h * 16));
            for (int64_t d = 0; d < dim; d += 16) {
                Vec r[16];
                for (int64_t j = 0; j < 16; j++) r[j] = mul(load(room.out + (d + j) * COLUMNS + h * 16), share);
                transpose(r);
                for (int64_t c = 0; c < 16; c++) {
                    const int64_t column = first_column + h * 16 + c;
                    if (column >= count) break;
                    const int64_t query = piece.query + column / group, head = piece.kv_head * group + column % group;
                    store((bf16 *)op.out + (chunk.first + query) * op.out_stride + head * dim + d, r[c]);
                }
            }
        }
    }

    static void tile(const View &view, const tm_op &op, const Piece &piece, char *scratch) {
        const tm_shape &s = *view.shape;
        if (!fits(s)) return Plain::tile(view, op, piece, scratch);
        const Chunk &chunk = view.chunks[piece.chunk];
        const int64_t dim = s.value_dim, groups = divide_up(piece.queries * (s.heads / s.kv_heads), COLUMNS);
        const int64_t first = chunk.start + piece.query, end = first + piece.queries, from = first_seen(op, first) / KEYS * KEYS;
        bf16 *turned = (bf16 *)(scratch + groups * bytes_of_columns(s)), *widened = turned + dim * KEYS;
        for (int64_t g = 0; g < groups; g++) begin(view, op, piece, g * COLUMNS, Room(scratch, g, s));
        for (int64_t key = from; key < end; key += KEYS) {
            const int64_t keys = least(KEYS, round_up(end - key, 32));
            // a share of zero does not hide a NaN from the queries that do not see it
            if (!turn_values(view, op, piece, key, keys, end, turned)) return Plain::tile(view, op, piece, scratch);
            if constexpr (SCALED) widen_keys(view, op, piece, key, keys, end, widened);
            for (int64_t g = 0; g < groups; g++) {
                const Room room(scratch, g, s);
                score(view, op, piece, key, keys, end, room, widened);
                for (int64_t half = 0; half < 2; half++) weigh(op, *room.columns, half, key, keys, from, first, end, set(s.scale), room.out, dim);
                gather(turned, keys, dim, room);
            }
        }
        for (int64_t g = 0; g < groups; g++) finish(view, op, piece, g * COLUMNS, Room(scratch, g, s));
    }
};
