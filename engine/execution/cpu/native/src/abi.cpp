// The C interface: every call checks what it is given, and no exception leaves it.
#include "abi.h"

#include <string.h>

#include <new>
#include <string>

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

// A linear layer as a job of its own.
class LinearJob : public Job {
public:
    LinearJob(const tm_op &op, int64_t rows, const Kernels &kernels) : op_(op), rows_(rows), kernels_(kernels), cut_(op, rows, kernels.activation_bytes, 1) {}
    int64_t num_ops() const override { return 1; }
    int64_t begin(int64_t, int threads) override {
        cut_ = LinearCut(op_, rows_, kernels_.activation_bytes, threads);
        return cut_.chunks();
    }
    void run(int64_t, int64_t chunk, int) override {
        kernels_.linear(op_, cut_.rows_of(chunk), cut_.panels_of(chunk), nullptr, 0, Best{});
    }
    Leave enter() override {
        if (kernels_.enter) kernels_.enter();
        return kernels_.leave;
    }

private:
    const tm_op &op_;
    int64_t rows_;
    const Kernels &kernels_;
    LinearCut cut_;
};

}  // namespace

extern "C" {

int32_t tm_abi(void) { return TM_ABI; }

int64_t tm_struct_bytes(int32_t which) {
    return which == 0 ? sizeof(tm_shape) : which == 1 ? sizeof(tm_op) : which == 2 ? sizeof(tm_step) : 0;
}

int32_t tm_has_level(int32_t level) { return kernels_of(level, TM_BFLOAT16) != nullptr; }

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
int32_t tm_tape_run(void *tape, void *team, const tm_step *step) {
    try {
        return ((Tape *)tape)->run(*(Team *)team, *step);
    } catch (const std::bad_alloc &) {
        return TM_NO_MEMORY;
    }
}
void tm_tape_seconds(void *tape, double *seconds) { ((Tape *)tape)->take_seconds(seconds); }

int32_t tm_linear(int32_t level, int32_t type, const tm_op *op, int64_t rows, void *team) {
    const Kernels *kernels = kernels_of(level, type);
    if (!kernels || rows < 0 || op->epilogue == TM_LOGITS || !check_linear(*op).empty()) return TM_BAD_CHUNK;
    if (rows == 0) return TM_DONE;
    LinearJob job(*op, rows, *kernels);
    ((Team *)team)->run(job);
    return TM_DONE;
}

int64_t tm_packed_bytes(int32_t type, int64_t n, int64_t k) { return packed_bytes(type, n, k); }
void tm_pack(int32_t type, int64_t n, int64_t k, int32_t halves, const void *from, void *to) { pack(type, n, k, halves, from, to); }
void tm_unpack(int32_t type, int64_t n, int64_t k, int32_t halves, const void *from, void *to) { unpack(type, n, k, halves, from, to); }
}
