// Cells of the pool, each the keys or values of one token, all KV heads, in the pool's type C; included behind functions.h.
// Cells of 8 bits are integers, and behind those of a block lie their scales [token][head] (engine.models.byte_cells).
// Of a mixed pool (tm_shape.int8_cache) a block may be narrow, its table entries -1 - unit: integers of K, then of V, [layer]
// [token][head][dim] in that unit, and their scales [unit][K, V][layer][token][head] behind the pool's zeros.

template <class C> struct Cells {
    static constexpr bool SCALED = sizeof(C) == 1;
    static constexpr float STEPS = 127;

    char *pool;
    int64_t block_size, layers, heads, dim, value_dim, cell, slice;  // cell: elements; slice: bytes of a block in one layer
    const bf16 *narrow_scales;

    explicit Cells(const View &view)
        : pool((char *)view.pool), block_size(view.shape->block_size), layers(view.shape->layers), heads(view.shape->kv_heads),
          dim(view.shape->head_dim), value_dim(view.shape->value_dim), cell(view.shape->cell),
          slice(block_size * (cell * int64_t(sizeof(C)) + (SCALED ? heads * int64_t(sizeof(bf16)) : 0))),
          narrow_scales((const bf16 *)(pool + (view.shape->pool_units + 1) * layers * slice)) {}

    C *values(int64_t block, int64_t token) const { return (C *)(pool + block * slice) + token * cell; }
    bf16 *scales(int64_t block, int64_t token) const {
        return (bf16 *)(pool + block * slice + block_size * heads * dim) + token * heads;
    }
    // Of a token of a request, by its table.
    const C *values(const int64_t *table, int64_t layer, int64_t token) const {
        return values(table[token / block_size] * layers + layer, token % block_size);
    }
    const bf16 *scales(const int64_t *table, int64_t layer, int64_t token) const {
        return scales(table[token / block_size] * layers + layer, token % block_size);
    }
    // What the values of a head are multiplied by.
    float scale(const int64_t *table, int64_t layer, int64_t token, int64_t head) const {
        return SCALED ? widened(scales(table, layer, token)[head]) : 1.f;
    }

    // Of K (part 0) or V (1) of a token whose entry is below zero.
    const int8_t *narrow_values(int64_t part, int64_t entry, int64_t layer, int64_t token) const {
        return (const int8_t *)pool + (-1 - entry) * layers * slice + ((part * layers + layer) * block_size + token % block_size) * heads * dim;
    }
    float narrow_scale(int64_t part, int64_t entry, int64_t layer, int64_t token, int64_t head) const {
        return widened(narrow_scales[((((-1 - entry) * 2 + part) * layers + layer) * block_size + token % block_size) * heads + head]);
    }
    static bool narrow(int64_t entry) { return !SCALED && entry < 0; }
    // Whether any of `count` >= 1 tokens from `token` on is in a narrow block.
    bool any_narrow(const int64_t *table, int64_t token, int64_t count) const {
        bool any = false;
        for (int64_t block = token / block_size; block <= (token + count - 1) / block_size; block++) any |= narrow(table[block]);
        return any;
    }
    // The values of a token's head where they lie, or widened in `room` [dim].
    const C *head(int64_t part, const int64_t *table, int64_t layer, int64_t token, int64_t head, C *room) const {
        const int64_t entry = table[token / block_size];
        if constexpr (!SCALED)
            if (entry < 0) {
                const int8_t *from = narrow_values(part, entry, layer, token) + head * dim;
                const Vec scale = set(narrow_scale(part, entry, layer, token, head));
                for (int64_t d = 0; d < dim; d += Vec::W) put<C>(room + d, mul(get(from + d, dim - d), scale), dim - d);
                return room;
            }
        return values(entry * layers + layer, token % block_size) + head * (part ? value_dim : dim);
    }
    // Where the values of tokens [first, last) lie, integers if their block is narrow; `to` behind the last of them.
    const C **place(int64_t part, const int64_t *table, int64_t layer, int64_t first, int64_t last, const C **to) const {
        while (first < last) {
            const int64_t entry = table[first / block_size], count = least(last - first, block_size - first % block_size);
            const char *from = narrow(entry) ? (const char *)narrow_values(part, entry, layer, first)
                                             : (const char *)values(entry * layers + layer, first % block_size);
            const int64_t bytes = cell * (narrow(entry) ? 1 : int64_t(sizeof(C)));
            for (int64_t i = 0; i < count; i++) *to++ = (const C *)(from + i * bytes);
            first += count;
        }
        return to;
    }

    // Writes cell `id` (block * block_size + token) from x [heads][width], rounded to the model's type already.
    template <class T, class S> void write(int64_t id, const S *x, int64_t width) const {
        const int64_t block = id / block_size, token = id % block_size;
        C *to = values(block, token);
        if constexpr (SCALED) {
            for (int64_t h = 0; h < heads; h++) round_head(x + h * dim, to + h * dim, scales(block, token) + h);
        } else {
            for (int64_t i = 0; i < heads * width; i += Vec::W) put<T>(to + i, get(x + i, heads * width - i), heads * width - i);
        }
    }

private:
    static float widened(bf16 x) {
        const uint32_t bits = uint32_t(x.bits) << 16;
        float result;
        memcpy(&result, &bits, sizeof result);
        return result;
    }
    static bf16 upwards(float x) {  // x >= 0
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        return {uint16_t((bits + 0xffff) >> 16)};
    }

    template <class S> void round_head(const S *x, C *to, bf16 *scale) const {
        Vec high = zero(), zeros = zero();
        for (int64_t i = 0; i < dim; i += Vec::W) {
            const Vec v = get(x + i, dim - i);
            high = max(high, absolute(v));
            zeros = fma(v, zero(), zeros);
        }
        *scale = has_nan(zeros) ? bf16{0x7fc0} : upwards(highest(high) / STEPS);
        const float step = widened(*scale);
        const Vec inverse = set(step > 0 ? 1.f / step : 0.f);
        for (int64_t i = 0; i < dim; i += Vec::W) {
            const Vec v = min(max(mul(get(x + i, dim - i), inverse), set(-STEPS)), set(STEPS));
            if (dim - i >= Vec::W) store(to + i, v);
            else store_part(to + i, v, dim - i);
        }
    }
};
