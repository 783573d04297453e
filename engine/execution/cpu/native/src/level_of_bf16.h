// What levels that work on bfloat16 activations have in common. Tile<C>: what takes tiles of queries.

template <template <class> class Tile> Kernels kernels_of_bf16(const char *name, decltype(Kernels::linear) linear, void (*enter)(), void (*leave)()) {
    using R = Rows<bf16, bf16>;
    using A = Attention<bf16, bf16>;
    using A8 = Attention<bf16, bf16, int8_t>;
    return {
        name,
        sizeof(bf16),
        R::embed,
        R::angles,
        R::norm,
        {{R::rope_kv<bf16>, A::decode, Tile<bf16>::tile}, {R::rope_kv<int8_t>, A8::decode, Tile<int8_t>::tile}},
        linear,
        R::gather,
        A::merge,
        enter,
        leave,
    };
}
