#include "plan.h"

namespace tide {

Plan::Plan(const tm_shape &shape) : shape_(shape) {
    view.shape = &shape_;
    for (auto *each : {&ids_, &positions_, &k_cells_, &v_cells_, &slot_, &parts_}) each->reserve(size_t(shape.max_tokens));
    is_long_.reserve(size_t(shape.max_tokens));
    sampled_.reserve(size_t(shape.max_samples));
}

tm_result Plan::make(const tm_step &step, int threads) {
    if (const tm_result result = check(step)) return result;
    place_tokens(step);
    pieces.clear();
    num_slots = 0;
    int64_t decodes = 0;
    for (const Chunk &chunk : chunks_) decodes += chunk.tiled ? 0 : chunk.length;
    for (int32_t i = 0; i < int32_t(chunks_.size()); i++)
        if (chunks_[size_t(i)].tiled) cut_tiles(i);
    for (int32_t i = 0; i < int32_t(chunks_.size()); i++)
        if (!chunks_[size_t(i)].tiled) cut_decodes(i, 2 * threads / most(decodes, 1));
    find_sampled();
    partial_.resize(size_t(num_slots * shape_.heads * view.partial_stride()));
    view.tokens = int64_t(ids_.size()), view.samples = int64_t(sampled_.size());
    view.ids = ids_.data(), view.positions = positions_.data(), view.is_long = is_long_.data();
    view.k_cells = k_cells_.data(), view.v_cells = v_cells_.data(), view.sampled = sampled_.data();
    view.chunks = chunks_.data(), view.pieces = pieces.data(), view.pieces_end = pieces.data() + pieces.size();
    view.slot = slot_.data(), view.parts = parts_.data(), view.partial = partial_.data();
    view.pool = step.pool, view.logits = step.logits, view.logits_stride = step.logits_stride;
    return TM_DONE;
}

tm_result Plan::check(const tm_step &step) const {
    int64_t tokens = 0, samples = 0;
    if (step.num_chunks < 0 || step.num_chunks > shape_.max_tokens) return TM_TOO_MANY;
    for (const int64_t *c = step.chunks, *end = c + 4 * step.num_chunks; c < end; c += 4) {
        const int64_t row = c[0], start = c[1], length = c[2];
        if (row < 0 || row >= shape_.num_rows || start < 0 || length < 1) return TM_BAD_CHUNK;
        if (length > shape_.max_tokens || start > shape_.max_positions - length) return TM_BAD_CHUNK;
        tokens += length, samples += c[3] != 0;
        if (tokens > shape_.max_tokens || samples > shape_.max_samples) return TM_TOO_MANY;
        const int64_t blocks = divide_up(start + length, shape_.block_size);
        if (step.num_blocks[row] > shape_.max_blocks || blocks > step.num_blocks[row]) return TM_BAD_CHUNK;
        for (const int64_t *id = step.tokens + row * step.token_stride + start, *last = id + length; id < last; id++)
            if (*id < 0 || *id >= shape_.vocab) return TM_BAD_TOKEN;
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t k = step.k_table[row * step.table_stride + i], v = step.v_table[row * step.table_stride + i];
            for (const int64_t unit : {k, v})
                if (unit < 0 || unit >= shape_.pool_units) return TM_BAD_BLOCK;
        }
    }
    return TM_DONE;
}

void Plan::place_tokens(const tm_step &step) {
    const int64_t size = shape_.block_size, unit = shape_.layers * size;
    for (auto *each : {&ids_, &positions_, &k_cells_, &v_cells_, &sampled_}) each->clear();
    is_long_.clear();
    chunks_.clear();
    view.in_prompt = false;
    for (const int64_t *c = step.chunks, *end = c + 4 * step.num_chunks; c < end; c += 4) {
        const int64_t row = c[0], start = c[1], length = c[2];
        const int64_t *k_table = step.k_table + row * step.table_stride, *v_table = step.v_table + row * step.table_stride;
        const int64_t *ids = step.tokens + row * step.token_stride;
        // With products of bfloat16, many rows round otherwise than few: a prompt's last tokens are computed as many, so
        // that they are the same behind a cached prefix.
        const bool in_prompt = shape_.level >= TM_BF16 && step.num_prompt && start + length <= step.num_prompt[row];
        view.in_prompt |= in_prompt;
        chunks_.push_back({int64_t(ids_.size()), start, length, k_table, v_table, c[3] != 0, length >= MANY || in_prompt});
        for (int64_t at = start; at < start + length; at++) {
            ids_.push_back(ids[at]);
            positions_.push_back(at);
            k_cells_.push_back(k_table[at / size] * unit + at % size);
            v_cells_.push_back(v_table[at / size] * unit + at % size);
        }
        is_long_.resize(ids_.size(), step.is_long && step.is_long[row]);
        if (c[3]) sampled_.push_back(int64_t(ids_.size()) - 1);
    }
    slot_.assign(ids_.size(), 0);
    parts_.assign(ids_.size(), 0);
}

// A chunk samples behind its last token.
void Plan::find_sampled() {
    sampled_pieces.clear();
    for (int32_t i = 0; i < int32_t(pieces.size()); i++) {
        const Piece &piece = pieces[size_t(i)];
        const Chunk &chunk = chunks_[size_t(piece.chunk)];
        if (chunk.samples && piece.query + piece.queries == chunk.length) sampled_pieces.push_back(i);
    }
}

// The longest contexts first, so that the last pieces to be claimed are short.
void Plan::cut_tiles(int32_t index) {
    const Chunk &chunk = chunks_[size_t(index)];
    const int64_t per = most(1, TILE_ROWS / (shape_.heads / shape_.kv_heads));
    for (int64_t query = (chunk.length - 1) / per * per; query >= 0; query -= per)
        for (int32_t head = 0; head < shape_.kv_heads; head++)
            pieces.push_back({index, head, 1, query, least(per, chunk.length - query), 0, 0, -1});
}

// `wanted`: pieces of each query that keep all threads busy; where its context has fewer parts, they have fewer heads.
void Plan::cut_decodes(int32_t index, int64_t wanted) {
    const Chunk &chunk = chunks_[size_t(index)];
    for (int64_t query = 0; query < chunk.length; query++) {
        const int64_t context = chunk.start + query + 1, parts = divide_up(context, SPLIT);
        const int64_t cut = most(1, least(divide_up(wanted, parts), least(shape_.kv_heads, context / parts / 64)));
        const size_t token = size_t(chunk.first + query);
        if (parts > 1) slot_[token] = num_slots, parts_[token] = parts;
        for (int64_t key = 0; key < context; key += SPLIT) {
            const int64_t slot = parts > 1 ? num_slots++ : -1;
            for (int64_t i = 0; i < cut; i++) {
                const int32_t first = int32_t(i * shape_.kv_heads / cut), last = int32_t((i + 1) * shape_.kv_heads / cut);
                pieces.push_back({index, first, last - first, query, 1, key, least(SPLIT, context - key), slot});
            }
        }
    }
}

}  // namespace tide
