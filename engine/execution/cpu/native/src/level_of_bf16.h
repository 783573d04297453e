// What levels that work on bfloat16 activations have in common.

Kernels kernels_of_bf16(const char *name, decltype(Kernels::linear) linear, decltype(Kernels::attend_tile) tile, void (*enter)(), void (*leave)()) {
    using R = Rows<bf16, bf16>;
    using A = Attention<bf16, bf16>;
    return {name, sizeof(bf16), R::embed, R::angles, R::norm, R::rope_kv, linear, A::decode, tile, A::merge, enter, leave};
}
