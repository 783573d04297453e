#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

namespace tide {

namespace {

constexpr int SPINS = 1000;   // some 50 us on processors whose pause takes 140 cycles
constexpr int YIELDS = 50;
constexpr uint64_t SEQ_MASK = (uint64_t(1) << 48) - 1;

inline void pause() { __builtin_ia32_pause(); }

void wait_while(std::atomic<uint32_t> &word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t> &word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0); }

// Teams of the process, so that a fork finds none of their threads running.
struct Teams {
    std::mutex lock;
    std::vector<Team *> all;
};
Teams &teams() {
    static Teams *const every = new Teams;  // never destroyed: threads may outlive main
    return *every;
}
void before_fork() {
    teams().lock.lock();
    for (Team *team : teams().all) {
        team->lock();
        team->stop();
    }
}
void after_fork() {
    for (Team *team : teams().all) team->unlock();
    teams().lock.unlock();
}

}  // namespace

Team::Team(int threads) : size_(std::clamp(threads, 1, MAX_THREADS)) {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(before_fork, after_fork, after_fork); });
    std::lock_guard<std::mutex> hold(teams().lock);
    teams().all.push_back(this);
}

Team::~Team() {
    {
        std::lock_guard<std::mutex> hold(teams().lock);
        auto &all = teams().all;
        all.erase(std::remove(all.begin(), all.end(), this), all.end());
    }
    std::lock_guard<std::mutex> hold(running_);
    join();
}

void Team::resize(int threads) { size_ = std::clamp(threads, 1, MAX_THREADS); }
void Team::lock() { running_.lock(); }
void Team::unlock() { running_.unlock(); }
void Team::stop() { join(); }  // the caller holds the lock

void Team::join() {
    stopping_ = true;
    bell_.fetch_add(1);
    wake_all(bell_);
    for (auto &worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
}

void Team::start() {
    const int wanted = size_;
    if (wanted == started_for_ && !(workers_.empty() && wanted > 1)) return;
    join();  // all of them: a range that was not in use holds an old sequence number, which nobody may claim from
    started_for_ = wanted;
    try {
        for (int thread = 1; thread < wanted; thread++)
            workers_.emplace_back([this, thread] { work(thread, 0); });
    } catch (const std::system_error &) {
        // as many as the system gives
    }
    threads_ = int(workers_.size()) + 1;
}

void Team::run(Job &job) {
    std::lock_guard<std::mutex> hold(running_);
    start();
    job_ = &job;
    next_op_ = 0;
    const uint64_t number = ++number_;
    publish();
    work(0, number);
}

// Offers the chunks of the next operation that has any. The order of the stores matters: a thread that reads a range's
// word, then the end for its parity, and then claims by compare-and-swap has read the end that belongs to the word. For
// the end of sequence number s + 2 is stored after every word of s + 1, so that a claim on s fails by then.
void Team::publish() {
    const int threads = threads_.load(std::memory_order_relaxed);
    for (int64_t total = 0; next_op_ < job_->num_ops();) {
        const int64_t op = next_op_++;
        total = job_->begin(op, threads);
        if (total == 0) continue;
        const uint64_t seq = seq_ = (seq_ + 1) & SEQ_MASK;
        op_[seq & 1].store(op, std::memory_order_relaxed);
        total_[seq & 1].store(total, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        for (int i = 0; i < threads; i++)
            ranges_[i].end[seq & 1].store(uint32_t((i + 1) * total / threads), std::memory_order_release);
        for (int i = 0; i < threads; i++)
            ranges_[i].word.store(seq << 16 | uint64_t(i * total / threads), std::memory_order_release);
        ring();
        return;
    }
    finished_.store(number_, std::memory_order_release);
    ring();
}

// Runs chunks of one range, the thread's own first, until it has none. False if no range has any.
bool Team::claim(int thread, Entered &entered) {
    const int threads = threads_.load(std::memory_order_relaxed);
    for (int i = 0; i < threads; i++) {
        Range &range = ranges_[(thread + i) % threads];
        uint64_t word = range.word.load(std::memory_order_acquire);
        bool worked = false;
        while ((word & 0xffff) < range.end[word >> 16 & 1].load(std::memory_order_acquire)) {
            if (!range.word.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire))
                continue;
            const uint64_t seq = word >> 16;
            Job &job = *job_;
            if (entered.number != number_) {  // a thread may go from one job to the next without a rest
                entered.end();
                entered = {number_, job.enter()};
            }
            job.run(op_[seq & 1].load(std::memory_order_relaxed), int64_t(word & 0xffff), thread);
            worked = true;
            const int64_t total = total_[seq & 1].load(std::memory_order_relaxed);
            if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == total) publish();
            word = range.word.load(std::memory_order_acquire);
        }
        if (worked) return true;
    }
    return false;
}

void Team::Entered::end() {
    if (leave) leave();
    *this = {};
}

bool Team::has_work() const {
    const int threads = threads_.load(std::memory_order_relaxed);
    for (int i = 0; i < threads; i++) {
        const uint64_t word = ranges_[i].word.load(std::memory_order_acquire);
        if ((word & 0xffff) < ranges_[i].end[word >> 16 & 1].load(std::memory_order_acquire)) return true;
    }
    return false;
}

// `number`: the job that the caller waits for; 0 for the team's own threads, which work until they are stopped.
void Team::work(int thread, uint64_t number) {
    Entered entered;
    int waited = 0;
    for (;;) {
        if (claim(thread, entered)) {
            waited = 0;
            continue;
        }
        if (number ? finished_.load(std::memory_order_acquire) == number : stopping_.load()) break;
        if (++waited <= SPINS) {
            pause();
        } else if (waited <= SPINS + YIELDS) {
            sched_yield();
        } else {
            entered.end();
            sleep(number);
            waited = 0;
        }
    }
    entered.end();
}

// The sleeper counts itself and then looks for work; who offers work stores it and then looks for sleepers. One of them
// sees the other.
void Team::sleep(uint64_t number) {
    const uint32_t seen = bell_.load();
    sleepers_.fetch_add(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool over = number ? finished_.load() == number : stopping_.load();
    if (!over && !has_work()) wait_while(bell_, seen);
    sleepers_.fetch_sub(1);
}

void Team::ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers_.load() == 0) return;
    bell_.fetch_add(1);
    wake_all(bell_);
}

}  // namespace tide
