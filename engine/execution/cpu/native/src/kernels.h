// What a level of instruction sets offers the tape: a table of functions, each of which runs a part of an operation.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "abi.h"

namespace tide {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

constexpr int64_t PANEL = 32;       // outputs of a panel of a packed weight
constexpr int64_t K_STEP = 32;      // inputs are padded to a multiple of it: weights with zeros, activations too
constexpr int64_t SPLIT = 256;      // keys of a part of a context: parts are summed one after the other, in any chunk
constexpr int64_t ON_THE_WAY = 32;  // keys of a decode that are asked for before they are needed
constexpr int64_t MANY = 8;         // queries of a chunk from which attention works in tiles
constexpr int64_t TILE_KEYS = 64;   // keys that a tile of queries takes at a time
constexpr int64_t TILE_ROWS = 96;   // (query, head) pairs of such a tile, about
constexpr int64_t INT8_HEAD = 2 * 4 * PANEL;  // bytes in front of a panel of integers: scales, and sums of its weights
constexpr int64_t MOST_INT8_INPUTS = 65536;   // of which a sum of products of bytes fits in 32 bits
constexpr int64_t INT4_HEAD = 4 * PANEL;       // bytes in front of a panel of 4 bits: powers of two that scales are multiples of
constexpr int64_t INT4_GROUP_HEAD = 3 * PANEL; // bytes in front of a group: scales, and zero points
constexpr int64_t PARTIAL = 16;     // floats in front of a head's partial result: its maximum and its sum

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// The first token that a query at `position` sees of its context, by the window (n > 0) or the chunks (n < 0) of its layer.
inline int64_t first_seen(const tm_op &op, int64_t position) {
    return op.n > 0 ? most(0, position + 1 - op.n) : op.n < 0 ? position - position % -op.n : 0;
}

inline int64_t int8_panel_bytes(int64_t k) { return INT8_HEAD + round_up(k, K_STEP) * PANEL; }

inline int64_t int4_group_bytes(int64_t group) { return INT4_GROUP_HEAD + group * PANEL / 2; }
inline int64_t int4_panel_bytes(int64_t k, int64_t group) { return INT4_HEAD + k / group * int4_group_bytes(group); }
// Floats that go with a row of integers: its scale, or of each group its scale and the sum of its integers.
inline int64_t row_scales(const tm_op &op) { return op.group ? 2 * (op.k / op.group) : 1; }

struct Span { int64_t first, last; };

// One chunk of a step: its tokens are `first` .. `first + length` of the step and `start` .. of the request.
struct Chunk {
    int64_t first, start, length;
    const int64_t *k_table, *v_table;
    bool samples, tiled;  // `tiled`: attention works in tiles of queries
};

// A part of attention: `queries` of a chunk from `query` on. Tiles of queries take one KV head and all keys that they see;
// a decode takes some KV heads and `keys` from `key` on, and leaves a partial result in `slot` if that is not all of them.
// What is summed in which order depends on a query's position alone, not on the step.
struct Piece {
    int32_t chunk, kv_head, kv_heads;
    int64_t query, queries, key, keys, slot;
};

// A step as the kernels see it.
struct View {
    const tm_shape *shape;
    int64_t tokens, samples;
    bool in_prompt;  // whether tokens of a prompt are among them
    const int64_t *ids, *positions, *k_cells, *v_cells;  // of every token; cells of layer 0
    const uint8_t *is_long;                              // of every token
    const int64_t *sampled;                              // tokens that sample
    const Chunk *chunks;
    const Piece *pieces, *pieces_end;
    const int64_t *slot, *parts;  // of every token: its first partial result, and how many (0: none)
    float *partial;               // [slots][heads][PARTIAL + value_dim rounded up to 16]
    void *pool;
    float *logits;
    int64_t logits_stride;
    float *chunk_best;       // [chunks of the logits][samples]
    int64_t *chunk_best_id;

    int64_t partial_stride() const { return PARTIAL + round_up(shape->value_dim, 16); }
};

// Where one chunk of a linear layer puts the largest logits of its outputs; NULL for other layers. `as_many`: few rows are
// summed in the order of many.
struct Best {
    float *value;
    int64_t *id;
    bool as_many;
};

// What writes and reads the pool, by its type.
struct CacheKernels {
    void (*rope_kv)(const View &, const tm_op &, Span tokens);
    void (*attend_decode)(const View &, const tm_op &, const Piece &, char *scratch);
    void (*attend_tile)(const View &, const tm_op &, const Piece &, char *scratch);
};

struct Kernels {
    const char *name;
    int64_t activation_bytes;
    void (*embed)(const View &, const tm_op &, Span tokens);
    void (*angles)(const View &, const tm_op &, Span tokens);
    void (*norm)(const View &, const tm_op &, Span rows);  // of samples for GATHER_NORM
    CacheKernels cache[2];  // for pools in the model's type, and for TM_INT8_CACHE
    void (*linear)(const tm_op &, Span rows, Span panels, float *logits, int64_t logits_stride, Best best);
    void (*gather)(const View &, const tm_op &, Span samples);
    void (*merge)(const View &, const tm_op &, Span rows);
    void (*enter)();
    void (*leave)();
};

// Linear layers on integers. `element_bytes`: of an input, as `quantize` writes and `linear` reads them.
struct Integers {
    int64_t element_bytes;
    void (*quantize)(const tm_op &, Span rows);
    void (*linear)(const tm_op &, Span rows, Span panels, float *logits, int64_t logits_stride, Best best);
};

// Two tables, for weights of 8 bits and of 4. NULL: there is none for this type. `narrow`: activations are bfloat16.
const Integers *avx2_words(int32_t type);
const Integers *avx2_bytes(int32_t type);
const Integers *avx512_words(int32_t type, bool narrow);
const Integers *avx512_bytes(int32_t type, bool narrow);
const Kernels *avx2_kernels(int32_t type);
const Kernels *avx512_kernels(int32_t type);
const Kernels *bf16_kernels(int32_t type);
const Kernels *amx_kernels(int32_t type);

int64_t scratch_bytes(const tm_shape &shape);  // of one thread, for attention

}  // namespace tide
