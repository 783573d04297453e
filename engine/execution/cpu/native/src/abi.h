// The C interface of the library, mirrored by engine/execution/cpu/native/library.py. Sizes in elements unless a name says
// otherwise; every pointer stays the caller's and must outlive what it was given to. No function raises or exits: those
// that can fail return a code or NULL and write one line to `error`.
#pragma once

#include <stdint.h>

#define TM_ABI 15

enum tm_level : int32_t { TM_AVX2, TM_AVX512, TM_BF16, TM_AMX, TM_LEVELS };
enum tm_type : int32_t { TM_FLOAT32, TM_FLOAT16, TM_BFLOAT16 };
enum tm_kind : int32_t { TM_EMBED, TM_ANGLES, TM_NORM, TM_GATHER_NORM, TM_LINEAR, TM_ROPE_KV, TM_ATTEND, TM_MERGE, TM_BEST, TM_QUANTIZE, TM_GATHER, TM_KINDS };
enum tm_epilogue : int32_t { TM_PLAIN, TM_SWIGLU, TM_GELU, TM_GELU_TANH, TM_RELU, TM_LOGITS, TM_GEGLU };
// How a linear layer computes with integers of 8 bits: not at all, by pairs of 16 bits (any level), by products of bytes.
enum tm_int8 : int32_t { TM_NO_INT8, TM_WORDS, TM_BYTES };
// Type of the pool's cells: that of the model, or integers of 8 bits with scales (cells.h).
enum tm_int8_cache : int32_t { TM_EXACT_CACHE, TM_INT8_CACHE };
enum tm_result : int32_t { TM_DONE, TM_TOO_MANY, TM_BAD_CHUNK, TM_BAD_TOKEN, TM_BAD_BLOCK, TM_NO_MEMORY };

// The model, as far as operations need to know it. `max_tokens`, `max_samples`: rows of the buffers of the operations.
// A head of q and k has `head_dim` elements, one of v `value_dim`; a token's cell in the pool has `cell`, of which all heads
// of k, or of v, are the first. In 8 bits the three say the same: value_dim is head_dim, and cell kv_heads * head_dim.
struct tm_shape {
    int64_t heads, kv_heads, head_dim, value_dim, cell, rotary_dim, hidden, layers, vocab;
    int64_t block_size, pool_units, num_rows, max_blocks, max_positions;
    int64_t max_tokens, max_samples;
    int64_t rounds_once;  // whether RMS norms round behind the weight alone, 0 or 1; else in front of it, too
    int64_t int8_cache;  // tm_int8_cache: which numbers the pool holds
    int32_t level, type;
    float scale, rotary_scaling;
    const float *inverse_frequencies;  // [rotary_dim / 2]
    const float *long_frequencies;     // [rotary_dim / 2] of rows that are `is_long`; NULL: as all others
};

// One operation. Rows of activations lie `*_stride` elements apart; an element is float on TM_AVX2 and TM_AVX512 (rounded
// to the model's type), bfloat16 on TM_BF16 and TM_AMX. Norm weights, biases and q/k norms are float.
//   EMBED        weight [vocab, hidden], times `scale` if that is not 0, and `other` (learned positions, offset n; or NULL) of
//                the model's type -> out
//   ANGLES       cosines, then sines of the step's positions, float [tokens][rotary_dim] -> out; by frequencies in `in`, float
//                [rotary_dim / 2], times `scale`, if that is not NULL, else by those of the model
//   NORM         residual += in (+ other first, if not NULL); out = norm(residual). in NULL: no addition. bias: layer norm
//   GATHER_NORM  the same of the tokens that sample, residual left as it is
//   GATHER       rows of `in` [tokens, n] that sample -> out [samples, n]
//   LINEAR       in [rows, k] * packed weight [n, k] + bias -> out; see tm_epilogue. LOGITS, of rows that sample, writes
//                float32, capped by `softcap`. SWIGLU, GEGLU: weight packed in halves, out
//                [rows, n / 2]; GEGLU has GELU by tanh. Rows are padded to a multiple of 32 inputs, with zeros; on TM_AMX
//                as many rows as make a multiple of 32 must be readable
//   ROPE_KV      norms (weight [heads + kv_heads, head_dim] or NULL) and rotates q and k of `out` in place by the angles in
//                `in` (NULL: not at all), halves against each other; writes k and v to the pool
//   ATTEND       q of in -> out [tokens, heads * value_dim]; n: a query sees itself and the n - 1 tokens before it, 0: all,
//                n < 0: the tokens before it from the last multiple of -n on.
//                `softcap` c, if not 0: a score s becomes c * tanh(s / c). `other`: sinks, float [heads], or NULL: a score of
//                each head that takes part in the softmax and has no value. MERGE joins the parts of contexts that were
//                split, and takes the same sinks: they are of whole contexts, not of parts
//   QUANTIZE     rows of `in` to integers in `out`, their scales to `residual`, float [rows]. With `int8` a LINEAR layer reads
//                these: in, scales, a weight of tm_pack_int8; int8 of both is the same. Strides in elements, for which 2
//                bytes are enough. With `group` (32, 64 or 128; k is a multiple) the weight is one of tm_pack_int4 with so
//                many inputs in a group, and scales are float [rows][k / group][2]: of each group, and the sum of its
//                integers
//   BEST         the largest logit of every row that samples, and its lowest id
// With `sampled` NORM, LINEAR and QUANTIZE have the rows that sample, gathered; ATTEND and MERGE those alone, in their places.
struct tm_op {
    int32_t kind, epilogue, layer, halves;
    int64_t n, k;
    int64_t in_stride, out_stride;
    const void *in, *other, *weight;
    const float *bias, *scales;
    void *out, *residual;
    float eps, scale, softcap;
    int32_t int8, sampled, group;
};

// A weight of 4 bits: values [n][k / 2], the first of two inputs in the lower bits; scales (IEEE halves) and zeros
// [n][k / group]; base [n].
struct tm_int4 {
    uint8_t *values;
    uint16_t *scales;
    uint8_t *zeros;
    float *base;
};

// One step. `chunks` [num_chunks][4]: row, start, length, whether its last token samples. `tokens` [num_rows][token_stride],
// `k_table`, `v_table` [num_rows][table_stride]: units of the pool; `num_blocks` [num_rows]. `logits`
// [samples][logits_stride] float32, NULL: not kept. `best`, `best_id` [samples]. `is_long` [num_rows], 0 or 1: which
// frequencies rotate a row's q and k; NULL: none is. `num_prompt` [num_rows]: tokens of a row's prompt, whose attention has
// the same result in a chunk of any length; NULL: 0.
struct tm_step {
    int64_t num_chunks, token_stride, table_stride, logits_stride;
    const int64_t *chunks, *tokens, *k_table, *v_table, *num_blocks;
    void *pool;
    float *logits, *best;
    int64_t *best_id;
    const uint8_t *is_long;
    const int64_t *num_prompt;
};

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

int32_t tm_abi(void);
int64_t tm_struct_bytes(int32_t which);  // 0 shape, 1 op, 2 step: what library.py must agree with
int32_t tm_has_level(int32_t level);     // whether processor and system can run it
int32_t tm_has_int8(int32_t level, int32_t int8);

// Threads that work on steps, the caller's included. They start with the first step and sleep between steps.
void *tm_team_new(int32_t threads, char *error, int64_t size);
void tm_team_delete(void *team);
void tm_team_resize(void *team, int32_t threads);  // takes effect with the next step
int32_t tm_team_threads(void *team);
void tm_team_stop(void *team);  // ends its threads until the next step; done by itself before a fork

// A checked sequence of operations. NULL if a size or pointer is wrong.
void *tm_tape_new(const struct tm_shape *shape, const struct tm_op *ops, int64_t count, char *error, int64_t size);
void tm_tape_delete(void *tape);
int32_t tm_tape_run(void *tape, void *team, const struct tm_step *step);  // tm_result
// The same in parts, where weights come and go: a step is checked and planned, then its operations run in order, those in
// [first, last) per call. In between a linear operation's weight may move. The step must outlive its last part.
int32_t tm_tape_begin(void *tape, void *team, const struct tm_step *step);
int32_t tm_tape_run_ops(void *tape, void *team, int64_t first, int64_t last);
int32_t tm_tape_set_weight(void *tape, int64_t op, const void *weight);

// One linear layer on its own: in and out as in tm_op, `rows` of them. With op->int8 `in` are activations all the same, and
// `scales` is not used.
int32_t tm_linear(int32_t level, int32_t type, const struct tm_op *op, int64_t rows, void *team);

// Weights [n, k], row-major, to panels and back. `halves`: outputs i and n / 2 + i lie side by side.
int64_t tm_packed_bytes(int32_t type, int64_t n, int64_t k);
void tm_pack(int32_t type, int64_t n, int64_t k, int32_t halves, const void *from, void *to);
void tm_unpack(int32_t type, int64_t n, int64_t k, int32_t halves, const void *from, void *to);

// The same of integers -127 .. 127 with a scale for each output.
int64_t tm_int8_bytes(int64_t n, int64_t k);
void tm_pack_int8(int64_t n, int64_t k, int32_t halves, const int8_t *from, const float *scales, void *to);
void tm_unpack_int8(int64_t n, int64_t k, int32_t halves, const void *from, int8_t *to, float *scales);

// The same of integers 0 .. 15 by groups of inputs: (value - zero) * scale * base.
int64_t tm_int4_bytes(int64_t n, int64_t k, int64_t group);
void tm_pack_int4(int64_t n, int64_t k, int64_t group, int32_t halves, const struct tm_int4 *from, void *to);
void tm_unpack_int4(int64_t n, int64_t k, int64_t group, int32_t halves, const void *from, const struct tm_int4 *to);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
