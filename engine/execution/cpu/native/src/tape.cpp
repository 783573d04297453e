#include "tape.h"

#include <math.h>
#include <unistd.h>

namespace tide {

namespace {

constexpr int64_t CHUNKS = 12;       // of an operation, for each thread: small enough to even out, large enough to pay
constexpr int64_t MOST_PANELS = 16;  // of a chunk
constexpr int64_t LARGE_ROWS = 32;   // of a chunk of a row operation
constexpr int64_t MOST_PIECES = 8192;

int64_t cache_bytes() {
    static const int64_t bytes = [] {
        const long found = sysconf(_SC_LEVEL2_CACHE_SIZE);
        return int64_t(found > 0 ? found : 1 << 20);
    }();
    return bytes;
}

}  // namespace

int64_t scratch_bytes(const tm_shape &s) {
    const int64_t group = s.heads / s.kv_heads, padded = round_up(most(s.head_dim, s.value_dim), 32);
    const int64_t rows = round_up(most(group, TILE_ROWS), 16) + 16;
    const int64_t pointers = 2 * (2 * SPLIT + ON_THE_WAY);  // each as large as two floats
    const int64_t decode = s.heads * (TILE_KEYS + 2 * padded + 2) + pointers;
    const int64_t tile = rows * (3 * padded + TILE_KEYS + 4) + 2 * padded * TILE_KEYS;
    const int64_t columns = divide_up(rows, 32) * (TILE_KEYS * 48 + 96 + 48 * padded) + TILE_KEYS * padded;
    return most(most(decode, tile), columns) * int64_t(sizeof(float)) + 4096;
}

LinearCut::LinearCut(const tm_op &op, int64_t rows, const Kernels &kernels, const Integers *integers, int threads)
    : rows(rows), panels(divide_up(op.n, PANEL)) {
    const int64_t activation_bytes = integers ? integers->element_bytes : kernels.activation_bytes, weight_bytes = integers ? 1 : 2;
    const int64_t third = cache_bytes() / 3, depth = round_up(op.k, K_STEP);
    row_block = least(rows, most(48, third / (depth * activation_bytes) / 48 * 48));
    const int64_t fit = most(1, third / (depth * PANEL * weight_bytes)), even = panels / (threads * CHUNKS);
    group = most(1, least(row_block < rows ? fit : MOST_PANELS, most(even, row_block < rows ? 4 : 1)));
    while (chunks() > Team::MAX_CHUNKS) row_block *= 2, group *= 2;
}

Span LinearCut::rows_of(int64_t chunk) const {
    const int64_t first = chunk / groups() * row_block;
    return {first, least(rows, first + row_block)};
}
Span LinearCut::panels_of(int64_t chunk) const {
    const int64_t first = chunk % groups() * group;
    return {first, least(panels, first + group)};
}

Tape::Tape(const tm_shape &shape, const tm_op *ops, int64_t count, const Kernels &kernels)
    : shape_(shape), inverse_frequencies_(shape.inverse_frequencies, shape.inverse_frequencies + shape.rotary_dim / 2),
      long_frequencies_(shape.long_frequencies, shape.long_frequencies + (shape.long_frequencies ? shape.rotary_dim / 2 : 0)),
      ops_(ops, ops + count), kernels_(kernels), integers_{}, plan_(shape_) {
    for (int32_t int8 : {TM_WORDS, TM_BYTES})
        for (bool four : {false, true}) integers_[int8][four] = integers_of(shape.level, shape.type, int8, four);
    shape_.inverse_frequencies = inverse_frequencies_.data();
    if (shape.long_frequencies) shape_.long_frequencies = long_frequencies_.data();
}

tm_result Tape::begin_step(Team &team, const tm_step &step) {
    threads_ = team.size();
    if (const tm_result result = plan_.make(step, threads_)) return result;
    best_ = step.best, best_id_ = step.best_id;
    return TM_DONE;
}

tm_result Tape::run_ops(Team &team, int64_t first, int64_t last) {
    if (first < 0 || last > count() || first > last) return TM_BAD_CHUNK;
    while (int(scratch_.size()) < team.size()) scratch_.emplace_back(size_t(scratch_bytes(shape_)));
    first_ = first, last_ = last;
    if (first < last) team.run(*this);
    return TM_DONE;
}

tm_result Tape::set_weight(int64_t op, const void *weight) {
    if (op < 0 || op >= count() || ops_[size_t(op)].kind != TM_LINEAR || !weight) return TM_BAD_CHUNK;
    ops_[size_t(op)].weight = weight;
    return TM_DONE;
}

Job::Leave Tape::enter() {
    if (kernels_.enter) kernels_.enter();
    return kernels_.leave;
}

int64_t Tape::begin(int64_t part_op, int threads) {
    const int64_t op = first_ + part_op;
    threads_ = threads;
    return chunks_of(ops_[size_t(op)], threads);
}

int64_t Tape::chunks_of(const tm_op &op, int threads) {
    const int64_t samples = plan_.view.samples;
    int64_t rows = op.sampled ? samples : plan_.view.tokens;
    switch (op.kind) {
        case TM_LINEAR: {
            if (rows == 0) return 0;
            cut_.assign(1, LinearCut(op, rows, kernels_, integers(op), threads));
            if (op.epilogue == TM_LOGITS) {
                best_chunks_ = cut_[0].groups();
                chunk_best_.assign(size_t(best_chunks_ * rows), -INFINITY);
                chunk_best_id_.assign(size_t(best_chunks_ * rows), 0);
            }
            return cut_[0].chunks();
        }
        case TM_ATTEND: {
            const int64_t pieces = num_pieces(op);
            pieces_per_chunk_ = divide_up(pieces, MOST_PIECES);
            return divide_up(pieces, most(pieces_per_chunk_, 1));
        }
        case TM_BEST: return samples > 0;
        case TM_MERGE: rows = plan_.num_slots ? rows : 0; break;
        case TM_GATHER:
        case TM_GATHER_NORM: rows = samples; break;
        default: break;
    }
    rows_per_chunk_ = most(1, least(LARGE_ROWS, rows / (threads * 4)));
    return divide_up(rows, rows_per_chunk_);
}

Span Tape::rows_of(int64_t chunk, int64_t count) const {
    return {chunk * rows_per_chunk_, least(count, (chunk + 1) * rows_per_chunk_)};
}

void Tape::run(int64_t index, int64_t chunk, int thread) {
    const tm_op &op = ops_[size_t(first_ + index)];
    const View &view = plan_.view;
    const int64_t rows = op.sampled ? view.samples : view.tokens;
    switch (op.kind) {
        case TM_EMBED: return kernels_.embed(view, op, rows_of(chunk, view.tokens));
        case TM_ANGLES: return kernels_.angles(view, op, rows_of(chunk, view.tokens));
        case TM_NORM: return kernels_.norm(view, op, rows_of(chunk, rows));
        case TM_GATHER: return kernels_.gather(view, op, rows_of(chunk, view.samples));
        case TM_GATHER_NORM: return kernels_.norm(view, op, rows_of(chunk, view.samples));
        case TM_ROPE_KV: return kernels_.cache[shape_.int8_cache == TM_INT8_CACHE].rope_kv(view, op, rows_of(chunk, view.tokens));
        case TM_MERGE: return kernels_.merge(view, op, rows_of(chunk, rows));
        case TM_LINEAR: return run_linear(op, chunk);
        case TM_ATTEND: return attend(op, chunk, thread);
        case TM_BEST: return take_best();
        case TM_QUANTIZE: return integers(op)->quantize(op, rows_of(chunk, rows));
    }
}

void Tape::run_linear(const tm_op &op, int64_t chunk) {
    const LinearCut &cut = cut_[0];
    Best best{nullptr, nullptr, plan_.view.in_prompt};
    if (op.epilogue == TM_LOGITS) {
        const size_t first = size_t(chunk % cut.groups() * cut.rows);
        best = {&chunk_best_[first], &chunk_best_id_[first], best.as_many};
    }
    const auto linear = op.int8 ? integers(op)->linear : kernels_.linear;
    linear(op, cut.rows_of(chunk), cut.panels_of(chunk), plan_.view.logits, plan_.view.logits_stride, best);
}

void Tape::attend(const tm_op &op, int64_t chunk, int thread) {
    char *room = scratch_[size_t(thread)].data();
    room += -uintptr_t(room) & 63;
    const int64_t first = chunk * pieces_per_chunk_, last = least(num_pieces(op), first + pieces_per_chunk_);
    for (int64_t i = first; i < last; i++) {
        const Piece &piece = plan_.pieces[size_t(op.sampled ? plan_.sampled_pieces[size_t(i)] : i)];
        const CacheKernels &kernels = kernels_.cache[shape_.int8_cache == TM_INT8_CACHE];
        if (piece.keys == 0) kernels.attend_tile(plan_.view, op, piece, room);
        else kernels.attend_decode(plan_.view, op, piece, room);
    }
}

void Tape::take_best() {
    const int64_t samples = plan_.view.samples;
    for (int64_t i = 0; i < samples; i++) {
        best_[i] = -INFINITY, best_id_[i] = 0;
        for (int64_t c = 0; c < best_chunks_; c++) {
            const float value = chunk_best_[size_t(c * samples + i)];
            if (value > best_[i] || value != value) best_[i] = value, best_id_[i] = chunk_best_id_[size_t(c * samples + i)];
        }
    }
}

}  // namespace tide
