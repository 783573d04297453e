// Cells of the pool, each the keys or values of one token, all KV heads, in the pool's type C; included behind functions.h.
// Cells of 8 bits are integers, and behind those of a block lie their scales [token][head] (engine.models.byte_cells).

template <class C> struct Cells {
    static constexpr bool SCALED = sizeof(C) == 1;
    static constexpr float STEPS = 127;

    char *pool;
    int64_t block_size, layers, heads, dim, value_dim, cell, slice;  // cell: elements; slice: bytes of a block in one layer

    explicit Cells(const View &view)
        : pool((char *)view.pool), block_size(view.shape->block_size), layers(view.shape->layers), heads(view.shape->kv_heads),
          dim(view.shape->head_dim), value_dim(view.shape->value_dim), cell(view.shape->cell),
          slice(block_size * (cell * int64_t(sizeof(C)) + (SCALED ? heads * int64_t(sizeof(bf16)) : 0))) {}

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

    // Where the values (K: part 0, V: 1) of a token's head lie.
    const C *head(int64_t part, const int64_t *table, int64_t layer, int64_t token, int64_t head) const {
        return values(table, layer, token) + head * (part ? value_dim : dim);
    }
    // Where the values of tokens [first, last) lie; `to` behind the last of them.
    const C **place(const int64_t *table, int64_t layer, int64_t first, int64_t last, const C **to) const {
        while (first < last) {
            const int64_t entry = table[first / block_size], count = least(last - first, block_size - first % block_size);
            const C *from = values(entry * layers + layer, first % block_size);
            for (int64_t i = 0; i < count; i++) *to++ = from + i * cell;
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
