// The C interface: every call checks what it is given, and no exception leaves it.
#include "abi.h"

#include <string.h>

#include <new>
#include <string>
#include <vector>

#include "pack.h"
#include "tape.h"
#include "threads.h"

namespace {

using namespace tide;

void tell(const std::string &what, char *error, int64_t size) {
    if (!error || size < 1) return;
    const size_t length = what.size() < size_t(size) ? what.size() : size_t(size) - 1;
    memcpy(error, what.data(), length);
    error[length] = 0;
}

// A linear layer as a job of its own, behind the rounding of its rows where it computes with integers.
class LinearJob : public Job {
public:
    LinearJob(const tm_op &op, int64_t rows, const Kernels &kernels, const Integers *integers)
        : op_(op), quantize_(op), rows_(rows), kernels_(kernels), integers_(integers), cut_(op, rows, kernels, integers, 1) {
        if (!integers) return;
        quantized_.resize(size_t(rows * op.in_stride * integers->element_bytes));
        scales_.resize(size_t(rows * row_scales(op)));
        quantize_.out = quantized_.data(), quantize_.out_stride = op.in_stride, quantize_.residual = scales_.data();
        op_.in = quantized_.data(), op_.scales = scales_.data();
    }
    int64_t num_ops() const override { return integers_ ? 2 : 1; }
    int64_t begin(int64_t op, int threads) override {
        if (integers_ && op == 0) return divide_up(rows_, ROWS);
        cut_ = LinearCut(op_, rows_, kernels_, integers_, threads);
        return cut_.chunks();
    }
    void run(int64_t op, int64_t chunk, int) override {
        if (integers_ && op == 0) return integers_->quantize(quantize_, {chunk * ROWS, least(rows_, (chunk + 1) * ROWS)});
        const auto linear = integers_ ? integers_->linear : kernels_.linear;
        linear(op_, cut_.rows_of(chunk), cut_.panels_of(chunk), nullptr, 0, Best{});
    }
    Leave enter() override {
        if (kernels_.enter) kernels_.enter();
        return kernels_.leave;
    }

private:
    static constexpr int64_t ROWS = 16;  // of a chunk that rounds

    tm_op op_, quantize_;
    int64_t rows_;
    const Kernels &kernels_;
    const Integers *integers_;
    LinearCut cut_;
    std::vector<char> quantized_;
    std::vector<float> scales_;
};

}  // namespace

extern "C" {

int32_t tm_abi(void) { return TM_ABI; }

int64_t tm_struct_bytes(int32_t which) {
    return which == 0 ? sizeof(tm_shape) : which == 1 ? sizeof(tm_op) : which == 2 ? sizeof(tm_step) : 0;
}

int32_t tm_has_level(int32_t level) { return kernels_of(level, TM_BFLOAT16) != nullptr; }
int32_t tm_has_int8(int32_t level, int32_t int8) { return integers_of(level, TM_BFLOAT16, int8, false) != nullptr; }

void *tm_team_new(int32_t threads, char *error, int64_t size) {
    try {
        return new Team(threads);
    } catch (const std::exception &problem) {
        tell(problem.what(), error, size);
        return nullptr;
    }
}
void tm_team_delete(void *team) { delete (Team *)team; }
void tm_team_resize(void *team, int32_t threads) { ((Team *)team)->resize(threads); }
int32_t tm_team_threads(void *team) { return ((Team *)team)->size(); }
void tm_team_stop(void *team) {
    ((Team *)team)->lock();
    ((Team *)team)->stop();
    ((Team *)team)->unlock();
}

void *tm_tape_new(const tm_shape *shape, const tm_op *ops, int64_t count, char *error, int64_t size) {
    try {
        std::string wrong = check_shape(*shape);
        for (int64_t i = 0; i < count && wrong.empty(); i++)
            if (!(wrong = check_op(ops[i], *shape)).empty()) wrong = "operation " + std::to_string(i) + ": " + wrong;
        for (int64_t i = 0; i < count && wrong.empty(); i++)
            if (ops[i].int8 && !integers_of(shape->level, shape->type, ops[i].int8, ops[i].group > 0)) wrong = "this level has no such integers";
        const Kernels *kernels = wrong.empty() ? kernels_of(shape->level, shape->type) : nullptr;
        if (wrong.empty() && !kernels) wrong = "this level has no kernels for the type, or the processor lacks it";
        if (wrong.empty()) return new Tape(*shape, ops, count, *kernels);
        tell(wrong, error, size);
    } catch (const std::exception &problem) {
        tell(problem.what(), error, size);
    }
    return nullptr;
}
void tm_tape_delete(void *tape) { delete (Tape *)tape; }
int32_t tm_tape_begin(void *tape, void *team, const tm_step *step) {
    try {
        return ((Tape *)tape)->begin_step(*(Team *)team, *step);
    } catch (const std::bad_alloc &) {
        return TM_NO_MEMORY;
    }
}
int32_t tm_tape_run_ops(void *tape, void *team, int64_t first, int64_t last) {
    try {
        return ((Tape *)tape)->run_ops(*(Team *)team, first, last);
    } catch (const std::bad_alloc &) {
        return TM_NO_MEMORY;
    }
}
int32_t tm_tape_run(void *tape, void *team, const tm_step *step) {
    if (const int32_t result = tm_tape_begin(tape, team, step)) return result;
    return tm_tape_run_ops(tape, team, 0, ((Tape *)tape)->count());
}
int32_t tm_tape_set_weight(void *tape, int64_t op, const void *weight) { return ((Tape *)tape)->set_weight(op, weight); }

int32_t tm_linear(int32_t level, int32_t type, const tm_op *op, int64_t rows, void *team) {
    const Kernels *kernels = kernels_of(level, type);
    if (!kernels || rows < 0 || op->epilogue == TM_LOGITS || !check_linear(*op).empty()) return TM_BAD_CHUNK;
    if (rows == 0) return TM_DONE;
    const Integers *integers = integers_of(level, type, op->int8, op->group > 0);
    if (op->int8 && !integers) return TM_BAD_CHUNK;
    try {
        LinearJob job(*op, rows, *kernels, integers);
        ((Team *)team)->run(job);
        return TM_DONE;
    } catch (const std::bad_alloc &) {
        return TM_NO_MEMORY;
    }
}

int64_t tm_int8_bytes(int64_t n, int64_t k) { return int8_bytes(n, k); }
void tm_pack_int8(int64_t n, int64_t k, int32_t halves, const int8_t *from, const float *scales, void *to) { pack_int8(n, k, halves, from, scales, to); }
void tm_unpack_int8(int64_t n, int64_t k, int32_t halves, const void *from, int8_t *to, float *scales) { unpack_int8(n, k, halves, from, to, scales); }
int64_t tm_int4_bytes(int64_t n, int64_t k, int64_t group) { return int4_bytes(n, k, group); }
void tm_pack_int4(int64_t n, int64_t k, int64_t group, int32_t halves, const tm_int4 *from, void *to) { pack_int4(n, k, group, halves, *from, to); }
void tm_unpack_int4(int64_t n, int64_t k, int64_t group, int32_t halves, const void *from, const tm_int4 *to) { unpack_int4(n, k, group, halves, from, *to); }
int64_t tm_packed_bytes(int32_t type, int64_t n, int64_t k) { return packed_bytes(type, n, k); }
void tm_pack(int32_t type, int64_t n, int64_t k, int32_t halves, const void *from, void *to) { pack(type, n, k, halves, from, to); }
void tm_unpack(int32_t type, int64_t n, int64_t k, int32_t halves, const void *from, void *to) { unpack(type, n, k, halves, from, to); }
}
