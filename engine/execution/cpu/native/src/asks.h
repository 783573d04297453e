// Weights come from memory while sums are made only if they are asked for early enough: while a block of a panel is taken,
// pass by pass, what lies behind it is asked for, evenly. For kernels that take a panel in blocks.

constexpr int64_t STRIDE = 16;  // inputs between two requests

struct Asks {
    const char *next;
    int64_t lines;  // of a request

    // `input`: bytes of the weights of one input; `passes` over the block.
    Asks(const void *next, int64_t input, int64_t passes) : next((const char *)next), lines(divide_up(STRIDE * input / 64, passes)) {}
    void operator()() {
        for (int64_t i = 0; i < lines; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    }
};
