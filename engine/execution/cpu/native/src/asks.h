// Prefetch of the next block of a panel while the current block is multiplied, for kernels that process a panel in blocks.
// Requests are spread over the block: more lines at once than the core has fill buffers (10 to 16) would delay its loads.

// Inputs between two requests, for weights of type T. With 16 lanes: 8 lines if there is one pass over the block; with 8 lanes
// shorter loops cost more than the spread gains.
template <class T> constexpr int64_t STRIDE = Vec::W == 16 ? 16 / int64_t(sizeof(T)) : 16;

struct Asks {
    const char *next, *end;
    int64_t lines;  // of a request

    // `bytes` of the next block; `requests` during the current one.
    Asks(const void *next, int64_t bytes, int64_t requests) : next((const char *)next), end(this->next + bytes), lines(divide_up(bytes, 64 * requests)) {}
    void operator()() {
        for (int64_t i = 0; i < lines && next < end; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    }
};
