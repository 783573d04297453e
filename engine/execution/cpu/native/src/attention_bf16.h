// Tiles of queries by AVX512-BF16; included behind attention.h and linear_bf16.h. As Attention::tile, but that products
// are of pairs of bfloat16: K is turned in pairs of its dimension, V lies in pairs of keys, and shares are rounded. For each
// block of keys TILE rows at a time go from scores to what they gather, within the first cache of a core.

template <class C> struct PairedTiles {
    using Plain = Attention<bf16, bf16, C>;

    // c [TILE][ldc] (+)= a [TILE][lda] * b [pairs][ldb], `columns` a multiple of 32.
    template <bool ADD> static void product(int64_t columns, const bf16 *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t pairs, float scale, float *c, int64_t ldc) {
        for (int64_t i = 0; i < columns; i += 32) {
            Sums<TILE> sums;
            if (ADD) sums.take(c + i, ldc);
            else sums.clear();
            const bf16 *x = a;
            const uint32_t *w = b + i;
            for (int64_t j = 0; j < pairs; j++, x += 2, w += ldb) sums.add(x, lda, line_of((const bf16 *)w), line_of((const bf16 *)(w + 16)));
            if (!ADD) sums.scale(_mm512_set1_ps(scale));
            sums.put(c + i, ldc);
        }
    }

    // A row's `scores` of a block of keys, in powers of two, become `shares`: zero but for keys `seen`. What the row has
    // gathered shrinks to the new maximum; `total` [16]: its sum, lane by lane.
    static void share(const tm_op &op, const float *scores, int64_t columns, Span seen, float &top, float *total, float *out, int64_t gathered, bf16 *shares) {
        Vec x[TILE_KEYS / Vec::W], high = set(-INFINITY), all = load(total);
        for (int64_t i = 0; i < columns / Vec::W; i++) {
            const int64_t at = i * Vec::W;
            x[i] = load(scores + at);
            if (op.softcap > 0) x[i] = mul(capped(x[i], op.softcap), set(LOG2_E));
            if (seen.last < at + Vec::W) x[i] = seen.last > at ? first_lanes(x[i], seen.last - at, -INFINITY) : set(-INFINITY);
            if (seen.first > at) x[i].v = seen.first < at + Vec::W ? _mm512_mask_mov_ps(x[i].v, lanes(seen.first - at), _mm512_set1_ps(-INFINITY)) : _mm512_set1_ps(-INFINITY);
            high = max(high, x[i]);
        }
        const float now = highest(high), next = now > top || now != now ? now : top;
        if (next != top) {
            const Vec factor = power(sub(set(top), set(next)));
            all = mul(all, factor);
            for (int64_t d = 0; top != -INFINITY && d < gathered; d += Vec::W) store(out + d, mul(load(out + d), factor));
            top = next;
        }
        for (int64_t i = 0; i < columns / Vec::W; i++) {
            const Vec p = power(sub(x[i], set(next)));
            all = add(all, p);
            store(shares + i * Vec::W, p);
        }
        store(total, all);
    }

    static __m512i part_of(const bf16 *from, int64_t left) {  // 32 of them, zero behind the last one
        return left >= 32 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << left) - 1), from);
    }

    // Keys [key, key + keys) of one head in pairs [padded / 2][TILE_KEYS], zero behind the last one.
    static void turn_keys(const View &view, const tm_op &op, const Chunk &chunk, int64_t head, int64_t key, int64_t keys, int64_t padded, uint32_t *to) {
        const int64_t dim = view.shape->head_dim;
        const Cells<bf16> pool(view);
        for (int64_t i = 0; i < TILE_KEYS; i += 16) {
            const bf16 *from[16] = {};
            for (int64_t j = 0; j < 16 && i + j < keys; j++) from[j] = pool.head(0, chunk.k_table, op.layer, key + i + j, head);
            for (int64_t d = 0; d < padded; d += 32) {
                __m512i r[16];
                for (int64_t j = 0; j < 16; j++) r[j] = i + j < keys ? part_of(from[j] + d, dim - d) : _mm512_setzero_si512();
                transpose(r);
                for (int64_t j = 0; j < 16; j++) _mm512_storeu_si512(to + (d / 2 + j) * TILE_KEYS + i, r[j]);
            }
        }
    }

    // Their values in pairs of keys [divide_up(keys, 2)][padded]. Whether all of them are finite.
    static bool pair_values(const View &view, const tm_op &op, const Chunk &chunk, int64_t head, int64_t key, int64_t keys, int64_t padded, uint32_t *to) {
        const int64_t dim = view.shape->value_dim;
        const Cells<bf16> pool(view);
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
        __mmask32 wrong = 0;
        for (int64_t j = 0; j < keys; j += 2, to += padded) {
            const bf16 *even = pool.head(1, chunk.v_table, op.layer, key + j, head);
            const bf16 *odd = j + 1 < keys ? pool.head(1, chunk.v_table, op.layer, key + j + 1, head) : nullptr;
            for (int64_t d = 0; d < padded; d += 32) {
                const __m512i a = part_of(even + d, dim - d), b = odd ? part_of(odd + d, dim - d) : _mm512_setzero_si512();
                wrong |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(a, exponent), exponent);
                wrong |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(b, exponent), exponent);
                for (int half = 0; half < 2; half++) {
                    const __m512i low = _mm512_cvtepu16_epi32(half ? _mm512_extracti64x4_epi64(a, 1) : _mm512_castsi512_si256(a));
                    const __m512i high = _mm512_cvtepu16_epi32(half ? _mm512_extracti64x4_epi64(b, 1) : _mm512_castsi512_si256(b));
                    _mm512_storeu_si512(to + d + 16 * half, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
                }
            }
        }
        return wrong == 0;
    }

    static void tile(const View &view, const tm_op &op, const Piece &piece, char *scratch) {
        const tm_shape &s = *view.shape;
        const Chunk &chunk = view.chunks[piece.chunk];
        const int64_t dim = s.head_dim, padded = round_up(dim, 32), gathered = round_up(s.value_dim, 32), group = s.heads / s.kv_heads;
        const int64_t rows = piece.queries * group, all = round_up(rows, TILE);
        float *out = (float *)scratch, *totals = out + all * gathered, *top = totals + all * Vec::W, *total = top + all;
        float *scores = total + all;  // of TILE rows, as are shares
        uint32_t *keys = (uint32_t *)(scores + TILE * TILE_KEYS), *values = keys + padded / 2 * TILE_KEYS;
        bf16 *q = (bf16 *)(values + TILE_KEYS / 2 * gathered), *shares = q + all * padded;
        memset(out, 0, size_t(all * (gathered + Vec::W)) * sizeof(float));
        memset(q, 0, size_t(all * padded) * sizeof(bf16));
        const float scale = op.softcap > 0 ? s.scale : s.scale * LOG2_E;
        for (int64_t r = 0; r < rows; r++) {  // row: query, then head of the group
            const int64_t token = chunk.first + piece.query + r / group, head = piece.kv_head * group + r % group;
            memcpy(q + r * padded, (const bf16 *)op.in + token * op.in_stride + head * dim, size_t(dim) * sizeof(bf16));
        }
        for (int64_t r = 0; r < all; r++) top[r] = -INFINITY;
        const int64_t first = chunk.start + piece.query, end = first + piece.queries;  // keys that the last query sees
        for (int64_t key = first_seen(op, first) / TILE_KEYS * TILE_KEYS; key < end; key += TILE_KEYS) {
            const int64_t count = least(TILE_KEYS, end - key);
            // a share of zero does not hide a NaN from the queries that do not see it
            if (!pair_values(view, op, chunk, piece.kv_head, key, count, gathered, values)) return Plain::tile(view, op, piece, scratch);
            turn_keys(view, op, chunk, piece.kv_head, key, count, padded, keys);
            for (int64_t begin = 0; begin < rows; begin += TILE) {
                const int64_t stop = least(begin + TILE, rows), longest = least(count, first + (stop - 1) / group + 1 - key);
                if (longest <= 0) continue;
                const int64_t columns = round_up(longest, 32);
                product<false>(columns, q + begin * padded, padded, keys, TILE_KEYS, padded / 2, scale, scores, TILE_KEYS);
                for (int64_t r = begin; r < begin + TILE; r++) {
                    const int64_t query = first + r / group;
                    const Span seen = {first_seen(op, query) - key, least(query + 1 - key, count)};
                    bf16 *to = shares + (r - begin) * TILE_KEYS;
                    if (r < stop && most(seen.first, 0) < seen.last) share(op, scores + (r - begin) * TILE_KEYS, columns, seen, top[r], totals + r * Vec::W, out + r * gathered, gathered, to);
                    else memset(to, 0, size_t(columns) * sizeof(bf16));
                }
                product<true>(gathered, shares, TILE_KEYS, values, gathered, divide_up(longest, 2), 1, out + begin * gathered, gathered);
            }
        }
        for (int64_t r = 0; r < rows; r++) top[r] *= 1 / LOG2_E, total[r] = sum(load(totals + r * Vec::W));
        Plain::put_rows(view, op, piece, out, gathered, top, total);
    }
};

template <> struct PairedTiles<int8_t> : Attention<bf16, bf16, int8_t> {};
