// Run under a sanitizer by tests/test_native_sanitizers.py: the team with jobs of many shapes from two callers, resized,
// stopped and forked on the way, and linear layers and packing at odd sizes.
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "abi.h"
#include "threads.h"

using tide::Job;
using tide::Team;

namespace {

void require(bool right, const char *what) {
    if (right) return;
    fprintf(stderr, "wrong: %s\n", what);
    exit(1);
}

// Every operation adds up what the one before it wrote, so that a chunk that runs too early, twice or never shows.
class Sums : public Job {
public:
    Sums(int64_t ops, int64_t chunks) : chunks_(chunks), values_(size_t(ops + 1), std::vector<int64_t>(size_t(chunks), 1)) {}
    int64_t num_ops() const override { return int64_t(values_.size()) - 1; }
    int64_t begin(int64_t op, int) override { return op % 7 == 3 ? 0 : chunks_ - op % 3; }
    void run(int64_t op, int64_t chunk, int) override {
        const auto &before = values_[size_t(op)];
        int64_t sum = 0;
        for (int64_t value : before) sum += value;
        values_[size_t(op) + 1][size_t(chunk)] = sum % 1000 + chunk;
    }
    bool operator==(const Sums &other) const { return values_ == other.values_; }

private:
    int64_t chunks_;
    std::vector<std::vector<int64_t>> values_;
};

void check_jobs(Team &team, int rounds) {
    Team alone(1);
    for (int i = 0; i < rounds; i++) {
        Sums one(1 + i % 40, 3 + i % 29), other(1 + i % 40, 3 + i % 29);
        team.run(one);
        alone.run(other);
        require(one == other, "sums");
    }
}

void check_linear() {
    char error[100];
    void *team = tm_team_new(3, error, sizeof error);
    for (int32_t level = 0; level < TM_BF16; level++) {
        if (!tm_has_level(level)) continue;
        for (int64_t n : {1, 31, 64, 100})
            for (int64_t k : {1, 33, 96})
                for (int64_t rows : {1, 6, 13, 50}) {
                    const int64_t in_stride = (k + 31) / 32 * 32, out_stride = n;
                    std::vector<float> weight(size_t(n * k), 2.f), x(size_t(rows * in_stride)), out(size_t(rows * out_stride));
                    for (int64_t r = 0; r < rows; r++)
                        for (int64_t i = 0; i < k; i++) x[size_t(r * in_stride + i)] = float(r);
                    std::vector<char> panels(size_t(tm_packed_bytes(TM_FLOAT32, n, k)));
                    tm_pack(TM_FLOAT32, n, k, 0, weight.data(), panels.data());
                    tm_op op{};
                    op.kind = TM_LINEAR, op.n = n, op.k = k, op.in_stride = in_stride, op.out_stride = out_stride;
                    op.in = x.data(), op.weight = panels.data(), op.out = out.data();
                    require(tm_linear(level, TM_FLOAT32, &op, rows, team) == TM_DONE, "linear");
                    for (int64_t r = 0; r < rows; r++)
                        for (int64_t i = 0; i < n; i++) require(out[size_t(r * n + i)] == float(2 * r * k), "product");
                }
    }
    tm_team_delete(team);
}

void check_integers() {
    void *team = tm_team_new(3, nullptr, 0);
    for (int32_t level = 0; level < TM_BF16; level++)
        for (int32_t int8 : {TM_WORDS, TM_BYTES}) {
            if (!tm_has_int8(level, int8)) continue;
            for (int64_t n : {1, 31, 100})
                for (int64_t k : {1, 33, 96})
                    for (int64_t rows : {1, 5, 13, 50}) {
                        const int64_t stride = (k + 31) / 32 * 32;
                        std::vector<int8_t> values(size_t(n * k), 127);
                        std::vector<float> scales(size_t(n), 2.f), x(size_t(rows * stride)), out(size_t(rows * n));
                        for (int64_t r = 0; r < rows; r++)
                            for (int64_t i = 0; i < k; i++) x[size_t(r * stride + i)] = 127;
                        std::vector<char> panels(size_t(tm_int8_bytes(n, k)));
                        tm_pack_int8(n, k, 0, values.data(), scales.data(), panels.data());
                        tm_op op{};
                        op.kind = TM_LINEAR, op.int8 = int8, op.n = n, op.k = k, op.in_stride = stride, op.out_stride = n;
                        op.in = x.data(), op.weight = panels.data(), op.out = out.data();
                        require(tm_linear(level, TM_FLOAT32, &op, rows, team) == TM_DONE, "integers");
                        for (float each : out) require(each == float(2 * 127 * 127 * k), "product of integers");
                        tm_unpack_int8(n, k, 0, panels.data(), values.data(), scales.data());
                        for (int8_t each : values) require(each == 127, "integers back");
                    }
        }
    tm_team_delete(team);
}

void check_nibbles() {
    void *team = tm_team_new(3, nullptr, 0);
    for (int32_t level = 0; level < TM_BF16; level++)
        for (int32_t int8 : {TM_WORDS, TM_BYTES}) {
            if (!tm_has_int8(level, int8)) continue;
            for (int32_t group : {32, 64, 128})
                for (int64_t n : {1, 31, 100})
                    for (int64_t rows : {1, 5, 13, 50}) {
                        const int64_t k = 3 * group;
                        std::vector<uint8_t> values(size_t(n * k / 2), 0xff), zeros(size_t(n * 3), 1);
                        std::vector<uint16_t> scales(size_t(n * 3), 0x3c00);  // 1
                        std::vector<float> base(size_t(n), 2.f), x(size_t(rows * k), 127.f), out(size_t(rows * n));
                        std::vector<char> panels(size_t(tm_int4_bytes(n, k, group)));
                        const tm_int4 weight{values.data(), scales.data(), zeros.data(), base.data()};
                        tm_pack_int4(n, k, group, 0, &weight, panels.data());
                        tm_op op{};
                        op.kind = TM_LINEAR, op.int8 = int8, op.group = group, op.n = n, op.k = k, op.in_stride = k, op.out_stride = n;
                        op.in = x.data(), op.weight = panels.data(), op.out = out.data();
                        require(tm_linear(level, TM_FLOAT32, &op, rows, team) == TM_DONE, "four bits");
                        for (float each : out) require(each == float(2 * 127 * 14 * k), "product of four bits");
                        tm_unpack_int4(n, k, group, 0, panels.data(), &weight);
                        for (uint8_t each : values) require(each == 0xff, "four bits back");
                    }
        }
    tm_team_delete(team);
}

}  // namespace

int main(int count, char **) {
    Team team(4);
    check_jobs(team, 300);
    std::thread second([&] { check_jobs(team, 200); });
    for (int i = 0; i < 20; i++) team.resize(1 + i % 5), check_jobs(team, 5);
    second.join();
    check_linear();
    check_integers();
    check_nibbles();
    if (count == 1) {  // not where a sanitizer cannot follow a fork
        const pid_t child = fork();
        check_jobs(team, 50);
        if (child == 0) _exit(0);
        int status = 1;
        waitpid(child, &status, 0);
        require(status == 0, "the child of a fork");
    }
    puts("right");
}
