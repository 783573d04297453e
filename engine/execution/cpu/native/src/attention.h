// Attention to the blocks of the pool, in float; included behind linear.h. T is the model's type, S of activations, C of the
// pool: T, or int8_t with scales.

template <class T, class S, class C = T> struct Attention {
    static constexpr int64_t W = Vec::W;
#ifdef TIDE_HAS_BF16
    static constexpr bool TURNED = false;  // tiles of these levels have products of their own
#else
    static constexpr bool TURNED = true;
#endif

    static Vec scaled(Vec a, float scale) { return Cells<C>::SCALED ? mul(a, set(scale)) : a; }

    // ---- one query and its heads

    // A head's part of a cell that is needed soon, on its way: few at a time, as a core drops or waits for what is too much.
    static void fetch(const C *cell, int64_t dim) {
        for (int64_t i = 0; i < dim * int64_t(sizeof(C)); i += 64) _mm_prefetch((const char *)cell + i, _MM_HINT_T0);
    }

    // Dot products of G heads' queries [G][padded] with the keys of W tokens, `at` in their cells; scores [G][TILE_KEYS].
    // TURNED: summed in the order of a tile's products, so that a query has the same scores in a chunk of any length.
    template <int G> static void score(const float *q, int64_t padded, const C *const *keys, int64_t at, int64_t dim, const float *scales, float *scores, const C *const *soon) {
        for (int64_t j = 0; soon && j < W; j++) fetch(soon[j] + at, dim);
        if constexpr (TURNED) {
            Vec products[G];
            for (int g = 0; g < G; g++) products[g] = zero();
            for (int64_t d = 0; d < dim; d += W) {
                Vec k[W];
                for (int64_t j = 0; j < W; j++) k[j] = scaled(get(keys[j] + at + d, dim - d), scales[j]);
                transpose(k);
                for (int64_t j = 0; j < W; j++)
                    for (int g = 0; g < G; g++) products[g] = fma(set(q[g * padded + d + j]), k[j], products[g]);
            }
            for (int g = 0; g < G; g++) store(scores + g * TILE_KEYS, products[g]);
        } else {
            Vec products[G][W];
            for (int64_t j = 0; j < W; j++) {
                Vec a[G];
                for (int g = 0; g < G; g++) a[g] = zero();
                for (int64_t d = 0; d < dim; d += W) {
                    const Vec k = get(keys[j] + at + d, dim - d);
                    for (int g = 0; g < G; g++) a[g] = fma(load(q + g * padded + d), k, a[g]);
                }
                for (int g = 0; g < G; g++) products[g][j] = a[g];
            }
            for (int g = 0; g < G; g++) store(scores + g * TILE_KEYS, Cells<C>::SCALED ? mul(sums(products[g]), load(scales)) : sums(products[g]));
        }
    }

    // Adds the values of `count` tokens, weighted: to [G][padded], N vectors from `d` on; weights [G][TILE_KEYS].
    template <int G, int N> static void gather(const float *weights, const C *const *values, int64_t at, int64_t count, int64_t d, int64_t dim, const float *scales, float *to, int64_t padded, const C *const *soon) {
        Vec a[G][N];
        for (int g = 0; g < G; g++)
            for (int n = 0; n < N; n++) a[g][n] = load(to + g * padded + d + n * W);
        for (int64_t j = 0; j < count; j++) {
            if (soon) fetch(soon[j] + at, dim);
            for (int n = 0; n < N; n++) {
                const Vec v = scaled(get(values[j] + at + d + n * W, dim - d - n * W), scales[j]);
                for (int g = 0; g < G; g++) a[g][n] = fma(set(weights[g * TILE_KEYS + j]), v, a[g][n]);
            }
        }
        for (int g = 0; g < G; g++)
            for (int n = 0; n < N; n++) store(to + g * padded + d + n * W, a[g][n]);
    }
    template <int G> static void gather_all(const float *weights, const C *const *values, int64_t at, int64_t count, int64_t dim, const float *scales, float *to, int64_t padded, const C *const *soon) {
        constexpr int N = Vec::W == 16 ? 4 : 2;
        int64_t d = 0;
        for (; d + (N - 1) * W < dim; d += N * W) gather<G, N>(weights, values, at, count, d, dim, scales, to, padded, d ? nullptr : soon);
        for (; d < dim; d += W) gather<G, 1>(weights, values, at, count, d, dim, scales, to, padded, d ? nullptr : soon);
    }

    // The keys that a piece looks at: from the first on, within its query's window.
    static Span keys_of(const View &view, const tm_op &op, const Piece &piece) {
        const int64_t first = most(piece.key, first_seen(op, view.chunks[piece.chunk].start + piece.query));
        return {first, most(first, piece.key + piece.keys)};
    }

    // Of a block of keys from `key` on, what a piece that sees `keys` takes: K from the vector with the first on.
    static Span part_of(Span keys, int64_t key) {
        return {most(keys.first - key, 0) / W * W, least(TILE_KEYS, keys.last - key)};
    }

    // Where the K and the V of a piece lie, block by block, each padded to a multiple of W by what is there anyway, and
    // behind them the first K of the piece that follows.
    static void place_cells(const View &view, const tm_op &op, const Piece &piece, const C **to) {
        const Cells<C> pool(view);
        const Chunk &chunk = view.chunks[piece.chunk];
        const Span keys = keys_of(view, op, piece);
        for (int64_t key = keys.first / TILE_KEYS * TILE_KEYS; key < keys.last; key += TILE_KEYS) {
            const Span part = part_of(keys, key);
            for (int64_t values = 0; values < 2; values++) {
                const C **end = pool.place(values ? chunk.v_table : chunk.k_table, op.layer, key + part.first, key + part.last, to);
                to += round_up(part.last - part.first, W);
                while (end < to) *end = end[-1], end++;
            }
        }
        const C **end = to + ON_THE_WAY;
        const Piece *next = &piece + 1;
        if (next < view.pieces_end && next->keys > 0) {
            const Span first = keys_of(view, op, *next);
            to = pool.place(view.chunks[next->chunk].k_table, op.layer, first.first, least(first.last, first.first + ON_THE_WAY), to);
        }
        while (to < end) *to = to[-1], to++;
    }

    // Some heads of one query and the keys of a piece, by blocks of keys as a tile takes them.
    static void decode(const View &view, const tm_op &op, const Piece &piece, char *scratch) {
        const tm_shape &s = *view.shape;
        const Chunk &chunk = view.chunks[piece.chunk];
        const int64_t dim = s.head_dim, padded = round_up(dim, 16), group = s.heads / s.kv_heads;
        const int64_t width = s.value_dim, gathered = round_up(width, 16);
        const int64_t token = chunk.first + piece.query, query = chunk.start + piece.query;
        const int64_t first_head = piece.kv_head * group, heads = piece.kv_heads * group;
        const Span keys = keys_of(view, op, piece);
        const Cells<C> pool(view);
        const C **cells = (const C **)scratch;  // [K and V of every block, those of the next piece]
        float *scores = (float *)(cells + 2 * SPLIT + ON_THE_WAY), *to = scores + heads * TILE_KEYS, *q = to + heads * gathered;
        float *top = q + heads * padded, *total = top + heads;
        const S *from = (const S *)op.in + token * op.in_stride + first_head * dim;
        memset(to, 0, size_t(heads * (gathered + padded)) * sizeof(float));
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t d = 0; d < dim; d += W) store(q + h * padded + d, mul(get(from + h * dim + d, dim - d), set(s.scale)));
            top[h] = -INFINITY, total[h] = 0;
        }
        const bool sees_some = keys.first < keys.last;
        if (sees_some) place_cells(view, op, piece, cells);
        float scales[W];
        const auto set_scales = [&](bool values, int64_t first, int64_t live, int64_t kv) {
            const int64_t *table = values ? chunk.v_table : chunk.k_table;
            for (int64_t j = 0; Cells<C>::SCALED && j < W; j++) scales[j] = pool.scale(table, op.layer, first + least(j, live - 1), piece.kv_head + kv);
        };
        for (int64_t key = keys.first / TILE_KEYS * TILE_KEYS; sees_some && key < keys.last; key += TILE_KEYS) {
            const Span part = part_of(keys, key);
            for (int64_t i = part.first; i < part.last; i += W, cells += W)
                for (int64_t kv = 0; kv < piece.kv_heads; kv++) {
                    set_scales(false, key + i, least(W, part.last - i), kv);
                    for (int64_t g = 0; g < group; g += 4) {
                        const int64_t h = kv * group + g;
                        score_heads(least(4, group - g), q + h * padded, padded, cells, (piece.kv_head + kv) * dim, dim, scales, scores + h * TILE_KEYS + i, g ? nullptr : cells + ON_THE_WAY);
                    }
                }
            for (int64_t h = 0; h < heads; h++) weigh_row(op, scores + h * TILE_KEYS, query, key, part.last, top[h], total[h], to + h * gathered, gathered);
            for (int64_t i = part.first; i < part.last; i += W, cells += W) {
                const int64_t unseen = most(keys.first - key - i, 0), live = least(W, part.last - i) - unseen;  // a weight of zero does not hide a NaN
                for (int64_t kv = 0; kv < piece.kv_heads; kv++) {
                    set_scales(true, key + i + unseen, live, kv);
                    for (int64_t g = 0; g < group; g += 4) {
                        const int64_t h = kv * group + g;
                        gather_heads(least(4, group - g), scores + h * TILE_KEYS + i + unseen, cells + unseen, (piece.kv_head + kv) * width, live, width, scales, to + h * gathered, gathered, g ? nullptr : cells + ON_THE_WAY);
                    }
                }
            }
        }
        for (int64_t h = 0; h < heads; h++) finish(view, op, piece, token, first_head + h, top[h], total[h], to + h * gathered);
    }

    static void score_heads(int64_t heads, const float *q, int64_t padded, const C *const *keys, int64_t at, int64_t dim, const float *scales, float *scores, const C *const *soon) {
        switch (heads) {
            case 1: return score<1>(q, padded, keys, at, dim, scales, scores, soon);
            case 2: return score<2>(q, padded, keys, at, dim, scales, scores, soon);
            case 3: return score<3>(q, padded, keys, at, dim, scales, scores, soon);
            default: return score<4>(q, padded, keys, at, dim, scales, scores, soon);
        }
    }
    static void gather_heads(int64_t heads, const float *weights, const C *const *values, int64_t at, int64_t count, int64_t dim, const float *scales, float *to, int64_t padded, const C *const *soon) {
        switch (heads) {
            case 1: return gather_all<1>(weights, values, at, count, dim, scales, to, padded, soon);
            case 2: return gather_all<2>(weights, values, at, count, dim, scales, to, padded, soon);
            case 3: return gather_all<3>(weights, values, at, count, dim, scales, to, padded, soon);
            default: return gather_all<4>(weights, values, at, count, dim, scales, to, padded, soon);
        }
    }

    // What the weights of a whole context are multiplied by: exp(score - top), whose sum is `total`.
    static float share_of(const tm_op &op, int64_t head, float top, float total) {
        if (!op.other) return 1.f / total;
        const float sink = ((const float *)op.other)[head], high = top > sink || top != top ? top : sink, factor = expf(top - high);
        return factor / (total * factor + expf(sink - high));
    }

    // Puts what a whole context has gathered where it belongs.
    static void put_head(const View &view, const tm_op &op, int64_t token, int64_t head, float top, float total, const float *values) {
        const int64_t dim = view.shape->value_dim;
        S *out = (S *)op.out + token * op.out_stride + head * dim;
        const Vec share = set(share_of(op, head, top, total));
        for (int64_t d = 0; d < dim; d += W) put<T>(out + d, mul(load(values + d), share), dim - d);
    }

    static void finish(const View &view, const tm_op &op, const Piece &piece, int64_t token, int64_t head, float top, float total, const float *values) {
        if (piece.slot < 0) return put_head(view, op, token, head, top, total, values);
        float *to = view.partial + (piece.slot * view.shape->heads + head) * view.partial_stride();
        to[0] = top, to[1] = total;
        memcpy(to + PARTIAL, values, size_t(view.partial_stride() - PARTIAL) * sizeof(float));
    }

    // Adds what another part of a context has gathered, [padded], by the larger maximum of both.
    static void fold(float &top, float &total, float *out, float other_top, float other_total, const float *other, int64_t padded) {
        if (other_top == -INFINITY && other_total == 0) return;  // outside of the window
        const float high = other_top > top || other_top != other_top ? other_top : top;
        const float ours = top == -INFINITY && total == 0 ? 0.f : expf(top - high), theirs = expf(other_top - high);
        for (int64_t d = 0; d < padded; d += W) store(out + d, fma(load(out + d), set(ours), mul(load(other + d), set(theirs))));
        total = fmaf(total, ours, other_total * theirs);
        top = high;
    }

    // Folds the parts of split contexts one after the other, into the first.
    static void merge(const View &view, const tm_op &op, Span rows) {
        const tm_shape &s = *view.shape;
        const int64_t stride = view.partial_stride(), step = s.heads * stride;
        for (int64_t r = rows.first; r < rows.last; r++) {
            const int64_t t = op.sampled ? view.sampled[r] : r, parts = view.parts[t];
            for (int64_t h = 0; parts && h < s.heads; h++) {
                float *to = view.partial + (view.slot[t] * s.heads + h) * stride;
                for (int64_t i = 1; i < parts; i++) {
                    const float *from = to + i * step;
                    fold(to[0], to[1], to + PARTIAL, from[0], from[1], from + PARTIAL, stride - PARTIAL);
                }
                put_head(view, op, t, h, to[0], to[1], to + PARTIAL);
            }
        }
    }

    // ---- many queries of one KV head

    // c [R][ldc] (+)= a [R][lda] * b [k][ldb], 2 W columns.
    template <int R, bool ADD> static void product(const float *a, int64_t lda, const float *b, int64_t ldb, int64_t k, float *c, int64_t ldc) {
        Vec x[R][2];
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) x[r][i] = ADD ? load(c + r * ldc + i * W) : zero();
        for (int64_t j = 0; j < k; j++) {
            const Vec b0 = load(b + j * ldb), b1 = load(b + j * ldb + W);
            for (int r = 0; r < R; r++) {
                const Vec v = set(a[r * lda + j]);
                x[r][0] = fma(v, b0, x[r][0]);
                x[r][1] = fma(v, b1, x[r][1]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) store(c + r * ldc + i * W, x[r][i]);
    }

    // The same for TILE rows and `columns` (a multiple of 2 W).
    template <bool ADD> static void strip(int64_t columns, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t k, float *c, int64_t ldc) {
        for (int64_t i = 0; i < columns; i += 2 * W) product<TILE, ADD>(a, lda, b + i, ldb, k, c + i, ldc);
    }

    // Keys [key, key + TILE_KEYS) of one head, turned: to [padded][TILE_KEYS], zero behind the last one.
    static void turn_keys(const View &view, const tm_op &op, const Chunk &chunk, int64_t head, int64_t key, int64_t keys, int64_t padded, float *to) {
        const int64_t dim = view.shape->head_dim;
        const Cells<C> pool(view);
        for (int64_t i = 0; i < TILE_KEYS; i += W) {
            const C *from[W] = {};
            float scale[W];
            for (int64_t j = 0; j < W && i + j < keys; j++) {
                from[j] = pool.head(0, chunk.k_table, op.layer, key + i + j, head);
                scale[j] = pool.scale(chunk.k_table, op.layer, key + i + j, head);
            }
            for (int64_t d = 0; d < padded; d += W) {
                Vec v[W];
                for (int64_t j = 0; j < W; j++) v[j] = i + j < keys && d < dim ? scaled(get(from[j] + d, dim - d), scale[j]) : zero();
                transpose(v);
                for (int64_t j = 0; j < W; j++) store(to + (d + j) * TILE_KEYS + i, v[j]);
            }
        }
    }
    // Whether all of them are finite.
    static bool copy_values(const View &view, const tm_op &op, const Chunk &chunk, int64_t head, int64_t key, int64_t keys, int64_t padded, float *to) {
        const int64_t dim = view.shape->value_dim;
        const Cells<C> pool(view);
        Vec zeros = zero();
        for (int64_t j = 0; j < keys; j++) {
            const C *from = pool.head(1, chunk.v_table, op.layer, key + j, head);
            const float scale = pool.scale(chunk.v_table, op.layer, key + j, head);
            for (int64_t d = 0; d < padded; d += W) {
                const Vec v = d < dim ? scaled(get(from + d, dim - d), scale) : zero();
                zeros = fma(v, zero(), zeros);
                store(to + j * padded + d, v);
            }
        }
        return !has_nan(zeros);
    }

    // A row's scores of `count` keys, of which it sees the first, become weights, 0 of those that it does not see; its sums so
    // far shrink to the new maximum.
    static void weigh(float *scores, int64_t seen, int64_t count, float &top, float &total, float *out, int64_t padded) {
        Vec high = set(-INFINITY), all = zero();
        for (int64_t i = 0; i < seen; i += W) {
            const Vec x = first_lanes(load(scores + i), seen - i, -INFINITY);
            store(scores + i, x);
            high = max(high, x);
        }
        for (int64_t i = round_up(seen, W); i < count; i += W) store(scores + i, zero());
        const float now = highest(high), next = now > top || now != now ? now : top;
        const Vec base = set(next);
        for (int64_t i = 0; i < seen; i += W) {
            const Vec p = exp(sub(load(scores + i), base));
            all = add(all, p);
            store(scores + i, p);
        }
        const float factor = top == -INFINITY ? 0.f : expf(top - next);
        total = fmaf(total, factor, sum(all));  // in every copy of this function, whatever the compiler contracts
        if (next != top)
            for (int64_t d = 0; d < padded; d += W) store(out + d, mul(load(out + d), set(factor)));
        top = next;
    }

    // The same for the row of `query`, which sees some of the `count` keys from `key` on; zero for those that it does not see.
    static void weigh_row(const tm_op &op, float *scores, int64_t query, int64_t key, int64_t count, float &top, float &total, float *out, int64_t padded) {
        const int64_t seen = least(query + 1 - key, count), unseen = first_seen(op, query) - key;
        for (int64_t i = 0; op.softcap > 0 && i < count; i += W) store(scores + i, capped(load(scores + i), op.softcap));
        for (int64_t i = 0; i < least(unseen, seen); i++) scores[i] = -INFINITY;
        if (seen > most(unseen, 0)) weigh(scores, seen, count, top, total, out, padded);
        else memset(scores, 0, TILE_KEYS * sizeof(float));
    }

    // What a tile has gathered, out [queries * group][padded], to its tokens.
    static void put_rows(const View &view, const tm_op &op, const Piece &piece, const float *out, int64_t padded, const float *top, const float *total) {
        const int64_t group = view.shape->heads / view.shape->kv_heads, first = view.chunks[piece.chunk].first + piece.query;
        for (int64_t r = 0; r < piece.queries * group; r++) put_head(view, op, first + r / group, piece.kv_head * group + r % group, top[r], total[r], out + r * padded);
    }

    static void tile(const View &view, const tm_op &op, const Piece &piece, char *scratch) {
        const tm_shape &s = *view.shape;
        const Chunk &chunk = view.chunks[piece.chunk];
        const int64_t dim = s.head_dim, padded = round_up(dim, 32), gathered = round_up(s.value_dim, 32), group = s.heads / s.kv_heads;
        const int64_t rows = piece.queries * group, all = round_up(rows, TILE);
        float *q = (float *)scratch, *out = q + all * padded, *scores = out + all * gathered;  // scores of TILE rows
        float *keys = scores + TILE * TILE_KEYS, *values = keys + padded * TILE_KEYS, *top = values + gathered * TILE_KEYS, *total = top + all;
        float *whole = total + all, *whole_top = whole + all * gathered, *whole_total = whole_top + all;  // of the parts before
        memset(q, 0, size_t(all * (padded + gathered)) * sizeof(float));
        for (int64_t r = 0; r < rows; r++) {  // row: query, then head of the group
            const int64_t token = chunk.first + piece.query + r / group, head = piece.kv_head * group + r % group;
            const S *from = (const S *)op.in + token * op.in_stride + head * dim;
            for (int64_t d = 0; d < dim; d += W) store(q + r * padded + d, mul(get(from + d, dim - d), set(s.scale)));
        }
        for (int64_t r = 0; r < all; r++) top[r] = -INFINITY, total[r] = 0;
        const int64_t first = chunk.start + piece.query, end = first + piece.queries;  // keys that the last query sees
        const int64_t begin_key = first_seen(op, first) / TILE_KEYS * TILE_KEYS;
        const bool split = begin_key / SPLIT < (end - 1) / SPLIT;
        if (split) {
            memset(whole, 0, size_t(all * gathered) * sizeof(float));
            for (int64_t r = 0; r < all; r++) whole_top[r] = -INFINITY, whole_total[r] = 0;
        }
        for (int64_t key = begin_key; key < end; key += TILE_KEYS) {
            const int64_t count = least(TILE_KEYS, end - key);
            turn_keys(view, op, chunk, piece.kv_head, key, count, padded, keys);
            const bool finite = copy_values(view, op, chunk, piece.kv_head, key, count, gathered, values);
            for (int64_t begin = 0; begin < rows; begin += TILE) {
                const int64_t stop = least(begin + TILE, rows), longest = least(count, first + (stop - 1) / group + 1 - key);
                if (longest <= 0) continue;
                strip<false>(round_up(longest, 2 * W), q + begin * padded, padded, keys, TILE_KEYS, padded, scores, TILE_KEYS);
                for (int64_t r = begin; r < stop; r++)
                    weigh_row(op, scores + (r - begin) * TILE_KEYS, first + r / group, key, longest, top[r], total[r], out + r * gathered, gathered);
                if (finite) strip<true>(gathered, scores, TILE_KEYS, values, gathered, longest, out + begin * gathered, gathered);
                for (int64_t r = begin; !finite && r < stop; r++) {  // a weight of zero does not hide a NaN from those that do not see it
                    const int64_t query = first + r / group, from = most(0, first_seen(op, query) - key), seen = least(count, query + 1 - key);
                    const float *weights = scores + (r - begin) * TILE_KEYS + from;
                    for (int64_t d = 0; from < seen && d < gathered; d += 2 * W)
                        product<1, true>(weights, 0, values + from * gathered + d, gathered, seen - from, out + r * gathered + d, 0);
                }
            }
            if (!split || ((key + TILE_KEYS) % SPLIT && key + TILE_KEYS < end)) continue;
            for (int64_t r = 0; r < rows; r++) {
                fold(whole_top[r], whole_total[r], whole + r * gathered, top[r], total[r], out + r * gathered, gathered);
                top[r] = -INFINITY, total[r] = 0;
            }
            memset(out, 0, size_t(rows * gathered) * sizeof(float));
        }
        if (split) put_rows(view, op, piece, whole, gathered, whole_top, whole_total);
        else put_rows(view, op, piece, out, gathered, top, total);
    }
};
