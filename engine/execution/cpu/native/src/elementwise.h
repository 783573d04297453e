// Operations on rows of activations, for a model's type T and activations of type S (T or float); included behind cells.h.
// They round where engine.execution.torch_ops rounds.

template <class T, class S> struct Rows {
    static const S *row(const void *p, int64_t i, int64_t stride) { return (const S *)p + i * stride; }
    static S *row(void *p, int64_t i, int64_t stride) { return (S *)p + i * stride; }

    static void embed(const View &view, const tm_op &op, Span tokens) {
        const int64_t n = view.shape->hidden;
        for (int64_t t = tokens.first; t < tokens.last; t++) {
            const T *from = (const T *)op.weight + view.ids[t] * n;
            const T *place = op.other ? (const T *)op.other + (view.positions[t] + op.n) * n : nullptr;
            S *out = row(op.out, t, op.out_stride);
            for (int64_t i = 0; i < n; i += Vec::W) {
                Vec x = get(from + i, n - i);
                if (op.scale != 0) x = rounded_to<T>(mul(x, set(op.scale)));
                if (place) x = add(x, get(place + i, n - i));
                put<T>(out + i, x, n - i);
            }
        }
    }

    static void angles(const View &view, const tm_op &op, Span tokens) {
        const tm_shape &shape = *view.shape;
        const int64_t half = shape.rotary_dim / 2;
        const float *one = op.in ? (const float *)op.in : shape.inverse_frequencies, scale = op.in ? op.scale : shape.rotary_scaling;
        const float *other = op.in || !shape.long_frequencies ? one : shape.long_frequencies;
        for (int64_t t = tokens.first; t < tokens.last; t++) {
            const float *frequencies = view.is_long[t] ? other : one;
            float *out = (float *)op.out + t * shape.rotary_dim;
            for (int64_t i = 0; i < half; i++) {
                const float angle = float(view.positions[t]) * frequencies[i];
                out[i] = cosf(angle) * scale;
                out[half + i] = sinf(angle) * scale;
            }
            for (int64_t i = 0; i < 2 * half; i += Vec::W) put<T>(out + i, get(out + i, 2 * half - i), 2 * half - i);
        }
    }

    // out = norm(x) * weight (+ bias). x and out may be one. `once`: an RMS norm is rounded behind its weight alone.
    template <class X> static void norm_row(const X *x, S *out, const float *weight, const float *bias, int64_t n, float eps, bool once) {
        Vec total = zero(), squares = zero();
        if (bias) {
            for (int64_t i = 0; i < n; i += Vec::W) total = add(total, get(x + i, n - i));
            const Vec mean = set(sum(total) / float(n));
            for (int64_t i = 0; i < n; i += Vec::W) {
                const Vec d = first_lanes(sub(get(x + i, n - i), mean), n - i, 0.f);
                squares = fma(d, d, squares);
            }
            const Vec scale = set(1.f / sqrtf(sum(squares) / float(n) + eps));
            for (int64_t i = 0; i < n; i += Vec::W) {
                const Vec d = mul(sub(get(x + i, n - i), mean), scale);
                put<T>(out + i, fma(d, get(weight + i, n - i), get(bias + i, n - i)), n - i);
            }
            return;
        }
        for (int64_t i = 0; i < n; i += Vec::W) {
            const Vec v = get(x + i, n - i);
            squares = fma(v, v, squares);
        }
        const Vec scale = set(1.f / sqrtf(sum(squares) / float(n) + eps));
        for (int64_t i = 0; i < n; i += Vec::W) {
            const Vec normed = mul(get(x + i, n - i), scale);
            put<T>(out + i, mul(once ? normed : rounded_to<T>(normed), get(weight + i, n - i)), n - i);
        }
    }

    static void norm(const View &view, const tm_op &op, Span rows) {
        const bool gather = op.kind == TM_GATHER_NORM, once = view.shape->rounds_once != 0;
        const float *weight = (const float *)op.weight;
        for (int64_t r = rows.first; r < rows.last; r++) {
            const int64_t t = gather ? view.sampled[r] : r;
            S *x = row(op.residual, t, op.in_stride), *out = row(op.out, r, op.out_stride), *sums = gather ? out : x;
            if (!op.in) {
                norm_row(x, out, weight, op.bias, op.k, op.eps, once);
                continue;
            }
            const S *delta = row(op.in, t, op.in_stride), *other = op.other ? row(op.other, t, op.in_stride) : nullptr;
            for (int64_t i = 0; i < op.k; i += Vec::W) {
                const int64_t left = op.k - i;
                Vec d = get(delta + i, left);
                if (other) d = rounded_to<T>(add(d, get(other + i, left)));
                put<T>(sums + i, add(get(x + i, left), d), left);
            }
            norm_row(sums, out, weight, op.bias, op.k, op.eps, once);
        }
    }

    static void gather(const View &view, const tm_op &op, Span samples) {
        for (int64_t r = samples.first; r < samples.last; r++)
            memcpy(row(op.out, r, op.out_stride), row(op.in, view.sampled[r], op.in_stride), size_t(op.n) * sizeof(S));
    }

    static void rotate(S *x, const float *cos, const float *sin, int64_t half) {
        for (int64_t i = 0; i < half; i += Vec::W) {
            const int64_t left = half - i;
            const Vec a = get(x + i, left), b = get(x + half + i, left), c = get(cos + i, left), s = get(sin + i, left);
            put<T>(x + i, fnma(b, s, rounded_to<T>(mul(a, c))), left);
            put<T>(x + half + i, fma(a, s, rounded_to<T>(mul(b, c))), left);
        }
    }

    template <class C> static void rope_kv(const View &view, const tm_op &op, Span tokens) {
        const tm_shape &shape = *view.shape;
        const int64_t dim = shape.head_dim, half = op.in ? shape.rotary_dim / 2 : 0;
        const int64_t rotated = shape.heads + shape.kv_heads, layer = op.layer * shape.block_size;
        const Cells<C> cells(view);
        for (int64_t t = tokens.first; t < tokens.last; t++) {
            S *heads = row(op.out, t, op.out_stride);
            const float *cos = half ? (const float *)op.in + t * shape.rotary_dim : nullptr;
            for (int64_t h = 0; h < rotated; h++) {
                S *x = heads + h * dim;
                if (op.weight) norm_row(x, x, (const float *)op.weight + h * dim, nullptr, dim, op.eps, shape.rounds_once != 0);
                if (half) rotate(x, cos, cos + half, half);
            }
            const S *k = heads + shape.heads * dim, *v = k + shape.kv_heads * dim;
            cells.template write<T>(view.k_cells[t] + layer, k, dim);
            cells.template write<T>(view.v_cells[t] + layer, v, shape.value_dim);
        }
    }
};
