// What happens to the 32 outputs of a panel once they are summed; included behind functions.h.

// Outputs of rows `row` .. of one panel: c [rows][32] float.
template <class T, class S> struct Epilogue {
    const tm_op &op;
    float *logits;
    int64_t logits_stride;
    Best best;

    static Vec activated(Vec x, int32_t kind) {
        switch (kind) {
            case TM_GELU: return rounded_to<T>(gelu(x));
            case TM_GELU_TANH: return rounded_to<T>(gelu_tanh(x));
            case TM_RELU: return max(zero(), x);  // in this order NaN stays NaN
            default: return x;
        }
    }

    Vec output(const float *c, int64_t first, int64_t i) const {  // output `first` + i, `i` within the panel
        Vec x = load(c + i);
        if (op.bias && first + i < op.n) x = add(x, get(op.bias + first + i, op.n - first - i));
        return rounded_to<T>(x);
    }

    void store_row(int64_t row, int64_t panel, const float *c) const {
        if (op.halves) return store_halves(row, panel, c);
        const int64_t first = panel * PANEL;
        S *out = (S *)op.out + row * op.out_stride + first;
        for (int64_t i = 0; i < PANEL && first + i < op.n; i += Vec::W) {
            put<T>(out + i, activated(output(c, first, i), op.epilogue), op.n - first - i);
        }
    }

    // A panel of 16 outputs of the first half and the 16 of the second that belong to them.
    void store_halves(int64_t row, int64_t panel, const float *c) const {
        constexpr int64_t HALF = PANEL / 2;
        const int64_t half = op.n / 2, first = panel * HALF;
        S *out = (S *)op.out + row * op.out_stride + first;
        for (int64_t i = 0; i < HALF && first + i < half; i += Vec::W) {
            const int64_t left = half - first - i;
            Vec a = load(c + i), b = load(c + HALF + i);
            if (op.bias) a = add(a, get(op.bias + first + i, left)), b = add(b, get(op.bias + half + first + i, left));
            a = rounded_to<T>(a), b = rounded_to<T>(b);
            if (op.epilogue == TM_SWIGLU || op.epilogue == TM_GEGLU) {
                put<T>(out + i, mul(rounded_to<T>(op.epilogue == TM_GEGLU ? gelu_tanh(a) : silu(a)), b), left);
            } else {
                put<T>(out + i, a, left);
                put<T>(out + half + i, b, left);
            }
        }
    }

    // Keeps the logits if they are wanted, and the largest of the row; NaN beats everything.
    void best_of_row(int64_t row, int64_t panel, const float *c) const {
        const int64_t first = panel * PANEL;
        float highest_yet = best.value[row];
        for (int64_t i = 0; i < PANEL && first + i < op.n; i += Vec::W) {
            const int64_t left = op.n - first - i;
            const Vec x = rounded_to<T>(capped(output(c, first, i), op.softcap));
            if (logits) put<float>(logits + row * logits_stride + first + i, x, left);
            const Vec seen = first_lanes(x, left, -INFINITY);
            const float top = has_nan(seen) ? NAN : highest(seen);
            if (top > highest_yet || top != top) {
                highest_yet = top;
                best.value[row] = top;
                best.id[row] = first + i + (top == top ? __builtin_ctz(equal(seen, set(top))) : 0);
            }
        }
    }

    void operator()(int64_t row, int64_t rows, int64_t panel, const float *c) const {
        for (int64_t r = 0; r < rows; r++) {
            if (op.epilogue == TM_LOGITS) best_of_row(row + r, panel, c + r * PANEL);
            else store_row(row + r, panel, c + r * PANEL);
        }
    }
};
