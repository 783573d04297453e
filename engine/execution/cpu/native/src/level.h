// The table of a level that works on float activations; included behind elementwise.h, linear.h and attention.h.

template <class T> const Kernels *float_kernels(const char *name) {
    static const Kernels kernels = {
        name,
        sizeof(float),
        Rows<T, float>::embed,
        Rows<T, float>::angles,
        Rows<T, float>::norm,
        {{Rows<T, float>::template rope_kv<T>, Attention<T, float>::decode, Attention<T, float>::tile},
         {Rows<T, float>::template rope_kv<int8_t>, Attention<T, float, int8_t>::decode, Attention<T, float, int8_t>::tile}},
        Linear<T>::run,
        Rows<T, float>::gather,
        Attention<T, float>::merge,
        nullptr,
        nullptr,
    };
    return &kernels;
}

const Kernels *float_kernels(const char *name, int32_t type) {
    switch (type) {
        case TM_FLOAT32: return float_kernels<float>(name);
        case TM_FLOAT16: return float_kernels<f16>(name);
        case TM_BFLOAT16: return float_kernels<bf16>(name);
        default: return nullptr;
    }
}
