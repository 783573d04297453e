// A model as a sequence of operations, run as a job of a team of threads.
#pragma once

#include <string>
#include <vector>

#include "abi.h"
#include "kernels.h"
#include "plan.h"
#include "threads.h"

namespace tide {

const Kernels *kernels_of(int32_t level, int32_t type);  // NULL: no such kernels, or not on this processor
const Integers *integers_of(int32_t level, int32_t type, int32_t int8, bool four);  // NULL: the same; `four` bits instead of eight
std::string check_shape(const tm_shape &shape);          // what is wrong, or empty
std::string check_op(const tm_op &op, const tm_shape &shape);
std::string check_linear(const tm_op &op);

// How the rows and panels of a linear layer are cut into chunks: blocks of rows that stay in the cache of a core, each
// with all groups of panels.
struct LinearCut {
    int64_t rows, row_block, panels, group;

    LinearCut(const tm_op &op, int64_t rows, const Kernels &kernels, const Integers *integers, int threads);
    int64_t groups() const { return divide_up(panels, group); }
    int64_t chunks() const { return divide_up(rows, row_block) * groups(); }
    Span rows_of(int64_t chunk) const;
    Span panels_of(int64_t chunk) const;
};

class Tape : public Job {
public:
    Tape(const tm_shape &shape, const tm_op *ops, int64_t count, const Kernels &kernels);

    tm_result begin_step(Team &team, const tm_step &step);
    tm_result run_ops(Team &team, int64_t first, int64_t last);
    tm_result set_weight(int64_t op, const void *weight);

    int64_t count() const { return int64_t(ops_.size()); }
    int64_t num_ops() const override { return last_ - first_; }
    int64_t begin(int64_t op, int threads) override;
    void run(int64_t op, int64_t chunk, int thread) override;
    Leave enter() override;

private:
    int64_t chunks_of(const tm_op &op, int threads);
    Span rows_of(int64_t chunk, int64_t count) const;
    const Integers *integers(const tm_op &op) const { return integers_[op.int8][op.group > 0]; }
    void run_linear(const tm_op &op, int64_t chunk);
    void attend(const tm_op &op, int64_t chunk, int thread);
    int64_t num_pieces(const tm_op &op) const { return int64_t(op.sampled ? plan_.sampled_pieces.size() : plan_.pieces.size()); }
    void take_best();

    tm_shape shape_;
    std::vector<float> inverse_frequencies_, long_frequencies_;
    std::vector<tm_op> ops_;
    const Kernels &kernels_;
    const Integers *integers_[3][2];  // by tm_int8, for 8 bits and for 4
    Plan plan_;
    int threads_ = 1;
    int64_t first_ = 0, last_ = 0;  // operations of the part that runs
    int64_t rows_per_chunk_ = 1, pieces_per_chunk_ = 1, best_chunks_ = 0;
    std::vector<LinearCut> cut_;  // of the operation that runs
    std::vector<std::vector<char>> scratch_;
    std::vector<float> chunk_best_;
    std::vector<int64_t> chunk_best_id_;
    float *best_ = nullptr;
    int64_t *best_id_ = nullptr;
};

}  // namespace tide
