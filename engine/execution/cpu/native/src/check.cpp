// What the tape's operations need of sizes and pointers, said before anything runs.
#include <string>

#include "pack.h"
#include "tape.h"

namespace tide {

namespace {

constexpr int64_t LARGEST = int64_t(1) << 40;

bool is_size(int64_t n) { return n > 0 && n < LARGEST; }
bool is_group(const tm_op &op) { return !op.group || (op.int8 && (op.group == 32 || op.group == 64 || op.group == 128) && op.k % op.group == 0); }

}  // namespace

std::string check_shape(const tm_shape &s) {
    for (int64_t size : {s.heads, s.kv_heads, s.head_dim, s.value_dim, s.cell, s.hidden, s.layers, s.vocab, s.block_size, s.pool_units, s.num_rows,
                         s.max_blocks, s.max_positions, s.max_tokens, s.max_samples})
        if (!is_size(size)) return "a size is not positive";
    if (s.heads % s.kv_heads) return "heads are not a multiple of kv_heads";
    if (s.heads > 65536 || most(s.head_dim, s.value_dim) > 65536) return "too many heads, or too large ones";
    if (s.rotary_dim < 0 || s.rotary_dim % 2 || s.rotary_dim > s.head_dim) return "rotary_dim does not fit in a head";
    if (s.rotary_dim && !s.inverse_frequencies) return "frequencies are missing";
    if (s.rounds_once != 0 && s.rounds_once != 1) return "unknown rounding of norms";
    if (s.int8_cache < TM_EXACT_CACHE || s.int8_cache > TM_INT8_CACHE) return "unknown type of the cache";
    if (s.cell < s.kv_heads * most(s.head_dim, s.value_dim)) return "a cell is narrower than what it holds";
    if (s.int8_cache != TM_EXACT_CACHE && (s.value_dim != s.head_dim || s.cell != s.kv_heads * s.head_dim)) return "cells of 8 bits are as wide as K and V, which are of one width";
    if (s.type < TM_FLOAT32 || s.type > TM_BFLOAT16) return "unknown type";
    return "";
}

std::string check_linear(const tm_op &op) {
    if (!is_size(op.n) || !is_size(op.k)) return "a linear layer without inputs or outputs";
    if (op.in_stride < round_up(op.k, K_STEP)) return "rows of a linear layer's input are not padded";
    if (op.halves && op.n % 2) return "halves of an odd number of outputs";
    if (op.int8 < TM_NO_INT8 || op.int8 > TM_BYTES) return "unknown kind of integers";
    if (op.int8 && op.k > MOST_INT8_INPUTS) return "too many inputs for integers";
    if (!is_group(op)) return "groups of 4 bits that are not of 32, 64 or 128 inputs, or do not divide them";
    if (op.epilogue < TM_PLAIN || op.epilogue > TM_GEGLU) return "unknown epilogue";
    const bool gated = op.epilogue == TM_SWIGLU || op.epilogue == TM_GEGLU;
    if (gated && !op.halves) return "SwiGLU and GEGLU need a weight packed in halves";
    if (op.halves && !gated && op.epilogue != TM_PLAIN) return "halves with another epilogue than SwiGLU or GEGLU";
    if (!(op.softcap >= 0)) return "a softcap below zero";
    if (!op.in || !op.weight) return "a linear layer without input or weight";
    if (op.epilogue == TM_LOGITS) return "";
    if (!op.out || op.out_stride < (gated ? op.n / 2 : op.n)) return "a linear layer without room for its outputs";
    return "";
}

std::string check_op(const tm_op &op, const tm_shape &s) {
    const int64_t width = (s.heads + s.kv_heads) * s.head_dim + s.kv_heads * s.value_dim, gathered = s.heads * s.value_dim;
    if (op.layer < 0 || op.layer >= s.layers) return "no such layer";
    if (op.sampled != 0 && op.sampled != 1) return "rows that are neither all nor those that sample";
    if (op.kind == TM_LINEAR && op.epilogue == TM_LOGITS && !op.sampled) return "logits of rows that do not sample";
    switch (op.kind) {
        case TM_EMBED:
            return op.weight && op.out && op.out_stride >= s.hidden && op.n >= 0 ? "" : "embedding: weight, out or its stride";
        case TM_ANGLES: return op.out && s.rotary_dim ? "" : "angles: out, or no rotary embedding";
        case TM_NORM:
        case TM_GATHER_NORM:
            if (op.other && !op.in) return "norm: a second addend without a first";
            if (!op.out || op.out_stride < op.k) return "norm: out or its stride";
            return is_size(op.k) && op.weight && op.residual && op.in_stride >= op.k ? "" : "norm: a pointer or stride";
        case TM_GATHER: return is_size(op.n) && op.in && op.out && least(op.in_stride, op.out_stride) >= op.n ? "" : "gather: a pointer or stride";
        case TM_LINEAR: return op.int8 && !op.scales ? "a linear layer on integers without their scales" : check_linear(op);
        case TM_QUANTIZE:
            if (op.int8 != TM_WORDS && op.int8 != TM_BYTES) return "unknown kind of integers";
            if (!is_group(op)) return "groups of integers that are not of 32, 64 or 128 inputs, or do not divide them";
            return is_size(op.k) && op.in && op.out && op.residual && least(op.in_stride, op.out_stride) >= round_up(op.k, K_STEP) ? "" : "integers: a pointer or stride";
        case TM_ROPE_KV: return op.out && op.out_stride >= width ? "" : "rope: out or its stride";
        case TM_ATTEND:
            if (!(op.softcap >= 0)) return "attention: a softcap below zero";
            return op.in && op.out && op.n > -LARGEST && op.in_stride >= width && op.out_stride >= gathered ? "" : "attention: a pointer or stride";
        case TM_MERGE: return op.out && op.out_stride >= gathered ? "" : "merge: out or its stride";
        case TM_BEST: return "";
        default: return "unknown operation";
    }
}

}  // namespace tide
